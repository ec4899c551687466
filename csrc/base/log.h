// The library's log: one line per statement, to stderr or to a file in HIE_LOG_DIR, as text or,
// with ALLSPARK_LOG_FORMAT=json, as a JSON object. HIE_LOG_LEVEL is the lowest level that is
// logged: -1 debug, 0 info, 1 warning (the default), 2 error, 3 nothing. The environment is read
// once, at the first statement. Thread-safe; a statement below the level evaluates nothing and
// allocates nothing. The log never ends the process and throws nothing: without memory, a line is
// shortened or left out.
#pragma once

#include <atomic>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace allspark {

enum class LogLevel : int { kDebug = -1, kInfo = 0, kWarning = 1, kError = 2, kOff = 3 };

struct LogConfig {
  LogLevel level = LogLevel::kWarning;
  std::string dir;  // Empty: stderr.
  bool is_json = false;

  // Reads the environment. A malformed variable is logged, and its field keeps the default.
  static LogConfig FromEnv();
};

// Replaces the settings of the environment. The log is appended to DIR/allspark.PID.log; if that
// file cannot be opened, the log goes to stderr and says so.
void ConfigureLog(const LogConfig& config);

// A named value of a line: key=value in text, a member of the object in JSON.
struct LogField {
  // The value is "?" where the heap has no memory for it.
  LogField(const char* name, std::string_view text) noexcept;
  LogField(const char* name, int64_t number) noexcept;

  const char* key;
  std::string value;
  bool is_text;
};

namespace internal {

inline constexpr int kNotConfigured = -2;  // until the first statement
extern std::atomic<int> log_level;
int InitLogLevel();

inline bool LogEnabled(LogLevel level) {
  int enabled_from = log_level.load(std::memory_order_relaxed);
  if (enabled_from == kNotConfigured) [[unlikely]] {
    enabled_from = InitLogLevel();
  }
  return static_cast<int>(level) >= enabled_from;
}

// Collects a line and writes it, in one piece, at the end of the statement.
class LogMessage {
 public:
  LogMessage(LogLevel level, const char* file, int line)
      : level_(level), file_(file), line_(line) {}
  ~LogMessage();
  LogMessage(const LogMessage&) = delete;
  LogMessage& operator=(const LogMessage&) = delete;
  template <typename T>
  LogMessage& operator<<(const T& value) {
    stream_ << value;
    return *this;
  }
  LogMessage& operator<<(LogField field) noexcept;

 private:
  const LogLevel level_;
  const char* const file_;
  const int line_;
  std::ostringstream stream_;
  std::vector<LogField> fields_;
};

}  // namespace internal
}  // namespace allspark

// AS_LOG(kWarning) << "text";
#define AS_LOG(level)                                                     \
  switch (0)                                                              \
  case 0:                                                                 \
  default:                                                                \
    if (!::allspark::internal::LogEnabled(::allspark::LogLevel::level)) { \
    } else                                                                \
      ::allspark::internal::LogMessage(::allspark::LogLevel::level, __FILE__, __LINE__)

// Logs at any level: for lines that an environment variable of their own turns on, and while the
// level is still being read.
#define AS_LOG_ANYWAY(level) \
  ::allspark::internal::LogMessage(::allspark::LogLevel::level, __FILE__, __LINE__)

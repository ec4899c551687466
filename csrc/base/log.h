// The library's log: one line per statement, to stderr or to a file in HIE_LOG_DIR. HIE_LOG_LEVEL
// says from which level on: 0 info, 1 warning (the default), 2 error, 3 nothing. Read once, at the
// first statement. Thread-safe; a statement below the level evaluates nothing and allocates
// nothing. The log never ends the process.
#pragma once

#include <atomic>
#include <sstream>
#include <string>

namespace allspark {

enum class LogLevel : int { kInfo = 0, kWarning = 1, kError = 2, kOff = 3 };

struct LogConfig {
  LogLevel level = LogLevel::kWarning;
  std::string dir;  // Empty: stderr.

  // Reads the environment. A malformed level keeps the default and is itself logged.
  static LogConfig FromEnv();
};

// Replaces what the environment said. The file is DIR/allspark.PID.log, appended to; where it
// cannot be opened the log goes to stderr and says so.
void ConfigureLog(const LogConfig& config);

namespace internal {

// -1 until the first statement.
extern std::atomic<int> log_level;
int InitLogLevel();

inline bool LogEnabled(LogLevel level) {
  int enabled_from = log_level.load(std::memory_order_relaxed);
  if (enabled_from < 0) [[unlikely]] {
    enabled_from = InitLogLevel();
  }
  return static_cast<int>(level) >= enabled_from;
}

// Collects a line and writes it, in one piece, at the end of the statement.
class LogMessage {
 public:
  LogMessage(LogLevel level, const char* file, int line);
  ~LogMessage();
  LogMessage(const LogMessage&) = delete;
  LogMessage& operator=(const LogMessage&) = delete;
  template <typename T>
  LogMessage& operator<<(const T& value) {
    stream_ << value;
    return *this;
  }

 private:
  std::ostringstream stream_;
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

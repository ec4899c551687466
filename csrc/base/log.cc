#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>
#include <system_error>

#include "base/json.h"
#include "base/source_path.h"

namespace allspark {

namespace {

// Where lines go. Kept for the life of the process: threads may log while it exits.
struct Sink {
  std::mutex mutex;
  int fd = STDERR_FILENO;  // guarded by mutex
  std::atomic<bool> is_json{false};
};
Sink& TheSink() {
  static Sink* const sink = [] {
    // A thread that writes a line while another one forks would leave the mutex locked in the fork.
    pthread_atfork([] { TheSink().mutex.lock(); }, [] { TheSink().mutex.unlock(); },
                   [] { TheSink().mutex.unlock(); });
    return new Sink;
  }();
  return *sink;
}

void WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // A log that cannot be written is no reason to fail.
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// "2025-01-31T23:59:59.999Z", UTC.
std::string Now() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm utc{};
  gmtime_r(&now.tv_sec, &utc);
  char date[32];
  strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char text[48];
  snprintf(text, sizeof(text), "%s.%03dZ", date, static_cast<int>(now.tv_nsec / 1'000'000));
  return text;
}

// Quotes a text that is empty or that a reader could take for more than one value.
std::string TextValue(const LogField& field) {
  const bool is_plain =
      !field.value.empty() && std::none_of(field.value.begin(), field.value.end(), [](char c) {
        return c == '=' || c == '"' || static_cast<unsigned char>(c) <= ' ';
      });
  return is_plain || !field.is_text ? field.value : JsonString(field.value);
}

struct Line {
  LogLevel level;
  std::string source;
  std::string message;
  const std::vector<LogField>& fields;
};

// "W 2025-01-31T23:59:59.999Z 4711 engine/engine.cc:12] message key=value".
std::string ToText(const Line& line) {
  std::string text{"DIWE"[static_cast<int>(line.level) + 1]};
  text += ' ' + Now() + ' ' + std::to_string(syscall(SYS_gettid)) + ' ' + line.source + "] " +
          line.message;
  for (const LogField& field : line.fields) {
    text += std::string(" ") + field.key + '=' + TextValue(field);
  }
  return text + '\n';
}

std::string ToJson(const Line& line) {
  constexpr const char* kLevels[] = {"debug", "info", "warning", "error"};
  std::string text =
      "{\"time\":\"" + Now() + "\",\"level\":\"" + kLevels[static_cast<int>(line.level) + 1] +
      "\",\"thread\":" + std::to_string(syscall(SYS_gettid)) +
      ",\"source\":" + JsonString(line.source) + ",\"message\":" + JsonString(line.message);
  for (const LogField& field : line.fields) {
    text += ",\"" + std::string(field.key) +
            "\":" + (field.is_text ? JsonString(field.value) : field.value);
  }
  return text + "}\n";
}

}  // namespace

namespace internal {

std::atomic<int> log_level{kNotConfigured};

int InitLogLevel() {
  static std::once_flag once;
  try {
    std::call_once(once, [] {
      // Unless ConfigureLog came first.
      if (log_level.load() == kNotConfigured) ConfigureLog(LogConfig::FromEnv());
    });
  } catch (const std::bad_alloc&) {
    return static_cast<int>(LogLevel::kWarning);  // The next statement tries again.
  }
  return log_level.load();
}

LogMessage& LogMessage::operator<<(LogField field) noexcept {
  try {
    fields_.push_back(std::move(field));
  } catch (const std::bad_alloc&) {
    // The line is written without this field.
  }
  return *this;
}

LogMessage::~LogMessage() {
  try {
    const Line line{level_, std::string(SourcePath(file_)) + ':' + std::to_string(line_),
                    stream_.str(), fields_};
    Sink& sink = TheSink();
    const std::string text = sink.is_json ? ToJson(line) : ToText(line);
    const std::lock_guard<std::mutex> lock(sink.mutex);
    WriteAll(sink.fd, text);
  } catch (...) {
    // A log that cannot be written is no reason to fail.
  }
}

}  // namespace internal

LogField::LogField(const char* name, std::string_view text) noexcept : key(name), is_text(true) {
  try {
    value = text;
  } catch (const std::bad_alloc&) {
    value = "?";
  }
}

LogField::LogField(const char* name, int64_t number) noexcept : key(name), is_text(false) {
  try {
    value = std::to_string(number);
  } catch (const std::bad_alloc&) {
    value = "?";
    is_text = true;
  }
}

LogConfig LogConfig::FromEnv() {
  LogConfig config;
  if (const char* const dir = std::getenv("HIE_LOG_DIR")) config.dir = dir;
  if (const char* const level = std::getenv("HIE_LOG_LEVEL")) {
    const std::string_view text = level;
    if (text == "-1") {
      config.level = LogLevel::kDebug;
    } else if (text.size() == 1 && text[0] >= '0' && text[0] <= '3') {
      config.level = static_cast<LogLevel>(text[0] - '0');
    } else {
      AS_LOG_ANYWAY(kWarning)
          << "HIE_LOG_LEVEL is \"" << text
          << "\"; it must be -1 (debug), 0 (info), 1 (warning), 2 (error) or 3 (nothing)";
    }
  }
  if (const char* const format = std::getenv("ALLSPARK_LOG_FORMAT")) {
    const std::string_view text = format;
    config.is_json = text == "json";
    if (text != "json" && text != "text") {
      AS_LOG_ANYWAY(kWarning) << "ALLSPARK_LOG_FORMAT is \"" << text
                              << "\"; it must be text or json";
    }
  }
  return config;
}

void ConfigureLog(const LogConfig& config) {
  int fd = STDERR_FILENO;
  std::string problem;
  if (!config.dir.empty()) {
    const std::string path = config.dir + "/allspark." + std::to_string(getpid()) + ".log";
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) {
      problem = "cannot open " + path + ": " + std::generic_category().message(errno);
      fd = STDERR_FILENO;
    }
  }
  Sink& sink = TheSink();
  {
    const std::lock_guard<std::mutex> lock(sink.mutex);
    if (sink.fd != STDERR_FILENO) close(sink.fd);
    sink.fd = fd;
    sink.is_json = config.is_json;
  }
  internal::log_level.store(static_cast<int>(config.level));
  if (!problem.empty()) {
    AS_LOG(kWarning) << "the log goes to stderr: " << problem;
  }
}

}  // namespace allspark

#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>

#include "base/source_path.h"

namespace allspark {

namespace {

// Where lines go. Kept for the life of the process: threads may log while it exits.
struct Sink {
  std::mutex mutex;
  int fd = STDERR_FILENO;  // Guarded by mutex.
};
Sink& TheSink() {
  static Sink* const sink = new Sink;
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

// "W 2025-01-31T23:59:59.999Z 4711 ", UTC.
std::string LinePrefix(LogLevel level) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm utc{};
  gmtime_r(&now.tv_sec, &utc);
  char date[32];
  strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char text[96];
  snprintf(text, sizeof(text), "%c %s.%03dZ %ld ", "IWE?"[static_cast<int>(level) & 3], date,
           static_cast<int>(now.tv_nsec / 1'000'000), static_cast<long>(syscall(SYS_gettid)));
  return text;
}

}  // namespace

namespace internal {

std::atomic<int> log_level{-1};

int InitLogLevel() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Unless ConfigureLog came first.
    if (log_level.load() < 0) ConfigureLog(LogConfig::FromEnv());
  });
  return log_level.load();
}

LogMessage::LogMessage(LogLevel level, const char* file, int line) {
  stream_ << LinePrefix(level) << SourcePath(file) << ':' << line << "] ";
}

LogMessage::~LogMessage() {
  stream_ << '\n';
  Sink& sink = TheSink();
  const std::lock_guard<std::mutex> lock(sink.mutex);
  WriteAll(sink.fd, stream_.view());
}

}  // namespace internal

LogConfig LogConfig::FromEnv() {
  LogConfig config;
  if (const char* const dir = std::getenv("HIE_LOG_DIR")) config.dir = dir;
  if (const char* const level = std::getenv("HIE_LOG_LEVEL")) {
    const std::string_view text = level;
    if (text.size() == 1 && text[0] >= '0' && text[0] <= '3') {
      config.level = static_cast<LogLevel>(text[0] - '0');
    } else {
      internal::LogMessage(LogLevel::kWarning, __FILE__, __LINE__)
          << "HIE_LOG_LEVEL is \"" << text
          << "\"; it must be 0 (info), 1 (warning), 2 (error) or 3 (nothing)";
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
      problem = "cannot open " + path + ": " + strerror(errno);
      fd = STDERR_FILENO;
    }
  }
  Sink& sink = TheSink();
  {
    const std::lock_guard<std::mutex> lock(sink.mutex);
    if (sink.fd != STDERR_FILENO) close(sink.fd);
    sink.fd = fd;
  }
  internal::log_level.store(static_cast<int>(config.level));
  if (!problem.empty()) {
    AS_LOG(kWarning) << "the log goes to stderr: " << problem;
  }
}

}  // namespace allspark

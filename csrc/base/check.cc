#include "base/check.h"

#include <string_view>

#include "base/source_path.h"

namespace allspark::internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  stream_ << SourcePath(file) << ':' << line << ": check failed: " << condition << ": ";
}

CheckFailure::~CheckFailure() noexcept(false) {
  std::string text = std::move(stream_).str();
  // Nothing was streamed after the condition.
  if (text.ends_with(": ")) text.resize(text.size() - 2);
  throw InternalError(text);
}

}  // namespace allspark::internal

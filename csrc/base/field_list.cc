#include "base/field_list.h"

namespace allspark {

namespace {

// The bound of an integer field as int64; a bound outside of int64 becomes the nearest int64.
int64_t SaturatedBound(double bound) {
  // 2^63 is exact as a double; the largest int64 is not.
  if (bound >= 0x1p63) return std::numeric_limits<int64_t>::max();
  if (bound <= -0x1p63) return std::numeric_limits<int64_t>::min();
  return static_cast<int64_t>(bound);
}

Status OutOfRange(const char* name, const std::string& value, const std::string& min,
                  const std::string& max) {
  std::string range;
  if (!min.empty() && !max.empty()) {
    range = "in [" + min + ", " + max + "]";
  } else if (!min.empty()) {
    range = "at least " + min;
  } else if (!max.empty()) {
    range = "at most " + max;
  } else {
    range = "a number";
  }
  return Status::InvalidArgument(std::string(name) + " is " + value + "; it must be " + range);
}

}  // namespace

std::string FormatValue(bool value) { return value ? "true" : "false"; }
std::string FormatValue(int64_t value) { return std::to_string(value); }

std::string FormatValue(double value) {
  if (std::isnan(value)) return "nan";
  std::array<char, 40> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return std::string(text.data(), end);
}

std::string FormatValue(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + '"';
}

std::string FormatValue(CacheMode value) {
  switch (value) {
    case CacheMode::kDefault:
      return "AsCacheDefault";
    case CacheMode::kQuantI8:
      return "AsCacheQuantI8";
    case CacheMode::kQuantU4:
      return "AsCacheQuantU4";
    case CacheMode::kQuantK8V4:
      return "AsCacheQuantK8V4";
  }
  return std::to_string(static_cast<int>(value));
}

Status CheckRange(const char* name, int64_t value, double min, double max) {
  const int64_t low = SaturatedBound(min);
  const int64_t high = SaturatedBound(max);
  if (value >= low && value <= high) return Status::Ok();
  return OutOfRange(name, FormatValue(value), std::isinf(min) ? "" : FormatValue(low),
                    std::isinf(max) ? "" : FormatValue(high));
}

Status CheckRange(const char* name, double value, double min, double max) {
  if (value >= min && value <= max) return Status::Ok();  // False for NaN.
  return OutOfRange(name, FormatValue(value), std::isinf(min) ? "" : FormatValue(min),
                    std::isinf(max) ? "" : FormatValue(max));
}

}  // namespace allspark

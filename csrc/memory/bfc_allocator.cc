#include "memory/bfc_allocator.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "base/field_list.h"
#include "memory/bfc_region.h"
#include "memory/system_allocator.h"

namespace allspark {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMaxLeftoverMb = int64_t{1} << 40;

Status Malformed(const char* name, const char* value, const char* form) {
  return Status::InvalidArgument(std::string(name) + " is \"" + value + "\"; it must be " + form);
}

// Each leaves `value` as it is where the variable is not set.
Status ReadBool(const char* name, bool* value) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return Status::Ok();
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == "on" || lower == "1" || lower == "true") {
    *value = true;
  } else if (lower == "off" || lower == "0" || lower == "false") {
    *value = false;
  } else {
    return Malformed(name, text, "ON or OFF (or 1/0, true/false)");
  }
  return Status::Ok();
}

template <typename T>
Status ReadNumber(const char* name, T* value, const char* form, bool (*is_legal)(T)) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return Status::Ok();
  const std::string_view view = text;
  T number{};
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), number);
  if (error != std::errc() || end != view.data() + view.size() || !is_legal(number)) {
    return Malformed(name, text, form);
  }
  *value = number;
  return Status::Ok();
}

// False for NaN.
bool IsLegalRatio(double ratio) { return ratio > 0 && ratio <= 1; }
bool IsLegalShare(double share) { return share >= 0 && share <= 1; }
bool IsLegalLeftover(int64_t leftover_mb) {
  return leftover_mb >= 0 && leftover_mb <= kMaxLeftoverMb;
}

}  // namespace

Result<BfcOptions> BfcOptions::FromEnv() {
  BfcOptions options;
  AS_RETURN_IF_ERROR(ReadBool("BFC_ALLOCATOR", &options.enabled));
  AS_RETURN_IF_ERROR(ReadNumber<double>("BFC_MEM_RATIO", &options.mem_ratio,
                                        "a number above 0 and at most 1, such as 0.9",
                                        IsLegalRatio));
  AS_RETURN_IF_ERROR(ReadNumber<int64_t>("BFC_LEFTOVER_MB", &options.leftover_mb,
                                         "a whole number of MiB from 0 to 1099511627776",
                                         IsLegalLeftover));
  AS_RETURN_IF_ERROR(ReadNumber<double>("CPU_CACHE_RATIO", &options.cpu_cache_ratio,
                                        "a number from 0 to 1, such as 0.3", IsLegalShare));
  AS_RETURN_IF_ERROR(ReadBool("BFC_ALLOW_GROWTH", &options.allow_growth));
  return options;
}

Result<std::unique_ptr<Allocator>> CreateCpuBfcAllocator(const BfcOptions& options,
                                                         int64_t total_bytes,
                                                         const std::string& total_source) {
  if (!IsLegalRatio(options.mem_ratio)) {
    return Status::InvalidArgument("mem_ratio is " + FormatValue(options.mem_ratio) +
                                   "; it must be above 0 and at most 1");
  }
  if (!IsLegalLeftover(options.leftover_mb)) {
    return Status::InvalidArgument("leftover_mb is " + std::to_string(options.leftover_mb) +
                                   "; it must be from 0 to " + std::to_string(kMaxLeftoverMb));
  }
  const int64_t usable = total_bytes - options.leftover_mb * kMiB;
  const int64_t bytes =
      usable <= 0 ? 0 : static_cast<int64_t>(static_cast<double>(usable) * options.mem_ratio);
  const std::string source = total_source.empty() ? "" : "; " + total_source;
  if (bytes < 2 * kMiB) {
    return Status::ResourceExhausted(
        "no memory for the pool: (" + std::to_string(total_bytes / kMiB) +
        " MiB in all - BFC_LEFTOVER_MB " + std::to_string(options.leftover_mb) +
        ") * BFC_MEM_RATIO " + FormatValue(options.mem_ratio) + " must be at least 2 MiB" + source);
  }
  if (!options.enabled) return std::unique_ptr<Allocator>(std::make_unique<SystemAllocator>(bytes));
  Result<std::unique_ptr<BfcRegion>> region = BfcRegion::Create(bytes, options.allow_growth);
  if (!region.ok()) {
    return Status(region.status().code(), region.status().message() + source +
                                              "; a BFC_MEM_RATIO below " +
                                              FormatValue(options.mem_ratio) + " takes less");
  }
  return std::unique_ptr<Allocator>(std::move(region).value());
}

}  // namespace allspark

// Numbers that tests of many layers need.
#pragma once

#include <cstdint>
#include <limits>

namespace allspark::testing {

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace allspark::testing

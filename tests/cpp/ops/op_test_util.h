// Shared by the op tests: a kernel table whose entries the test sets, and matrices over vectors.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"
#include "ops/op_context.h"

namespace allspark::testing {

inline constexpr int kFloatSlot = static_cast<int>(DType::kFloat32);
inline constexpr int kBFloat16Slot = static_cast<int>(DType::kBFloat16);

inline Matrix FloatMatrix(std::vector<float>& data, int64_t rows, int64_t cols, int64_t ld = 0) {
  return {data.data(), DType::kFloat32, rows, cols, ld == 0 ? cols : ld};
}

// Expects that `run` throws InternalError with `part` in its message.
template <typename Run>
void ExpectCheck(Run&& run, const std::string& part) {
  try {
    run();
    ADD_FAILURE() << "no error; expected one with: " << part;
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

}  // namespace allspark::testing

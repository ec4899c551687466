#include "tensor/tensor_view.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace allspark {
namespace {

TEST(DTypeTest, BytesAndNames) {
  EXPECT_EQ(ElementBytes(DType::kFloat32), 4);
  EXPECT_EQ(ElementBytes(DType::kBFloat16), 2);
  EXPECT_EQ(ElementBytes(DType::kFloat16), 2);
  EXPECT_EQ(ElementBytes(DType::kInt8), 1);
  EXPECT_EQ(ElementBytes(DType::kInt64), 8);
  EXPECT_EQ(ElementBytes(DType::kUndefined), 0);
  EXPECT_EQ(ElementBytes(DType::kUInt4), 0);
  EXPECT_EQ(ElementBytes(static_cast<DType>(7)), 0);
  EXPECT_EQ(ElementBits(DType::kUInt4), 4);
  EXPECT_EQ(PackedBytes(DType::kUInt4, 6), 3);
  EXPECT_EQ(PackedBytes(DType::kUInt2, 8), 2);
  EXPECT_STREQ(DTypeName(DType::kFloat32), "float32");
  EXPECT_STREQ(DTypeName(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(DTypeName(static_cast<DType>(99)), "unknown");
  std::set<std::string> names;
  for (int i = 0; i <= 13; ++i) {
    if (i != 7) names.insert(DTypeName(static_cast<DType>(i)));
  }
  EXPECT_EQ(names.size(), 13u);
}

}  // namespace
}  // namespace allspark

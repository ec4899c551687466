#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "memory/system_allocator.h"
#include "support/fault_allocator.h"

namespace allspark {
namespace {

using Dims = std::vector<int64_t>;

TEST(DTypeTest, BytesAndNames) {
  EXPECT_EQ(ElementBytes(DType::kFloat32), 4);
  EXPECT_EQ(ElementBytes(DType::kBFloat16), 2);
  EXPECT_EQ(ElementBytes(DType::kFloat16), 2);
  EXPECT_EQ(ElementBytes(DType::kInt8), 1);
  EXPECT_EQ(ElementBytes(DType::kInt64), 8);
  EXPECT_EQ(ElementBytes(DType::kUndefined), 0);
  EXPECT_EQ(ElementBytes(DType::kUInt4), 0);
  EXPECT_EQ(ElementBytes(static_cast<DType>(7)), 0);
  EXPECT_STREQ(DTypeName(DType::kFloat32), "float32");
  EXPECT_STREQ(DTypeName(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(DTypeName(static_cast<DType>(99)), "unknown");
  std::set<std::string> names;
  for (int i = 0; i <= 13; ++i) {
    if (i != 7) names.insert(DTypeName(static_cast<DType>(i)));
  }
  EXPECT_EQ(names.size(), 13u);
}

TEST(ContiguousViewTest, RowMajorStrides) {
  const float data[24] = {};
  const TensorView view = ContiguousView(data, DType::kFloat32, Dims{2, 3, 4});
  EXPECT_EQ(view.data, data);
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.dims[0], 2);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(ContiguousView(data, DType::kFloat32, {}).rank, 0);
  EXPECT_EQ(ContiguousView(data, DType::kFloat32, Dims{5, 0, 4}).strides[0], 4);
  EXPECT_THROW(ContiguousView(data, DType::kFloat32, Dims{1, 1, 1, 1, 1}), InternalError);
  EXPECT_THROW(ContiguousView(data, DType::kFloat32, Dims{-1}), InternalError);
}

TEST(TensorTest, OwnsItsElements) {
  SystemAllocator allocator(1 << 20);
  {
    auto created = Tensor::Create(&allocator, DType::kBFloat16, Dims{3, 5});
    ASSERT_TRUE(created.ok()) << created.status().ToString();
    Tensor tensor = std::move(created).value();
    EXPECT_EQ(tensor.dtype(), DType::kBFloat16);
    EXPECT_EQ(tensor.rank(), 2);
    EXPECT_EQ(tensor.num_elements(), 15);
    EXPECT_EQ(tensor.bytes(), 30);
    tensor.data_as<BFloat16>()[14] = ToBFloat16(1.5f);
    const Tensor moved = std::move(tensor);
    EXPECT_EQ(ToFloat(moved.data_as<BFloat16>()[14]), 1.5f);
    EXPECT_EQ(moved.view().data, moved.data());
    EXPECT_EQ(moved.view().strides[0], 5);
    EXPECT_EQ(allocator.Stats().num_live, 1);
  }
  EXPECT_EQ(allocator.Stats().num_live, 0);
}

TEST(TensorTest, ScalarsAndEmptyTensors) {
  SystemAllocator allocator(1 << 20);
  auto scalar = Tensor::Create(&allocator, DType::kFloat32, {});
  ASSERT_TRUE(scalar.ok());
  EXPECT_EQ(scalar->num_elements(), 1);
  EXPECT_EQ(scalar->bytes(), 4);
  auto empty = Tensor::Create(&allocator, DType::kFloat32, Dims{4, 0});
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->num_elements(), 0);
  EXPECT_EQ(empty->bytes(), 0);
  EXPECT_EQ(Tensor().num_elements(), 0);
}

TEST(TensorTest, BadShapesAreRefused) {
  SystemAllocator allocator(1 << 20);
  const auto message = [&](DType dtype, const Dims& dims) {
    const auto tensor = Tensor::Create(&allocator, dtype, dims);
    EXPECT_EQ(tensor.status().code(), StatusCode::kInvalidArgument);
    return tensor.status().message();
  };
  EXPECT_EQ(message(DType::kFloat32, {1, 2, 3, 4, 5}),
            "the shape [1, 2, 3, 4, 5] has rank 5; it must be at most 4");
  EXPECT_EQ(message(DType::kFloat32, {2, -1}), "the shape [2, -1] has a negative dimension");
  EXPECT_EQ(message(DType::kFloat32, {int64_t{1} << 61, 4}),
            "the shape [2305843009213693952, 4] has too many elements");
  EXPECT_EQ(message(DType::kFloat32, {int64_t{1} << 61, 0, 4}),
            "the shape [2305843009213693952, 0, 4] has too many elements");
  EXPECT_EQ(message(DType::kUInt4, {2}), "a tensor cannot hold elements of type uint4");
  EXPECT_EQ(message(DType::kUndefined, {2}), "a tensor cannot hold elements of type undefined");
}

TEST(TensorTest, NoRoomIsResourceExhausted) {
  SystemAllocator inner(1 << 20);
  testing::FaultAllocator allocator(&inner);
  allocator.FailNth(1);
  EXPECT_EQ(Tensor::Create(&allocator, DType::kFloat32, Dims{2}).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(inner.Stats().num_live, 0);
}

}  // namespace
}  // namespace allspark

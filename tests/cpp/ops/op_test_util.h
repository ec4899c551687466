// Shared by the op tests: the device that their ops run on, with matrices over the tests' vectors,
// kernel tables whose entries the test sets, and expected errors.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "memory/system_allocator.h"
#include "ops/op_context.h"
#include "support/sim_device.h"

namespace allspark::testing {

inline constexpr int kFloatSlot = static_cast<int>(DType::kFloat32);
inline constexpr int kBFloat16Slot = static_cast<int>(DType::kBFloat16);

// The device of an op test: the CPU, or the one that ALLSPARK_TEST_DEVICE names
// (support/sim_device.h). A test keeps its operands in vectors. The CPU's ops work on these
// themselves, so that a sanitizer sees where they end; those of a device with memory of its own
// work on copies, one for each vector.
class OpDevice {
 public:
  // `table` outlives it, and may change meanwhile. scratch_floats: of each row of
  // OpContext::row_scratch; 0: there is none.
  OpDevice(const kernels::KernelTable& table, int num_threads, int64_t scratch_floats = 0)
      : device_(MakeTestDevice({std::make_shared<SystemAllocator>(int64_t{1} << 32),
                                std::make_shared<ThreadPool>(num_threads, false), &table})),
        scratch_(static_cast<size_t>(device_->ops().num_scratch_rows() * scratch_floats)),
        context_{&device_->ops(), {Put(scratch_), scratch_floats}} {}

  const OpContext& context() const { return context_; }
  Device& device() { return *device_; }

  // Returns: where ops find the vector's elements, as they are now. Null if there are none.
  template <typename T>
  T* Put(std::vector<T>& host) {
    const size_t bytes = host.size() * sizeof(T);
    if (bytes == 0 || !device_->has_own_memory()) return host.data();
    Buffer& copy = copies_[host.data()];
    if (copy.bytes() != bytes) {
      former_copies_.push_back(std::move(copy));  // An op that waits may read it.
      Result<Buffer> created = Buffer::Create(device_->allocator(), bytes);
      AS_CHECK(created.ok()) << created.status().ToString();
      copy = std::move(*created);
    }
    device_->ops().Upload(copy.data(), host.data(), bytes);
    return static_cast<T*>(copy.data());
  }
  template <typename T>
  const T* Put(const std::vector<T>& host) {
    return Put(const_cast<std::vector<T>&>(host));
  }
  Matrix Floats(std::vector<float>& host, int64_t rows, int64_t cols, int64_t ld = 0) {
    return {Put(host), DType::kFloat32, rows, cols, ld == 0 ? cols : ld};
  }

  // Brings what the ops made of a vector's elements, once they have run. Returns: the vector, which
  // was Put.
  template <typename T>
  std::vector<T>& Fetch(std::vector<T>& host) {
    if (host.empty() || !device_->has_own_memory()) return host;
    const Buffer& copy = copies_.at(host.data());
    AS_CHECK(copy.bytes() == host.size() * sizeof(T)) << "the vector's size has changed";
    device_->ops().Download(host.data(), copy.data(), copy.bytes());
    return host;
  }

 private:
  const std::shared_ptr<Device> device_;
  std::map<const void*, Buffer> copies_;  // by the vector's data()
  std::vector<Buffer> former_copies_;
  std::vector<float> scratch_;
  const OpContext context_;
};

// A test whose ops run on GetParam() threads, over a copy of a kernel table.
class OpTest : public ::testing::TestWithParam<int> {
 protected:
  explicit OpTest(const kernels::KernelTable& table, int64_t scratch_floats = 0)
      : table_(table), device_(table_, GetParam(), scratch_floats), context_(device_.context()) {}

  // As OpDevice has them.
  template <typename Vector>
  auto* Put(Vector& host) {
    return device_.Put(host);
  }
  template <typename Vector>
  Vector& Fetch(Vector& host) {
    return device_.Fetch(host);
  }
  Matrix Floats(std::vector<float>& host, int64_t rows, int64_t cols, int64_t ld = 0) {
    return device_.Floats(host, rows, cols, ld);
  }

  kernels::KernelTable table_;
  OpDevice device_;
  const OpContext context_;
};

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

// StepImage: the integers of a step, handed over to the device at once. Whoever puts integers into
// it has checked them: ops cannot look at what lies in a device's memory. Nothing allocates after
// Create.
#pragma once

#include <cstdint>
#include <vector>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "ops/device.h"

namespace allspark {

class StepImage {
 public:
  static constexpr int64_t kAlignment = 16;  // bytes, of what one call of Put puts

  StepImage() = default;
  // `device` outlives it. Takes `bytes` on host and device, or nothing where the device's memory is
  // the host's.
  static Result<StepImage> Create(Device& device, int64_t bytes);

  void Clear() { used_ = handed_over_ = 0; }
  // Returns where the integers lie on the device after HandOver. Where the device's memory is the
  // host's they lie where they are, and must stay there until the step is over. Throws
  // InternalError if there is no room.
  template <typename T>
  const T* Put(const T* host, int64_t count) {
    return static_cast<const T*>(PutBytes(host, count * static_cast<int64_t>(sizeof(T))));
  }
  // Of all that was put since the last call.
  void HandOver();

 private:
  explicit StepImage(Device& device) : device_(&device) {}
  const void* PutBytes(const void* host, int64_t bytes);

  Device* device_ = nullptr;
  std::vector<unsigned char> host_;
  Buffer on_device_;
  int64_t used_ = 0, handed_over_ = 0;
};

}  // namespace allspark

// PlacedWeights: where a model's tensors lie for a device. Unless it computes with copies, this is
// where they are, mapped from the file or in an image.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "allspark/status.h"
#include "memory/allocator.h"
#include "ops/device.h"

namespace allspark {

class PlacedWeights {
 public:
  // `device` outlives it.
  explicit PlacedWeights(Device& device) : device_(&device) {}

  // Returns the address on the device; the same for the same bytes. Null after a failure, which
  // status() says. `pieces`: Device::CopyWeight.
  template <typename T>
  const T* Place(const T* host, int64_t count) {
    return static_cast<const T*>(PlaceBytes(host, count * static_cast<int64_t>(sizeof(T))));
  }
  const void* PlaceBytes(const void* host, int64_t bytes, int pieces = 1);
  // ResourceExhausted once the device had no room.
  const Status& status() const { return status_; }

 private:
  Device* device_;
  std::map<const void*, const void*> places_;  // of copies, by their address on the host
  std::vector<Buffer> copies_;
  Status status_;
};

}  // namespace allspark

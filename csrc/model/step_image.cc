#include "model/step_image.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/int_math.h"

namespace allspark {

Result<StepImage> StepImage::Create(Device& device, int64_t bytes) {
  StepImage image(device);
  if (!device.has_own_memory()) return image;
  image.host_.resize(static_cast<size_t>(bytes));
  AS_ASSIGN_OR_RETURN(image.on_device_, Buffer::Create(device.allocator(), image.host_.size()));
  return image;
}

const void* StepImage::PutBytes(const void* host, int64_t bytes) {
  if (!device_->has_own_memory()) return host;
  const auto size = static_cast<int64_t>(host_.size());
  AS_CHECK(bytes <= size - used_) << "step image: " << bytes << " bytes more than " << used_
                                  << "; it has " << size;
  std::memcpy(host_.data() + used_, host, static_cast<size_t>(bytes));
  const void* const at = static_cast<unsigned char*>(on_device_.data()) + used_;
  used_ = std::min(size, AlignUp(used_ + bytes, kAlignment));
  return at;
}

void StepImage::HandOver() {
  if (used_ == handed_over_) return;
  device_->ops().Upload(static_cast<unsigned char*>(on_device_.data()) + handed_over_,
                        host_.data() + handed_over_, static_cast<size_t>(used_ - handed_over_));
  handed_over_ = used_;
}

}  // namespace allspark

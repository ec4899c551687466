#include "model/placed_weights.h"

#include <utility>

namespace allspark {

const void* PlacedWeights::PlaceBytes(const void* host, int64_t bytes, int pieces) {
  if (host == nullptr || !device_->copies_weights()) return host;
  const auto known = places_.find(host);
  if (known != places_.end()) return known->second;
  if (!status_.ok()) return nullptr;
  Result<Buffer> copy = Buffer::Create(device_->allocator(), static_cast<size_t>(bytes));
  if (!copy.ok()) {
    status_ = copy.status();
    return nullptr;
  }
  device_->CopyWeight(copy->data(), host, static_cast<size_t>(bytes), pieces);
  copies_.push_back(std::move(*copy));
  places_.emplace(host, copies_.back().data());
  return copies_.back().data();
}

}  // namespace allspark

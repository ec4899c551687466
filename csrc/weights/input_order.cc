#include "weights/input_order.h"

#include <vector>

#include "weights/required_tensors.h"

namespace allspark {

Result<const int32_t*> InputOrder(const ModelReader& reader, const std::string& tensor,
                                  int64_t cols) {
  const std::string name = weights::OrderName(tensor);
  const Result<WeightView> view = reader.Find(name);
  if (!view.ok()) return nullptr;
  const auto damaged = [&](const std::string& what) {
    return Status::DataLoss(reader.source() + ": tensor '" + name + "' " + what);
  };
  if (view->dtype != DType::kInt32 || view->shape[0] != cols) {
    return damaged("is no order of " + std::to_string(cols) + " columns");
  }
  const auto* order = static_cast<const int32_t*>(view->data);
  std::vector<bool> seen(static_cast<size_t>(cols));
  for (int64_t j = 0; j < cols; ++j) {
    const int64_t feature = order[j];
    if (feature < 0 || feature >= cols || seen[static_cast<size_t>(feature)]) {
      return damaged("has " + std::to_string(feature) + " at " + std::to_string(j) +
                     "; it must hold each of [0, " + std::to_string(cols) + ") once");
    }
    seen[static_cast<size_t>(feature)] = true;
  }
  return order;
}

}  // namespace allspark

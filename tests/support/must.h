// Must: what a test relies on, or an exception with the error's text.
#pragma once

#include <stdexcept>
#include <utility>

#include "allspark/status.h"

namespace allspark::testing {

inline void Must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
template <class T>
T Must(Result<T> result) {
  Must(result.status());
  return *std::move(result);
}

}  // namespace allspark::testing

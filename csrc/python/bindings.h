// The parts of the extension module, one file each, and the one translation of Status into
// exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "allspark/engine.h"
#include "allspark/status.h"
#include "python/gil.h"

namespace allspark::python {

// What Python holds as a ModelImage: the image itself is an incomplete type here, which pybind11
// cannot bind.
struct ImageHandle {
  std::shared_ptr<const ModelImage> image;
};

// The same for an adapter.
struct LoraImageHandle {
  std::shared_ptr<const LoraImage> image;
};

void BindResults(pybind11::module_& module);
void BindSerializer(pybind11::module_& module);
void BindGuided(pybind11::module_& module);
void BindWords(pybind11::module_& module);
void BindByteLevel(pybind11::module_& module);
void BindTextStreams(pybind11::module_& module);
void BindEngine(pybind11::module_& module);
void BindLayers(pybind11::module_& module);
void BindMappings(pybind11::module_& module);
void BindTesting(pybind11::module_& module);

// Raises the Python class that stands for the code: InvalidArgument ValueError, NotFound KeyError,
// ResourceExhausted allspark.errors.OutOfMemoryError, Unimplemented NotImplementedError, the rest
// allspark.errors.AllSparkError.
void ThrowIfError(const Status& status);

// Makes a call without the GIL and returns its value; a failure becomes an exception.
template <typename Call>
auto Unwrap(Call call) {
  auto result = [&] {
    const GilReleased released;
    return call();
  }();
  if constexpr (std::is_same_v<decltype(result), Status>) {
    ThrowIfError(result);
  } else {
    ThrowIfError(result.status());
    return *std::move(result);
  }
}

}  // namespace allspark::python

// LayerRunner, with which the tools that quantise weights run a model layer by layer.

#include "allspark/layer_runner.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "python/bindings.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

using Ids = py::array_t<int32_t, py::array::c_style>;
using Stream = py::array_t<float, py::array::c_style>;

std::unique_ptr<LayerRunner> CreateRunner(const ImageHandle& handle, int64_t length,
                                          int64_t num_threads, const std::string& isa) {
  return Unwrap([&] {
    return LayerRunner::Create(handle.image,
                               {.num_threads = num_threads, .isa = isa, .length = length});
  });
}

// Views of an array's memory, for the run alone.
void Run(LayerRunner& runner, const std::optional<Ids>& ids, const std::optional<Stream>& in,
         std::optional<Stream> out, std::optional<Stream> logits) {
  if (ids.has_value() == in.has_value()) throw py::value_error("one of ids and stream is needed");
  const int64_t hidden = runner.hidden_size();
  const auto check = [&](const char* name, const Stream& stream) {
    if (stream.ndim() != 3 || stream.shape(2) != hidden) {
      throw py::value_error(std::string(name) + " must be [sequences, length, " +
                            std::to_string(hidden) + "]");
    }
  };
  if (ids && ids->ndim() != 2) throw py::value_error("ids must be [sequences, length]");
  if (in) check("stream", *in);
  if (out) check("out", *out);
  const py::ssize_t sequences = ids ? ids->shape(0) : in->shape(0);
  const py::ssize_t length = ids ? ids->shape(1) : in->shape(1);
  if (length != runner.length()) {
    throw py::value_error("length is " + std::to_string(length) + "; it must be " +
                          std::to_string(runner.length()));
  }
  if (out && (out->shape(0) != sequences || out->shape(1) != length)) {
    throw py::value_error("out has another shape than the input");
  }
  if (logits && (logits->ndim() != 3 || logits->shape(0) != sequences ||
                 logits->shape(1) != length || logits->shape(2) != runner.vocab_size())) {
    throw py::value_error("logits must be [sequences, length, " +
                          std::to_string(runner.vocab_size()) + "]");
  }
  const int32_t* id_data = ids ? ids->data() : nullptr;
  const float* in_data = in ? in->data() : nullptr;
  float* out_data = out ? out->mutable_data() : nullptr;
  float* logits_data = logits ? logits->mutable_data() : nullptr;
  Unwrap([&] { return runner.Run(id_data, in_data, sequences, out_data, logits_data); });
}

// An array that owns what was a vector.
template <typename T>
py::array_t<T> ToArray(std::vector<T> values, const std::vector<py::ssize_t>& shape) {
  auto* owned = new std::vector<T>(std::move(values));
  const py::capsule owner(owned, [](void* data) { delete static_cast<std::vector<T>*>(data); });
  return py::array_t<T>(shape, owned->data(), owner);
}

// (num_tokens, sum_abs, max_abs, products).
py::tuple TakeStatistics(LayerRunner& runner, const std::string& tensor, int64_t expert) {
  auto taken = Unwrap([&] { return runner.TakeStatistics(tensor, expert); });
  const auto size = static_cast<py::ssize_t>(taken.sum_abs.size());
  const py::ssize_t rows = taken.products.empty() ? 0 : size;
  return py::make_tuple(taken.num_tokens, ToArray(std::move(taken.sum_abs), {size}),
                        ToArray(std::move(taken.max_abs), {size}),
                        ToArray(std::move(taken.products), {rows, rows}));
}

}  // namespace

void BindLayers(py::module_& m) {
  py::class_<LayerRunner>(m, "LayerRunner",
                          "Runs the layers of an image over sequences of one length.")
      .def(py::init(&CreateRunner), py::arg("image"), py::arg("length"), py::arg("num_threads") = 0,
           py::arg("isa") = "")
      .def(
          "observe",
          [](LayerRunner& runner, const std::vector<std::string>& tensors, bool products) {
            ThrowIfError(runner.Observe(tensors, products));
          },
          py::arg("tensors"), py::arg("products") = true,
          "From now on the inputs of these weights are summed up.")
      .def(
          "run", &Run, py::arg("ids") = py::none(), py::arg("stream") = py::none(),
          py::arg("out").noconvert() = py::none(), py::arg("logits").noconvert() = py::none(),
          "ids: int32 [sequences, length], or stream: float32 [sequences, length, hidden]; out, as "
          "stream, and logits [sequences, length, vocab] are written.")
      .def("take_statistics", &TakeStatistics, py::arg("tensor"), py::arg("expert") = 0,
           "(num_tokens, sum_abs [k], max_abs [k], products [k, k]) of a weight's input so far; "
           "the sums begin anew.");
}

}  // namespace allspark::python

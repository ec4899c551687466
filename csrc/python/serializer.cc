// ModelWriter and LoraWriter, with which loaders write the native formats, and the images they
// make.

#include "allspark/model_serializer.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "python/bindings.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

std::unique_ptr<ModelSerializer> CreateWriter(const std::string& spec, const std::string& build,
                                              const std::string& graph_path,
                                              const std::string& param_path, bool search_scales) {
  return Unwrap(
      [&] { return ModelSerializer::Create(spec, build, graph_path, param_path, search_scales); });
}

void AddTensor(ModelSerializer& writer, const std::string& name, int64_t row_begin,
               const py::array& data, const std::string& dtype) {
  if ((data.flags() & py::array::c_style) == 0) {
    throw py::value_error("tensor '" + name + "' is not C-contiguous");
  }
  const int64_t element_bytes = dtype == "float32" || dtype == "int32" ? 4
                                : dtype == "uint8"                     ? 1
                                                                       : 2;
  if (data.itemsize() != element_bytes) {
    throw py::value_error("tensor '" + name + "' has elements of " +
                          std::to_string(data.itemsize()) + " bytes; " + dtype + " has " +
                          std::to_string(element_bytes));
  }
  // Bytes are taken as they are. Types of 16 bits have no array of their own.
  const char kind = dtype == "float32" ? 'f' : dtype == "int32" ? 'i' : 'u';
  const bool is_kind = element_bytes == 2 || data.dtype().kind() == kind;
  if (!is_kind || data.dtype().byteorder() == '>') {
    throw py::value_error("tensor '" + name + "' is an array of '" +
                          data.dtype().attr("str").cast<std::string>() + "'; it must be of " +
                          dtype + " in this machine's byte order");
  }
  const std::vector<int64_t> shape(data.shape(), data.shape() + data.ndim());
  const void* bytes = data.data();
  Unwrap([&] { return writer.AddTensor(name, row_begin, dtype, shape, bytes); });
}

using FloatMatrix = py::array_t<float, py::array::c_style>;

std::unique_ptr<LoraSerializer> CreateLoraWriter(const std::string& build,
                                                 const std::string& path) {
  return Unwrap([&] { return LoraSerializer::Create(build, path); });
}

// `a`: [rank, cols], `b`: [rows, rank]; for "embedding", a: [cols, rank].
void AddPair(LoraSerializer& writer, const std::string& tensor, int64_t row_begin,
             const FloatMatrix& a, const FloatMatrix& b) {
  if (a.ndim() != 2 || b.ndim() != 2) {
    throw py::value_error("tensor '" + tensor + "': a and b must be matrices");
  }
  const bool transposed = tensor == "embedding";
  const int64_t cols = a.shape(transposed ? 0 : 1);
  const std::span<const float> a_values(a.data(), static_cast<size_t>(a.size()));
  const std::span<const float> b_values(b.data(), static_cast<size_t>(b.size()));
  const int64_t rows = b.shape(0);
  const int64_t rank = b.shape(1);
  Unwrap([&] { return writer.AddPair(tensor, row_begin, rows, cols, rank, a_values, b_values); });
}

// (values uint8 [n, k], scales float32 [n, groups], zeros uint8 or None).
py::tuple Quantize(const FloatMatrix& weight, int64_t bits, bool asymmetric, int64_t group_size,
                   bool search) {
  if (weight.ndim() != 2) throw py::value_error("weight must be a matrix");
  const py::ssize_t rows = weight.shape(0), cols = weight.shape(1);
  const py::ssize_t groups = group_size > 0 ? cols / group_size : 1;
  py::array_t<uint8_t> values({rows, cols});
  py::array_t<float> scales({rows, groups});
  std::optional<py::array_t<uint8_t>> zeros;
  if (asymmetric) zeros.emplace(std::vector<py::ssize_t>{rows, groups});
  const float* from = weight.data();
  uint8_t* value_data = values.mutable_data();
  float* scale_data = scales.mutable_data();
  uint8_t* zero_data = zeros ? zeros->mutable_data() : nullptr;
  Unwrap([&] {
    return QuantizeRows(from, rows, cols, bits, asymmetric, group_size, search, value_data,
                        scale_data, zero_data);
  });
  return py::make_tuple(values, scales, zeros);
}

// Runs a writer's Finish without the GIL; None where files were written.
template <typename Handle, typename Writer>
std::optional<Handle> Finish(Writer& writer) {
  auto image = Unwrap([&] { return writer.Finish(); });
  if (image == nullptr) return std::nullopt;
  return Handle{std::move(image)};
}

}  // namespace

void BindSerializer(py::module_& m) {
  py::class_<ImageHandle>(m, "ModelImage", "A serialised model held in memory.");
  py::class_<ModelSerializer>(m, "ModelWriter",
                              "Writes a native model tensor by tensor; empty paths write an image.")
      .def(py::init(&CreateWriter), py::arg("spec"), py::arg("build"), py::arg("graph_path") = "",
           py::arg("param_path") = "", py::arg("search_scales") = false)
      .def("add_tensor", &AddTensor, py::arg("name"), py::arg("row_begin"), py::arg("data"),
           py::arg("dtype"))
      .def("finish", &Finish<ImageHandle, ModelSerializer>);
  py::class_<LoraImageHandle>(m, "LoraImage", "A LoRA adapter held in memory.");
  py::class_<LoraSerializer>(m, "LoraWriter",
                             "Writes a LoRA adapter pair by pair; an empty path writes an image.")
      .def(py::init(&CreateLoraWriter), py::arg("build"), py::arg("path") = "")
      .def("add_pair", &AddPair, py::arg("tensor"), py::arg("row_begin"), py::arg("a"),
           py::arg("b"))
      .def("finish", &Finish<LoraImageHandle, LoraSerializer>);
  m.def("quantize_rows", &Quantize, py::arg("weight"), py::arg("bits"), py::arg("asymmetric"),
        py::arg("group_size"), py::arg("search") = false,
        "Quantises a float32 matrix as ModelWriter does: (values, scales, zeros or None).");
  m.def(
      "required_tensors",
      [](const std::string& spec) {
        py::list list;
        for (const TensorRequirement& t : Unwrap([&] { return RequiredTensors(spec); })) {
          list.append(py::make_tuple(t.name, t.dtype, t.layout, py::tuple(py::cast(t.shape)),
                                     t.quantizable, py::tuple(py::cast(t.modules))));
        }
        return list;
      },
      py::arg("spec"),
      "[(name, dtype, layout, shape, quantizable, modules)] that a serialised DecoderSpec "
      "requires.");
}

}  // namespace allspark::python

// ModelWriter (the loaders' seam to the native format) and ModelImage.

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
                                              const std::string& param_path) {
  auto serializer = [&] {
    py::gil_scoped_release release;
    return ModelSerializer::Create(spec, build, graph_path, param_path);
  }();
  ThrowIfError(serializer.status());
  return std::move(*serializer);
}

void AddTensor(ModelSerializer& writer, const std::string& name, int64_t row_begin,
               const py::array& data, const std::string& dtype) {
  if ((data.flags() & py::array::c_style) == 0) {
    throw py::value_error("tensor '" + name + "' is not C-contiguous");
  }
  const int64_t element_bytes = dtype == "float32" ? 4 : dtype == "uint8" ? 1 : 2;
  if (data.itemsize() != element_bytes) {
    throw py::value_error("tensor '" + name + "' has elements of " +
                          std::to_string(data.itemsize()) + " bytes; " + dtype + " has " +
                          std::to_string(element_bytes));
  }
  const std::vector<int64_t> shape(data.shape(), data.shape() + data.ndim());
  const void* bytes = data.data();
  const Status status = [&] {
    py::gil_scoped_release release;
    return writer.AddTensor(name, row_begin, dtype, shape, bytes);
  }();
  ThrowIfError(status);
}

}  // namespace

void BindSerializer(py::module_& m) {
  py::class_<ImageHandle>(m, "ModelImage", "A serialised model held in memory.");
  py::class_<ModelSerializer>(m, "ModelWriter",
                              "Writes a native model tensor by tensor; empty paths write an image.")
      .def(py::init(&CreateWriter), py::arg("spec"), py::arg("build"), py::arg("graph_path") = "",
           py::arg("param_path") = "")
      .def("add_tensor", &AddTensor, py::arg("name"), py::arg("row_begin"), py::arg("data"),
           py::arg("dtype"))
      .def("finish", [](ModelSerializer& writer) -> std::optional<ImageHandle> {
        auto image = [&] {
          py::gil_scoped_release release;
          return writer.Finish();
        }();
        ThrowIfError(image.status());
        if (*image == nullptr) return std::nullopt;
        return ImageHandle{*image};
      });
  m.def(
      "required_tensors",
      [](const std::string& spec) {
        auto required = RequiredTensors(spec);
        ThrowIfError(required.status());
        py::list list;
        for (const TensorRequirement& t : *required) {
          list.append(py::make_tuple(t.name, t.dtype, t.layout, py::tuple(py::cast(t.shape))));
        }
        return list;
      },
      py::arg("spec"), "[(name, dtype, layout, shape)] that a serialised DecoderSpec requires.");
}

}  // namespace allspark::python

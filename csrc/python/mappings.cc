// MappingWatch, for the files that the loaders map.

#include "platform/mapping_watch.h"

#include "python/bindings.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

// The watch ends before the buffer may be unmapped.
class WatchedBuffer {
 public:
  explicit WatchedBuffer(const py::buffer& buffer)
      : buffer_(buffer.request()),
        watch_(buffer_.ptr, static_cast<size_t>(buffer_.size * buffer_.itemsize)) {}
  bool IsBroken() const { return watch_.IsBroken(); }

 private:
  const py::buffer_info buffer_;
  const MappingWatch watch_;
};

}  // namespace

void BindMappings(py::module_& m) {
  py::class_<WatchedBuffer>(m, "MappingWatch",
                            "Of a mapped file: what can no longer be read of it is zeros.")
      .def(py::init<const py::buffer&>(), py::arg("mapping"))
      .def_property_readonly("broken", &WatchedBuffer::IsBroken);
}

}  // namespace allspark::python

// Engine: each call returns a Status (or a tuple that begins with one); the Python layer turns it
// into AsStatus and keeps the message.

#include "allspark/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "python/bindings.h"
#include "python/gil.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

using NoGil = py::call_guard<GilReleased>;
using IdArray = py::array_t<int64_t, py::array::c_style>;

// A wait, `sync(cancelled)`, that ends when `gives_up` returns true, or with a signal such as
// Ctrl-C. What either of these raises is thrown.
template <typename Sync>
auto SyncInterruptible(Sync sync, const py::object& gives_up = py::none()) {
  bool has_raised = false;  // the exception waits in the thread's state
  const auto ask = [&] {
    has_raised = PyErr_CheckSignals() != 0;
    if (has_raised || gives_up.is_none()) return has_raised;
    PyObject* const answer = PyObject_CallNoArgs(gives_up.ptr());
    const int gives = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    has_raised = gives < 0;
    return gives != 0;
  };
  auto result = [&] {
    GilReleased released;
    return sync([&] { return released.WithGil(ask); });
  }();
  if (has_raised) throw py::error_already_set();
  return result;
}

py::tuple StartRequest(Engine& engine, const std::string& model_name, const IdArray& prompt_ids,
                       const GenerationConfig& config, std::shared_ptr<TokenMask> token_mask,
                       const py::object& gives_up) {
  const std::span<const int64_t> ids(prompt_ids.data(), static_cast<size_t>(prompt_ids.size()));
  const auto start = [&](const auto& cancelled) {
    return engine.StartRequest(model_name, ids, config, std::move(token_mask), cancelled);
  };
  const Result<StartedRequest> started = SyncInterruptible(start, gives_up);
  py::list handles, queues;
  if (started.ok()) {
    const auto append = [&](const StartedRequest& sequence) {
      handles.append(sequence.handle);
      queues.append(sequence.queue);
    };
    append(*started);
    for (const StartedRequest& sequence : started->next_best) append(sequence);
  }
  return py::make_tuple(started.status(), handles, queues);
}

// Deletes without the GIL, since it waits for the step threads. Nothing that an engine holds runs
// Python when it goes.
struct DeleteWithoutGil {
  void operator()(Engine* engine) const {
    const GilReleased released;
    delete engine;
  }
};

// A look-up by a model's name.
template <typename T>
auto LookUp(Result<T> (Engine::*call)(const std::string&) const) {
  return [call](const Engine& engine, const std::string& model_name) {
    return Unwrap([&] { return (engine.*call)(model_name); });
  };
}

auto PrefixCall(Result<int64_t> (Engine::*call)(const std::string&, std::span<const int64_t>,
                                                const std::string&)) {
  return [call](Engine& engine, const std::string& model_name, const IdArray& prompt_ids,
                const std::string& lora_name) {
    const std::span<const int64_t> ids(prompt_ids.data(), static_cast<size_t>(prompt_ids.size()));
    return Unwrap([&] { return (engine.*call)(model_name, ids, lora_name); });
  };
}

// [(name, help, kind, bounds, [(labels, value, buckets)])], as in allspark/metrics.h.
py::list ListMetrics(const Engine& engine) {
  ThrowIfError(engine.CheckProcess());
  py::list list;
  for (const Metric& metric : engine.GetMetrics()) {
    py::list samples;
    for (const MetricSample& sample : metric.samples) {
      samples.append(py::make_tuple(sample.labels, sample.value, sample.buckets));
    }
    list.append(py::make_tuple(metric.name, metric.help, MetricKindName(metric.kind), metric.bounds,
                               samples));
  }
  return list;
}

}  // namespace

void BindEngine(py::module_& m) {
  py::class_<Engine, std::unique_ptr<Engine, DeleteWithoutGil>>(
      m, "NativeEngine", "The engine; wrapped by allspark.Engine.")
      .def(py::init<>())
      .def("check_process", &Engine::CheckProcess)
      .def("register_image",
           [](Engine& engine, const std::string& name, const ImageHandle& handle) {
             const GilReleased released;
             return engine.RegisterImage(name, handle.image);
           })
      .def("install_model", &Engine::InstallModel, NoGil())
      .def("start_model", &Engine::StartModel, NoGil())
      .def("stop_model",
           [](Engine& engine, const std::string& name, bool drain, int64_t timeout_ms) {
             const StopMode mode = drain ? StopMode::kDrain : StopMode::kCancel;
             return SyncInterruptible([&](const auto& cancelled) {
               return engine.StopModel(name, mode, timeout_ms, cancelled);
             });
           })
      .def("release_model", &Engine::ReleaseModel, NoGil())
      .def("unload_device_mem", &Engine::UnloadDeviceMemory, NoGil())
      .def("load_device_mem", &Engine::LoadDeviceMemory, NoGil())
      .def("model_state", LookUp(&Engine::GetModelState))
      .def("model_spec",
           [](const Engine& engine, const std::string& name) {
             return py::bytes(Unwrap([&] { return engine.GetModelSpec(name); }));
           })
      .def("list_models",
           [](const Engine& engine) {
             ThrowIfError(engine.CheckProcess());
             return engine.ListModels();
           })
      .def("start_request", &StartRequest, py::arg("model_name"), py::arg("prompt_ids"),
           py::arg("config"), py::arg("token_mask") = nullptr, py::arg("gives_up") = py::none())
      .def(
          "stop_request",
          [](Engine& engine, const std::string& name, RequestHandle handle, bool is_complete) {
            return engine.StopRequest(name, handle,
                                      is_complete ? FinishReason::kStop : FinishReason::kCancelled);
          },
          py::arg("model_name"), py::arg("handle"), py::arg("is_complete") = false, NoGil())
      .def("release_request", &Engine::ReleaseRequest, NoGil())
      .def("sync_requests",
           [](Engine& engine, const std::string& name, const std::vector<RequestHandle>& handles,
              int64_t timeout_ms) {
             return SyncInterruptible([&](const auto& cancelled) {
               return engine.SyncRequests(name, handles, timeout_ms, cancelled);
             });
           })
      .def("sync_all_requests",
           [](Engine& engine, const std::string& name, int64_t timeout_ms) {
             return SyncInterruptible([&](const auto& cancelled) {
               return engine.SyncAllRequests(name, timeout_ms, cancelled);
             });
           })
      .def("load_lora",
           py::overload_cast<const std::string&, const std::string&, const std::string&>(
               &Engine::LoadLora),
           NoGil())
      .def("load_lora",
           [](Engine& engine, const std::string& model_name, const std::string& lora_name,
              const LoraImageHandle& handle) {
             const GilReleased released;
             return engine.LoadLora(model_name, lora_name, handle.image);
           })
      .def("unload_lora", &Engine::UnloadLora, NoGil())
      .def("list_loras", LookUp(&Engine::ListLoras))
      .def("find_prefix", PrefixCall(&Engine::FindPrefix), py::arg("model_name"),
           py::arg("prompt_ids"), py::arg("lora_name") = "")
      .def("pin_prefix", PrefixCall(&Engine::PinPrefix), py::arg("model_name"),
           py::arg("prompt_ids"), py::arg("lora_name") = "")
      .def("unpin_prefix", PrefixCall(&Engine::UnpinPrefix), py::arg("model_name"),
           py::arg("prompt_ids"), py::arg("lora_name") = "")
      .def("clear_prefix_cache",
           [](Engine& engine, const std::string& name) {
             return Unwrap([&] { return engine.ClearPrefixCache(name); });
           })
      .def("model_info", LookUp(&Engine::GetModelInfo))
      .def("engine_stat", LookUp(&Engine::GetEngineStat))
      .def("op_profiling_info", LookUp(&Engine::GetOpProfilingInfo))
      .def("write_trace", &Engine::WriteTrace, NoGil())
      .def("metrics", &ListMetrics)
      .def("metrics_text",
           [](const Engine& engine) {
             ThrowIfError(engine.CheckProcess());
             return MetricsText(engine.GetMetrics());
           })
      .def_property_readonly("completions",
                             [](const Engine& engine) {
                               ThrowIfError(engine.CheckProcess());
                               return engine.completions();
                             })
      .def_static("version", &Engine::Version);
}

}  // namespace allspark::python

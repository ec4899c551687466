// The extension module `allspark._allspark`: a thin layer over the C++ API. Failures come back as
// Status objects where the Python layer returns AsStatus, and as exceptions elsewhere. Every call
// that can block releases the GIL; no Python object is held by, or called from, an engine thread.

#include <pybind11/native_enum.h>

#include "allspark/engine.h"
#include "python/bindings.h"
#include "python/field_binding.h"

namespace allspark::python {
namespace {

void BindEnums(py::module_& m) {
  using A = AsStatus;
  py::native_enum<A>(m, "AsStatus", "enum.IntEnum", "Status numbers of the DashInfer interface.")
      .value("ALLSPARK_SUCCESS", A::kSuccess)
      .value("ALLSPARK_UNKNOWN_ERROR", A::kUnknownError)
      .value("ALLSPARK_PARAM_ERROR", A::kParamError)
      .value("ALLSPARK_IO_ERROR", A::kIoError)
      .value("ALLSPARK_MEMORY_ERROR", A::kMemoryError)
      .value("ALLSPARK_RUNTIME_ERROR", A::kRuntimeError)
      .value("ALLSPARK_EXCEED_LIMIT_ERROR", A::kExceedLimitError)
      .value("ALLSPARK_INVALID_CALL_ERROR", A::kInvalidCallError)
      .value("ALLSPARK_EMPTY_REQUEST", A::kEmptyRequest)
      .value("ALLSPARK_ILLEGAL_REQUEST_ID", A::kIllegalRequestId)
      .value("ALLSPARK_CACHE_MEMORY_OUT", A::kCacheMemoryOut)
      .value("ALLSPARK_REQUEST_DENIED", A::kRequestDenied)
      .value("ALLSPARK_CHUNK_PREFILL", A::kChunkPrefill)
      .value("ALLSPARK_DEPRECATED", A::kDeprecated)
      .value("ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR", A::kLoraNumExceedLimitError)
      .value("ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR", A::kLoraRankExceedLimitError)
      .value("ALLSPARK_LORA_NOT_FOUND", A::kLoraNotFound)
      .value("ALLSPARK_LORA_ALREADY_LOADED", A::kLoraAlreadyLoaded)
      .value("ALLSPARK_LORA_IN_USE", A::kLoraInUse)
      .value("ALLSPARK_STREAMING", A::kStreaming)
      .finalize();
  using G = GenerateRequestStatus;
  py::native_enum<G>(m, "GenerateRequestStatus", "enum.IntEnum", "Life of a request.")
      .value("Init", G::kInit)
      .value("ContextFinished", G::kContextFinished)
      .value("Generating", G::kGenerating)
      .value("GenerateFinished", G::kGenerateFinished)
      .value("GenerateInterrupted", G::kGenerateInterrupted)
      .value("InternalError", G::kInternalError)
      .finalize();
  py::native_enum<ModelState>(m, "ModelState", "enum.IntEnum", "States of an installed model.")
      .value("Initial", ModelState::kInitial)
      .value("Running", ModelState::kRunning)
      .value("Stop", ModelState::kStop)
      .value("Released", ModelState::kReleased)
      .finalize();
  py::native_enum<CacheMode>(m, "AsCacheMode", "enum.IntEnum", "How the KV cache stores values.")
      .value("AsCacheDefault", CacheMode::kDefault)
      .value("AsCacheQuantI8", CacheMode::kQuantI8)
      .value("AsCacheQuantU4", CacheMode::kQuantU4)
      .value("AsCacheQuantK8V4", CacheMode::kQuantK8V4)
      .finalize();
  py::native_enum<StatusCode>(m, "StatusCode", "enum.IntEnum", "Kind of a failure.")
      .value("OK", StatusCode::kOk)
      .value("INVALID_ARGUMENT", StatusCode::kInvalidArgument)
      .value("NOT_FOUND", StatusCode::kNotFound)
      .value("RESOURCE_EXHAUSTED", StatusCode::kResourceExhausted)
      .value("FAILED_PRECONDITION", StatusCode::kFailedPrecondition)
      .value("CANCELLED", StatusCode::kCancelled)
      .value("UNIMPLEMENTED", StatusCode::kUnimplemented)
      .value("DATA_LOSS", StatusCode::kDataLoss)
      .value("INTERNAL", StatusCode::kInternal)
      .value("DEADLINE_EXCEEDED", StatusCode::kDeadlineExceeded)
      .finalize();
}

void BindStatusAndConfigs(py::module_& m) {
  py::class_<Status>(m, "Status", "Outcome of a call: code, as_status, message.")
      .def_property_readonly("ok", &Status::ok)
      .def_property_readonly("code", &Status::code)
      .def_property_readonly("as_status", &Status::as_status)
      .def_property_readonly("message", &Status::message)
      .def("__repr__", &Status::ToString);

  BindConfig<RuntimeConfig>(m, "AsModelConfig",
                            "How an installed model runs; built by AsModelRuntimeConfigBuilder.");
  BindConfig<GenerationConfig>(m, "GenerateConfig", "What a request asks for.");

  BindFields<ModelInfo>(m, "AsModelInfo", "What an installed model is and takes.")
      .def("__str__", [](const ModelInfo& info) { return ToString(info); });
  // With DashInfer's names too, one of them misspelt.
  BindFields<EngineStat>(m, "AsEngineStat", "A snapshot of a model's counters.")
      .def_property_readonly("pendding_request",
                             [](const EngineStat& stat) { return stat.pending_request; })
      .def("ToString", [](const EngineStat& stat) { return Repr("AsEngineStat", stat); })
      .def("dict", [](const EngineStat& stat) {
        py::dict texts;
        for (const auto& [key, value] : ToDict(stat)) texts[key] = py::str(value);
        texts["pendding_request"] = py::str(texts["pending_request"]);
        return texts;
      });
}

}  // namespace

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  const auto raise = [&](py::handle type) {
    PyErr_SetString(type.ptr(), status.message().c_str());
    throw py::error_already_set();
  };
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      raise(PyExc_ValueError);
      break;
    case StatusCode::kNotFound:
      raise(PyExc_KeyError);
      break;
    case StatusCode::kUnimplemented:
      raise(PyExc_NotImplementedError);
      break;
    case StatusCode::kResourceExhausted:
      raise(py::module_::import("allspark.errors").attr("OutOfMemoryError"));
      break;
    default:
      raise(py::module_::import("allspark.errors").attr("AllSparkError"));
  }
}

}  // namespace allspark::python

PYBIND11_MODULE(_allspark, m) {
  m.doc() = "Native part of allspark.";
  m.attr("__version__") = allspark::Engine::Version();
  allspark::python::BindEnums(m);
  allspark::python::BindStatusAndConfigs(m);
  allspark::python::BindResults(m);
  allspark::python::BindSerializer(m);
  allspark::python::BindGuided(m);
  allspark::python::BindWords(m);
  allspark::python::BindByteLevel(m);
  allspark::python::BindTextStreams(m);
  allspark::python::BindEngine(m);
  allspark::python::BindLayers(m);
  allspark::python::BindMappings(m);
  allspark::python::BindTesting(m);
}

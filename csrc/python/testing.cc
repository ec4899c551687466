// The `testing` submodule: logits of a serialised model, faults inside a step, device memory.

#include "engine/testing.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <atomic>
#include <stdexcept>

#include "python/bindings.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

py::array_t<float> Logits(py::object model, const std::vector<int32_t>& ids,
                          const std::vector<int64_t>& chunk_sizes, int64_t num_threads,
                          const std::string& isa, int64_t block_size, CacheMode cache_mode,
                          double rope_scaling_factor, bool use_logn_attn) {
  std::shared_ptr<const ModelImage> image;
  std::string graph_path, param_path;
  if (py::isinstance<ImageHandle>(model)) {
    image = model.cast<const ImageHandle&>().image;
  } else {
    graph_path = py::str(model).cast<std::string>();
    param_path = graph_path.substr(0, graph_path.rfind('.')) + ".asparam";
  }
  const std::vector<float> logits = Unwrap([&] {
    return ForwardLogits(image, graph_path, param_path, ids,
                         {.chunk_sizes = chunk_sizes,
                          .num_threads = num_threads,
                          .isa = isa,
                          .block_size = block_size,
                          .cache_mode = cache_mode,
                          .rope_scaling_factor = rope_scaling_factor,
                          .use_logn_attn = use_logn_attn});
  });
  const auto rows = static_cast<py::ssize_t>(ids.size());
  return py::array_t<float>({rows, static_cast<py::ssize_t>(logits.size()) / rows}, logits.data());
}

// Steps left until the fault, for all models it was injected into.
std::atomic<int64_t> steps_to_fault{-1};

void FaultHook(const StepEvent& event) {
  if (event.phase != StepPhase::kBegin) return;
  if (steps_to_fault.load() >= 0 && steps_to_fault.fetch_sub(1) == 0) {
    throw std::runtime_error("injected fault");
  }
}

}  // namespace

void BindTesting(py::module_& parent) {
  py::module_ m = parent.def_submodule("testing", "Doors for tests; not a public interface.");
  m.def(
      "forward_logits", &Logits, py::arg("model"), py::arg("ids"),
      py::arg("chunk_sizes") = std::vector<int64_t>{}, py::arg("num_threads") = 1,
      py::arg("isa") = "", py::arg("block_size") = 32, py::arg("cache_mode") = CacheMode::kDefault,
      py::arg("rope_scaling_factor") = 0.0, py::arg("use_logn_attn") = false,
      "float32 [len(ids), vocab]: logits of every position. model: an .asgraph path or an image.");
  m.def("enable_step_faults", [](Engine& engine, const std::string& name) {
    ThrowIfError(TestingAccess::SetStepHook(engine, name, FaultHook));
  });
  m.def(
      "inject_step_fault", [](int64_t after_steps) { steps_to_fault = after_steps; },
      py::arg("after_steps"), "The step after that many more steps throws.");
  m.def("device_stats", [](Engine& engine) {
    const AllocatorStats stats = TestingAccess::DeviceStats(engine);
    py::dict dict;
    dict["num_live"] = stats.num_live;
    dict["bytes_in_use"] = stats.bytes_in_use;
    dict["num_allocs"] = stats.num_allocs;
    dict["pool_bytes"] = stats.pool_bytes;
    return dict;
  });
  m.def(
      "sample_tokens",
      [](const GenerationConfig& config, const std::vector<int64_t>& prompt,
         const std::vector<int64_t>& output, const std::vector<float>& logits,
         const std::vector<int64_t>& seeds) {
        const SampledRows sampled =
            Unwrap([&] { return SampleTokens(config, prompt, output, logits, seeds); });
        const auto size = static_cast<py::ssize_t>(sampled.logits.size());
        py::list top;
        for (const TokenLogprob& t : sampled.logprobs.top) {
          if (t.token >= 0) top.append(py::make_tuple(t.token, t.logprob));
        }
        return py::make_tuple(sampled.tokens, py::array_t<float>(size, sampled.logits.data()),
                              sampled.logprobs.chosen, top);
      },
      py::arg("config"), py::arg("prompt"), py::arg("output"), py::arg("logits"), py::arg("seeds"),
      "(one token per seed; of the last: the logits chosen from, its logprob, the top ones).");
  m.def("kernel_tables", &KernelTableNames, "Names of the kernel tables this machine can run.");
}

}  // namespace allspark::python

// ResultQueue, GeneratedElements, CompletionSet, RequestHandle.

#include "allspark/result_queue.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "allspark/engine.h"
#include "python/bindings.h"
#include "python/gil.h"
#include "python/text_streams.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

// Calls Get(timeout) in slices, so that a signal such as Ctrl-C ends the wait.
std::optional<GeneratedElements> GetInterruptible(ResultQueue& queue, int64_t timeout_ms) {
  constexpr int64_t kSliceMs = 100;
  int64_t left_ms = timeout_ms;
  while (true) {
    std::optional<GeneratedElements> elements;
    bool terminal = false;
    {
      const GilReleased released;
      const int64_t slice_ms = timeout_ms < 0 ? kSliceMs : std::min(left_ms, kSliceMs);
      // The status comes first: tokens that arrive after it are seen by the Get.
      terminal = IsTerminal(queue.GenerateStatus());
      elements = terminal ? queue.GetNoWait() : queue.Get(slice_ms);
      left_ms -= slice_ms;
    }
    if (elements.has_value() || terminal) return elements;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout_ms >= 0 && left_ms <= 0) return std::nullopt;
  }
}

// Readers of tokens alone need not convert the empty rest.
bool HasTokensOnly(const GeneratedElements& elements) {
  return elements.log_probs_list.empty() && elements.token_logprobs_list.empty() &&
         elements.prompt_log_probs_list.empty() && elements.prompt_token_logprobs_list.empty() &&
         elements.tensors_from_model_inference.empty();
}

// The native queue, also of an allspark.ResultQueue, which wraps one.
std::shared_ptr<ResultQueue> NativeOf(const py::object& queue) {
  const py::object native = py::getattr(queue, "_native", queue);
  if (!py::isinstance<ResultQueue>(native)) {
    throw py::type_error("queue is a " + std::string(Py_TYPE(queue.ptr())->tp_name) +
                         "; it must be a ResultQueue");
  }
  return native.cast<std::shared_ptr<ResultQueue>>();
}

// What a reader of many queues needs to know of one: whose it is, the ids, how many tokens of the
// prompt the prefix cache had, the elements where there is more in them, and whether these are the
// last. One call instead of a dozen, each of which would cost as much as it.
py::tuple Read(ResultQueue& queue) {
  // The status comes first: tokens that arrive after it are read the next time.
  const bool is_end = IsTerminal(queue.GenerateStatus());
  std::optional<GeneratedElements> elements = queue.GetNoWait();
  const uint64_t id = queue.request_id();
  if (!elements.has_value()) return py::make_tuple(id, py::list(), 0, py::none(), is_end);
  py::list ids = ToList(elements->ids_from_generate);
  const int64_t cached = elements->prefix_cache_len;
  py::object rest = py::none();
  if (!HasTokensOnly(*elements)) rest = py::cast(std::move(*elements));
  return py::make_tuple(id, std::move(ids), cached, std::move(rest), is_end);
}

// Reads the queues that changed, one at a time: a list of what they hold, of thousands of objects,
// would set Python's garbage collector going.
class Reading {
 public:
  Reading(CompletionSet& set, std::shared_ptr<TextStreams> texts)
      : queues_(set.Drain()), texts_(std::move(texts)) {}

  // Nothing at the end.
  std::optional<py::tuple> Next() {
    while (next_ < queues_.size()) {
      ResultQueue& queue = *queues_[next_++];
      std::optional<py::tuple> news;
      if (texts_ == nullptr || !texts_->Read(queue, &news)) return Read(queue);
      if (news.has_value()) return news;
    }
    return std::nullopt;
  }

 private:
  std::vector<std::shared_ptr<ResultQueue>> queues_;
  std::shared_ptr<TextStreams> texts_;
  size_t next_ = 0;
};

// NumPy arrays over the tensors' own memory, which they keep alive; NumPy makes DLPack of them.
py::list ToArrays(const GeneratedElements& elements) {
  py::list list;
  for (const auto& tensors : elements.tensors_from_model_inference) {
    py::dict arrays;
    for (const auto& [name, tensor] : tensors) {
      auto owner = std::make_unique<std::shared_ptr<float>>(tensor.data);
      py::capsule base(owner.get(),
                       [](void* data) { delete static_cast<std::shared_ptr<float>*>(data); });
      float* const data = owner.release()->get();
      arrays[name.c_str()] = py::array_t<float>(tensor.shape, data, base);
    }
    list.append(arrays);
  }
  return list;
}

}  // namespace

void BindResults(py::module_& m) {
  py::class_<GeneratedElements>(m, "GeneratedElements",
                                "Tokens, and what belongs to them, since the last getter call.")
      .def_readonly("ids_from_generate", &GeneratedElements::ids_from_generate)
      .def_property_readonly("has_tokens_only", &HasTokensOnly)
      .def_readonly("log_probs_list", &GeneratedElements::log_probs_list)
      .def_readonly("token_logprobs_list", &GeneratedElements::token_logprobs_list)
      .def_readonly("prompt_log_probs_list", &GeneratedElements::prompt_log_probs_list)
      .def_readonly("prompt_token_logprobs_list", &GeneratedElements::prompt_token_logprobs_list)
      .def_property_readonly("tensors_from_model_inference", &ToArrays)
      .def_readonly("prefix_cache_len", &GeneratedElements::prefix_cache_len)
      .def_readonly("prefix_len_gpu", &GeneratedElements::prefix_len_gpu)
      .def_readonly("prefix_len_cpu", &GeneratedElements::prefix_len_cpu);

  py::class_<ResultQueue, std::shared_ptr<ResultQueue>>(
      m, "NativeResultQueue", "What a request gives back; wrapped by allspark.ResultQueue.")
      .def("status", &ResultQueue::GenerateStatus)
      // A fifth of the time that `status` takes, which makes an enum.
      .def_property_readonly("is_terminal",
                             [](const ResultQueue& q) { return IsTerminal(q.GenerateStatus()); })
      .def("finish_reason",
           [](const ResultQueue& q) { return std::string(FinishReasonName(q.finish_reason())); })
      .def("error", &ResultQueue::error)
      .def("generated_length", &ResultQueue::GeneratedLength)
      .def("stat_info", &ResultQueue::RequestStatInfo)
      .def_property_readonly("request_id", &ResultQueue::request_id)
      .def("sequence_score", &ResultQueue::sequence_score)
      .def("get", &GetInterruptible, py::arg("timeout_ms"))
      .def("get_nowait", &ResultQueue::GetNoWait)
      .def("read", &Read);

  // Not an iterator: its end would be a C++ exception, which costs as much as ten queues.
  py::class_<Reading>(m, "Reading", "What changed queues hold, read one at a time.")
      .def("next", &Reading::Next);

  py::class_<CompletionSet, std::shared_ptr<CompletionSet>>(
      m, "CompletionSet", "Queues that changed, behind one pollable descriptor.")
      .def(py::init(&CompletionSet::Create))
      .def("fileno", &CompletionSet::fd)
      .def(
          "attach",
          [](CompletionSet& set, const py::object& queue, bool only_end) {
            set.Attach(NativeOf(queue), only_end);
          },
          py::arg("queue"), py::arg("only_end") = false)
      .def("drain",
           [](CompletionSet& set) {
             std::vector<uint64_t> ids;
             for (const auto& queue : set.Drain()) ids.push_back(queue->request_id());
             return ids;
           })
      .def(
          "read",
          [](CompletionSet& set, std::shared_ptr<TextStreams> texts) {
            return Reading(set, std::move(texts));
          },
          py::arg("texts") = py::none());

  py::class_<RequestHandle>(m, "RequestHandle", "A request's identity within this process.")
      .def(py::init([](uint64_t id) { return RequestHandle{id}; }), py::arg("id"))
      .def_readonly("id", &RequestHandle::id)
      .def(
          "__eq__", [](const RequestHandle& a, const RequestHandle& b) { return a == b; },
          py::is_operator())
      .def("__hash__", [](const RequestHandle& handle) { return handle.id; })
      .def("__repr__", [](const RequestHandle& handle) {
        return "RequestHandle(" + std::to_string(handle.id) + ")";
      });
}

}  // namespace allspark::python

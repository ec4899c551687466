#include "python/text_streams.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <charconv>

#include "base/json.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

void AppendIds(std::span<const int64_t> ids, std::string* json) {
  char digits[20];
  *json += '[';
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i > 0) *json += ',';
    json->append(digits, std::to_chars(digits, std::end(digits), ids[i]).ptr);
  }
  *json += ']';
}

}  // namespace

std::string EventForm::Make(std::string_view text, std::span<const int64_t> ids) const {
  std::string event = before_;
  event += JsonString(text);
  if (between_.has_value()) {
    event += *between_;
    AppendIds(ids, &event);
  }
  return event += after_;
}

py::list ToList(std::span<const int64_t> ids) {
  py::list list(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(ids[i]));
  }
  return list;
}

void TextStreams::Add(const ResultQueue& queue, std::shared_ptr<ByteLevelText> text,
                      std::vector<int64_t> silent, bool with_ids) {
  streams_[queue.request_id()] = std::make_shared<Stream>(
      Stream{.text = std::move(text), .silent = std::move(silent), .with_ids = with_ids});
}

void TextStreams::WriteEvents(const ResultQueue& queue, std::shared_ptr<const EventForm> form,
                              py::object offer) {
  const auto found = streams_.find(queue.request_id());
  if (found == streams_.end()) return;
  Stream& stream = *found->second;
  if (form->has_ids() != stream.with_ids) {
    throw py::value_error("form: its events and the queue must both have ids, or both have none");
  }
  stream.form = std::move(form);
  stream.offer = std::move(offer);
}

void TextStreams::Resume(const ResultQueue& queue) {
  const auto found = streams_.find(queue.request_id());
  if (found == streams_.end()) return;
  const std::shared_ptr<Stream> stream = found->second;
  stream->is_waiting = false;
  if (stream->offer && stream->has_news()) Offer(*stream);
}

bool TextStreams::Read(ResultQueue& queue, std::optional<py::tuple>* news) {
  const uint64_t id = queue.request_id();
  const auto found = streams_.find(id);
  if (found == streams_.end()) return false;
  const std::shared_ptr<Stream> held = found->second;
  Stream& stream = *held;
  // The status comes first: tokens that arrive after it are read the next time.
  const bool is_end = IsTerminal(queue.GenerateStatus());
  if (const std::optional<GeneratedElements> elements = queue.GetNoWait()) {
    stream.cached = elements->prefix_cache_len;
    for (const int64_t token : elements->ids_from_generate) {
      stream.ids.push_back(token);
      const std::vector<int64_t>& silent = stream.silent;
      if (std::find(silent.begin(), silent.end(), token) == silent.end()) stream.text->Put(token);
    }
  }
  if (is_end) {
    *news = py::make_tuple(id, ToList(stream.ids), stream.cached, py::none(), true,
                           stream.text->TakeAll(), stream.num_offered);
    streams_.erase(id);
  } else if (!stream.has_news() || stream.is_waiting) {
    return true;
  } else if (stream.offer) {
    try {
      Offer(stream);
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // such as KeyboardInterrupt
      *news = py::make_tuple(id, error.value());
    }
  } else if (stream.with_ids) {
    *news = py::make_tuple(id, stream.text->TakeCertain(), ToList(stream.ids));
    stream.ids.clear();
  } else {
    *news = py::make_tuple(id, stream.text->TakeCertain());
  }
  return true;
}

void TextStreams::Offer(Stream& stream) {
  const size_t num_ids = stream.with_ids ? stream.ids.size() : 0;
  const std::span<const int64_t> ids = std::span(stream.ids).first(num_ids);
  const auto text = stream.text->Certain().cast<std::string>();
  const py::bytes event(stream.form->Make(text, ids.subspan(stream.num_offered)));
  if (stream.offer(event).cast<bool>()) {
    stream.text->DropCertain();
    stream.num_offered = num_ids;
  } else {
    stream.is_waiting = true;
  }
}

void BindTextStreams(py::module_& m) {
  py::class_<EventForm, std::shared_ptr<EventForm>>(
      m, "EventForm", "Events that differ in their text alone, or in their text and token ids.")
      .def(py::init<std::string, std::optional<std::string>, std::string>(), py::arg("before"),
           py::arg("between"), py::arg("after"))
      .def_property_readonly("has_ids", &EventForm::has_ids)
      .def(
          "__call__",
          [](const EventForm& form, const std::string& text, const std::vector<int64_t>& ids) {
            return py::bytes(form.Make(text, ids));
          },
          py::arg("text"), py::arg("ids") = std::vector<int64_t>(), "The event.");

  py::class_<TextStreams, std::shared_ptr<TextStreams>>(
      m, "TextStreams", "Queues of which the text, or text and ids, are wanted while they run.")
      .def(py::init())
      .def("add", &TextStreams::Add, py::arg("queue"), py::arg("text"), py::arg("silent_ids"),
           py::arg("with_ids") = false)
      .def("write_events", &TextStreams::WriteEvents, py::arg("queue"), py::arg("form"),
           py::arg("offer"))
      .def("resume", &TextStreams::Resume, py::arg("queue"))
      .def("remove", &TextStreams::Remove, py::arg("queue"));
}

}  // namespace allspark::python

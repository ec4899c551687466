// The text of many requests, made into a server's events as it comes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allspark/result_queue.h"
#include "python/byte_level.h"

namespace allspark::python {

// Events that differ in their text alone, or in their text and token ids: constants stand around
// these. Immutable.
class EventForm {
 public:
  // The text stands between `before` and `after`; or with `between` the text between it and
  // `before`, and the ids between it and `after`.
  EventForm(std::string before, std::optional<std::string> between, std::string after)
      : before_(std::move(before)), between_(std::move(between)), after_(std::move(after)) {}

  bool has_ids() const { return between_.has_value(); }
  // text: UTF-8. Ids are left out where the form has none.
  std::string Make(std::string_view text, std::span<const int64_t> ids) const;

 private:
  std::string before_;
  std::optional<std::string> between_;
  std::string after_;
};

pybind11::list ToList(std::span<const int64_t> ids);

// Queues of which nothing but the text is wanted while they run, or the text and the ids. What
// comes is told, or from WriteEvents on given to a client as an event, without a step of Python
// for each. Of a queue whose ids are not wanted, a step without text is nothing. Guarded by the
// GIL.
class TextStreams {
 public:
  // silent: ids that have no text. Requires: the request returns tokens alone; nobody else reads.
  void Add(const ResultQueue& queue, std::shared_ptr<ByteLevelText> text,
           std::vector<int64_t> silent, bool with_ids);
  void Remove(const ResultQueue& queue) { streams_.erase(queue.request_id()); }

  // From now on `offer` is called with an event as soon as there is something for it. Where it
  // returns False, what the event would show waits for Resume, as text and ids. No effect for
  // other queues.
  void WriteEvents(const ResultQueue& queue, std::shared_ptr<const EventForm> form,
                   pybind11::object offer);
  // Offers what waits as one event, and goes on. Throws what `offer` raises.
  void Resume(const ResultQueue& queue);

  // Reads a queue; false where it is none of these. `news` is then one of
  // - nothing: nothing came, or it was offered;
  // - the request's id, the text, and the ids where they are wanted;
  // - the id and the exception that `offer` raised;
  // - at the end the id, the ids that were not told, how many tokens of the prompt the prefix
  //   cache had, None, True, the last text, and how many of the ids were in events.
  bool Read(ResultQueue& queue, std::optional<pybind11::tuple>* news);

 private:
  struct Stream {
    std::shared_ptr<ByteLevelText> text;
    std::vector<int64_t> silent;
    bool with_ids = false;
    std::vector<int64_t> ids = {};  // not told yet
    size_t num_offered = 0;         // of them, in events
    int64_t cached = 0;             // tokens of the prompt that the prefix cache had
    std::shared_ptr<const EventForm> form = nullptr;
    pybind11::object offer = {};  // null: what comes is told
    bool is_waiting = false;      // for Resume

    bool has_news() const { return with_ids ? num_offered < ids.size() : text->has_certain(); }
  };

  static void Offer(Stream& stream);

  // Shared: what is called while a stream is read may remove it.
  std::unordered_map<uint64_t, std::shared_ptr<Stream>> streams_;
};

}  // namespace allspark::python

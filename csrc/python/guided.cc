// Guided decoding in Python: requests for masks wait in a queue, and a Python thread takes them
// from there, so that the engine's threads never call Python.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allspark/token_mask.h"
#include "python/bindings.h"
#include "python/gil.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

class MaskQueue;

class QueuedMask final : public TokenMask, public std::enable_shared_from_this<QueuedMask> {
 public:
  // end_tokens: allowed where the grammar accepts, and only there.
  QueuedMask(std::shared_ptr<MaskQueue> queue, std::vector<int32_t> end_tokens)
      : queue_(std::move(queue)), end_tokens_(std::move(end_tokens)) {}

  using TokenMask::Fail;
  using TokenMask::Finish;
  // Words that `row` lacks are all off: the model's vocabulary may be padded beyond the
  // tokenizer's.
  void Fill(const py::array_t<uint32_t, py::array::c_style>& row, bool accepting) {
    const std::span<uint32_t> target = words();
    const size_t count = std::min(target.size(), static_cast<size_t>(row.size()));
    std::copy_n(row.data(), count, target.begin());
    std::fill(target.begin() + static_cast<std::ptrdiff_t>(count), target.end(), 0);
    for (const int32_t token : end_tokens_) {
      const auto word = static_cast<size_t>(token / 32);
      if (word >= target.size()) continue;
      const uint32_t bit = uint32_t{1} << (token % 32);
      target[word] = accepting ? target[word] | bit : target[word] & ~bit;
    }
    Publish();
  }

 protected:
  void Next(int32_t token) override;
  void End() override;

 private:
  friend class MaskQueue;
  const std::shared_ptr<MaskQueue> queue_;
  const std::vector<int32_t> end_tokens_;
  // Guarded by the queue's mutex. A node of its list: posting allocates nothing.
  std::shared_ptr<QueuedMask> self_;  // keeps it alive while listed
  QueuedMask* next_ = nullptr;
  int32_t token_ = kNoToken;
  bool ended_ = false;
};

class MaskQueue {
 public:
  // (mask, the token chosen last or -1 at the beginning, or None: the request has ended)
  using Work = std::pair<std::shared_ptr<QueuedMask>, std::optional<int32_t>>;

  void Post(QueuedMask& mask, std::optional<int32_t> token) {
    std::lock_guard lock(mutex_);
    if (closed_) {
      if (token.has_value()) mask.Fail(kClosed);
      return;
    }
    mask.ended_ = !token.has_value();
    mask.token_ = token.value_or(mask.token_);
    if (mask.self_ != nullptr) return;
    mask.self_ = mask.shared_from_this();
    mask.next_ = nullptr;
    (tail_ != nullptr ? tail_->next_ : head_) = &mask;
    tail_ = &mask;
    posted_.notify_one();
  }

  // Waits for work; empty once closed.
  std::vector<Work> Take() {
    std::vector<Work> work;
    std::unique_lock lock(mutex_);
    posted_.wait(lock, [this] { return head_ != nullptr || closed_; });
    while (head_ != nullptr) {
      QueuedMask* mask = std::exchange(head_, head_->next_);
      const auto token = mask->ended_ ? std::nullopt : std::optional(mask->token_);
      work.emplace_back(std::move(mask->self_), token);
    }
    tail_ = nullptr;
    return work;
  }

  // Fails the masks that are posted, now and later.
  void Close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    while (head_ != nullptr) {
      QueuedMask* mask = std::exchange(head_, head_->next_);
      mask->Fail(kClosed);
      mask->self_.reset();
    }
    tail_ = nullptr;
    posted_.notify_all();
  }

 private:
  static constexpr const char* kClosed = "the thread that computes masks has ended";

  std::mutex mutex_;
  std::condition_variable posted_;
  // Guarded by mutex_.
  QueuedMask* head_ = nullptr;
  QueuedMask* tail_ = nullptr;
  bool closed_ = false;
};

void QueuedMask::Next(int32_t chosen) { queue_->Post(*this, chosen); }
void QueuedMask::End() { queue_->Post(*this, std::nullopt); }

}  // namespace

void BindGuided(py::module_& m) {
  py::class_<TokenMask, std::shared_ptr<TokenMask>>(m, "TokenMask",
                                                    "Which tokens a request may produce next.");
  py::class_<MaskQueue, std::shared_ptr<MaskQueue>>(m, "MaskQueue",
                                                    "Masks that wait for a Python thread.")
      .def(py::init<>())
      .def("take", &MaskQueue::Take, py::call_guard<GilReleased>(),
           "Waits for work: [(mask, token)], token -1 at the beginning and None at the end of a "
           "request. Empty once closed.")
      .def("close", &MaskQueue::Close);
  py::class_<QueuedMask, TokenMask, std::shared_ptr<QueuedMask>>(m, "QueuedMask",
                                                                 "The mask of one request.")
      .def(py::init<std::shared_ptr<MaskQueue>, std::vector<int32_t>>(), py::arg("queue"),
           py::arg("end_tokens"))
      .def("publish", &QueuedMask::Fill, py::arg("row"), py::arg("accepting"),
           "row: uint32, bit i % 32 of word i / 32 is token i's; end tokens follow `accepting`.")
      .def("finish", &QueuedMask::Finish, "The output is complete.")
      .def("fail", &QueuedMask::Fail, py::arg("message"));
}

}  // namespace allspark::python

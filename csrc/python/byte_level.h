// Decoding of byte-level vocabularies (GPT-2's): token ids become text as they come.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace allspark::python {

// The bytes of all tokens of a vocabulary. Constant, so any thread may read.
class ByteLevelVocabulary {
 public:
  // tokens: by id; None where there is no such id. special: ids.
  ByteLevelVocabulary(const std::vector<std::optional<pybind11::str>>& tokens,
                      const std::vector<size_t>& special);

  bool IsSpecial(size_t id) const { return id < is_special_.size() && is_special_[id]; }
  std::string_view Bytes(size_t id) const {
    if (id >= ends_.size()) return {};
    const size_t begin = id == 0 ? 0 : ends_[id - 1];
    return std::string_view(bytes_).substr(begin, ends_[id] - begin);
  }

 private:
  std::string bytes_;
  std::vector<size_t> ends_;
  std::vector<bool> is_special_;
};

// The text of one sequence of tokens. For one thread at a time, which holds the GIL.
class ByteLevelText {
 public:
  ByteLevelText(std::shared_ptr<const ByteLevelVocabulary> vocabulary, bool skip_special_tokens)
      : vocabulary_(std::move(vocabulary)), skip_special_tokens_(skip_special_tokens) {}

  // Adds a token. Throws ValueError for a negative id.
  void Put(int64_t id);
  // Whether TakeCertain has any.
  bool has_certain() const { return num_certain_ > 0; }
  // The text that later tokens cannot change.
  pybind11::str Certain() const { return Text(num_certain_); }
  void DropCertain() { Drop(num_certain_); }
  pybind11::str TakeCertain() { return Take(num_certain_); }
  pybind11::str TakeAll() { return Take(held_.size()); }

 private:
  // Of the first `size` bytes held.
  pybind11::str Text(size_t size) const;
  void Drop(size_t size);
  pybind11::str Take(size_t size);

  const std::shared_ptr<const ByteLevelVocabulary> vocabulary_;
  const bool skip_special_tokens_;
  std::string held_;        // the end may be a part of a character
  size_t num_certain_ = 0;  // bytes of it
};

}  // namespace allspark::python

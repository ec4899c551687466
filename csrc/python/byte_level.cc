#include "python/byte_level.h"

#include <pybind11/stl.h>

#include <array>

#include "python/bindings.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

// The byte for which a character of a vocabulary stands, or -1. Printable characters of Latin-1
// stand for themselves, and those from 256 on for the other bytes in turn (GPT-2's
// bytes_to_unicode).
constexpr int kNumLetters = 256 + 68;
std::array<int, kNumLetters> ByteOfLetter() {
  std::array<int, kNumLetters> byte_of;
  byte_of.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    byte_of[static_cast<size_t>(printable ? byte : next++)] = byte;
  }
  return byte_of;
}

// The bytes of a token: those that its characters stand for, or its own where one stands for none.
std::string BytesOf(const py::str& token) {
  static const std::array<int, kNumLetters> byte_of = ByteOfLetter();
  std::string bytes;
  const Py_ssize_t length = PyUnicode_GetLength(token.ptr());
  for (Py_ssize_t i = 0; i < length; ++i) {
    const Py_UCS4 letter = PyUnicode_ReadChar(token.ptr(), i);
    if (letter >= kNumLetters || byte_of[letter] < 0) return token;
    bytes.push_back(static_cast<char>(byte_of[letter]));
  }
  return bytes;
}

bool IsContinuation(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// Whether the bytes end with a whole character of UTF-8, other than U+FFFD. What stands before it
// does not matter: a first byte ends whatever was begun.
bool EndsWithCharacter(std::string_view bytes) {
  size_t length = 1;
  while (length < 4 && length < bytes.size() && IsContinuation(bytes[bytes.size() - length])) {
    ++length;
  }
  if (bytes.empty()) return false;
  const std::string_view last = bytes.substr(bytes.size() - length);
  const auto at = [&](size_t i) { return static_cast<unsigned char>(last[i]); };
  const unsigned char first = at(0);
  switch (length) {
    case 1:
      return first < 0x80;
    case 2:
      return first >= 0xc2 && first <= 0xdf;
    case 3:
      if (last == "\xef\xbf\xbd") return false;
      if (first == 0xe0) return at(1) >= 0xa0;
      if (first == 0xed) return at(1) <= 0x9f;  // else half of a surrogate pair
      return first >= 0xe1 && first <= 0xef;
    default:
      if (first == 0xf0) return at(1) >= 0x90;
      if (first == 0xf4) return at(1) <= 0x8f;
      return first >= 0xf1 && first <= 0xf3;
  }
}

}  // namespace

ByteLevelVocabulary::ByteLevelVocabulary(const std::vector<std::optional<py::str>>& tokens,
                                         const std::vector<size_t>& special)
    : is_special_(tokens.size()) {
  ends_.reserve(tokens.size());
  for (const std::optional<py::str>& token : tokens) {
    if (token.has_value()) bytes_ += BytesOf(*token);
    ends_.push_back(bytes_.size());
  }
  for (size_t id : special) is_special_.at(id) = true;
}

void ByteLevelText::Put(int64_t id) {
  if (id < 0) throw py::value_error("a token id is " + std::to_string(id));
  if (skip_special_tokens_ && vocabulary_->IsSpecial(static_cast<size_t>(id))) return;
  held_ += vocabulary_->Bytes(static_cast<size_t>(id));
  if (EndsWithCharacter(held_)) num_certain_ = held_.size();
}

py::str ByteLevelText::Text(size_t size) const {
  PyObject* text = PyUnicode_DecodeUTF8(held_.data(), static_cast<Py_ssize_t>(size), "replace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

void ByteLevelText::Drop(size_t size) {
  held_.erase(0, size);
  num_certain_ = 0;
}

py::str ByteLevelText::Take(size_t size) {
  py::str text = Text(size);
  Drop(size);
  return text;
}

void BindByteLevel(py::module_& m) {
  py::class_<ByteLevelVocabulary, std::shared_ptr<ByteLevelVocabulary>>(
      m, "ByteLevelVocabulary", "The bytes of each token of a vocabulary like GPT-2's.")
      .def(py::init<const std::vector<std::optional<py::str>>&, const std::vector<size_t>&>(),
           py::arg("tokens"), py::arg("special"));
  py::class_<ByteLevelText, std::shared_ptr<ByteLevelText>>(
      m, "ByteLevelText", "The text of tokens that come one by one.")
      .def(py::init<std::shared_ptr<const ByteLevelVocabulary>, bool>(), py::arg("vocabulary"),
           py::arg("skip_special_tokens"))
      .def(
          "put",
          [](ByteLevelText& text, const py::iterable& ids) {
            for (const py::handle id : ids) text.Put(id.cast<int64_t>());
            return text.TakeCertain();
          },
          py::arg("ids"), "The text that is now certain.")
      .def("flush", &ByteLevelText::TakeAll, "What was held back.");
}

}  // namespace allspark::python

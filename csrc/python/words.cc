// WordMatcher for Python: finds stop strings in text as it comes.

#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "allspark/word_matcher.h"
#include "python/bindings.h"
#include "python/gil.h"

namespace py = pybind11;

namespace allspark::python {
namespace {

// The code points; a str may hold half of a surrogate pair, which no encoding takes.
std::vector<int32_t> Characters(const py::str& text) {
  const auto length = static_cast<size_t>(PyUnicode_GetLength(text.ptr()));
  std::vector<Py_UCS4> points(length + 1);
  if (PyUnicode_AsUCS4(text.ptr(), points.data(), static_cast<Py_ssize_t>(points.size()),
                       /*copy_null=*/1) == nullptr) {
    throw py::error_already_set();
  }
  return {points.begin(), points.end() - 1};
}

std::unique_ptr<WordMatcher> ToMatcher(const std::vector<py::str>& words) {
  std::vector<std::vector<int32_t>> characters;
  characters.reserve(words.size());
  for (const py::str& word : words) characters.push_back(Characters(word));
  const GilReleased released;
  return std::make_unique<WordMatcher>(characters);
}

// (state, characters up to the end of the first word, or all; length of that word, or 0)
std::tuple<int32_t, size_t, int32_t> ReadWord(const WordMatcher& matcher, int32_t state,
                                              const py::str& text) {
  const std::vector<int32_t> characters = Characters(text);
  for (size_t i = 0; i < characters.size(); ++i) {
    state = matcher.Next(state, characters[i]);
    if (matcher.EndsWord(state)) return {state, i + 1, matcher.EndedLength(state)};
  }
  return {state, characters.size(), 0};
}

}  // namespace

void BindWords(py::module_& m) {
  py::class_<WordMatcher>(m, "WordMatcher", "Finds many words in a text that comes in pieces.")
      .def(py::init(&ToMatcher), py::arg("words"))
      .def("read", &ReadWord, py::arg("state"), py::arg("text"),
           "(state, characters read, length): reads up to the end of the first word, whose length "
           "is that of the longest which ends there, or all, and then it is 0. State 0 begins.")
      .def("matched_length", &WordMatcher::MatchedLength, py::arg("state"),
           "Length of the longest end of the text with which a word begins.");
}

}  // namespace allspark::python

// How a source file is named in messages: relative to the source root, so that a message is the
// same wherever the library was built and says nothing about the machine that built it.
#pragma once

#include <string_view>

namespace allspark::internal {

// "/any/where/csrc/base/check.cc" -> "base/check.cc"; a path outside csrc keeps its last component.
constexpr std::string_view SourcePath(std::string_view file) {
  constexpr std::string_view kRoot = "csrc/";
  for (size_t at = file.rfind(kRoot); at != std::string_view::npos;
       at = at == 0 ? std::string_view::npos : file.rfind(kRoot, at - 1)) {
    if (at == 0 || file[at - 1] == '/') return file.substr(at + kRoot.size());
  }
  const size_t slash = file.rfind('/');
  return slash == std::string_view::npos ? file : file.substr(slash + 1);
}

}  // namespace allspark::internal

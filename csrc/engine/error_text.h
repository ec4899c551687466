// Texts of errors on the step thread, where the heap may have no memory for them either.
#pragma once

#include <new>
#include <string>
#include <string_view>

namespace allspark {

// `begin` followed by `end`; or "out of memory", which fits into a string without an allocation.
inline std::string ErrorText(std::string_view begin, std::string_view end) noexcept {
  try {
    std::string text(begin);
    text += end;
    return text;
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

}  // namespace allspark

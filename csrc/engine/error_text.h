// Texts of errors on the step thread, where the heap may have no memory for them either.
#pragma once

#include <concepts>
#include <new>
#include <string>
#include <string_view>

namespace allspark {

// The text that `make` returns; or "out of memory", which fits into a string without an allocation.
template <std::invocable Make>
std::string ErrorText(Make make) noexcept {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

// `begin` followed by `end`.
inline std::string ErrorText(std::string_view begin, std::string_view end) noexcept {
  return ErrorText([&] { return std::string(begin).append(end); });
}
inline std::string ErrorText(std::string_view text) noexcept { return ErrorText("", text); }

}  // namespace allspark

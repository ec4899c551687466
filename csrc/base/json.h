// Writes JSON strings, the one part of JSON that needs escapes.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

namespace allspark {

// In quotes, with the shortest escapes. Bytes above 127 stay as they are: UTF-8 stays UTF-8.
inline std::string JsonString(std::string_view text) {
  constexpr std::string_view kEscaped = "\"\\\b\t\n\f\r";
  constexpr std::string_view kLetters = "\"\\btnfr";
  std::string json = "\"";
  for (const char c : text) {
    if (const size_t found = kEscaped.find(c); found != std::string_view::npos) {
      json += '\\';
      json += kLetters[found];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      json += escape;
    } else {
      json += c;
    }
  }
  return json + '"';
}

}  // namespace allspark

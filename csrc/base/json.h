// Writes JSON strings, the one part of JSON that needs escapes.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace allspark {

// In quotes, with escapes. Bytes above 127 stay as they are: UTF-8 stays UTF-8.
inline std::string JsonString(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
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

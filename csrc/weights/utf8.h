// Whether bytes are well-formed UTF-8, as protobuf requires of strings. Private to weights/. Any
// thread.
#pragma once

#include <cstdint>
#include <string_view>

namespace allspark::weights {

// True for shortest-form sequences of code points up to U+10FFFF, surrogates excluded.
inline bool IsUtf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const int extra = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4) return false;
    uint32_t code = lead & (0x3fu >> extra);
    for (int k = 0; k < extra; ++k) {
      if (i == text.size()) return false;
      const auto next = static_cast<unsigned char>(text[i++]);
      if ((next & 0xc0) != 0x80) return false;
      code = (code << 6) | (next & 0x3fu);
    }
    if (extra == 2 && (code < 0x800 || (code >= 0xd800 && code <= 0xdfff))) return false;
    if (extra == 3 && (code < 0x10000 || code > 0x10ffff)) return false;
  }
  return true;
}

}  // namespace allspark::weights

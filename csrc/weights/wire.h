// The parts of this folder's file formats: little-endian numbers, the magic and version at the
// start of each file, and protobuf messages. Messages are written deterministically, and checked
// before they are parsed. Private to weights/. Pure functions of their arguments; any thread.
#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message_lite.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "allspark/status.h"

namespace allspark::weights {

inline constexpr int64_t kMagicBytes = 8;

inline void PutU32(unsigned char* at, uint32_t value) { std::memcpy(at, &value, sizeof(value)); }
inline void PutU64(unsigned char* at, uint64_t value) { std::memcpy(at, &value, sizeof(value)); }
inline uint32_t GetU32(const void* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
inline uint64_t GetU64(const void* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// The offset of the first byte of [begin, end) that is not zero, or end.
int64_t FindNonZero(const unsigned char* data, int64_t begin, int64_t end);

// Checks the first 16 bytes of a file: magic, a version from 1 to `newest`, flags 0. `kind` is for
// messages. DataLoss or Unimplemented, with the offset; the caller adds the file's name.
Status CheckMagicAndVersion(const void* bytes, const char* magic, const char* kind,
                            uint32_t newest);

// Equal messages give equal bytes.
std::string SerializeDeterministic(const google::protobuf::MessageLite& message);

// Calls on_field(number, data, bytes) for each length-delimited field of one serialised message.
// DataLoss if the bytes are no message; offsets in the error count from `origin`.
template <typename OnField>
Status WalkMessage(const char* data, int size, int64_t origin, OnField on_field) {
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const uint8_t*>(data), size);
  while (const uint32_t tag = in.ReadTag()) {
    uint64_t skipped;
    uint32_t length = 0;
    bool ok = false;
    switch (tag & 7u) {
      case 0:
        ok = in.ReadVarint64(&skipped);
        break;
      case 1:
        ok = in.Skip(8);
        break;
      case 2:
        ok = in.ReadVarint32(&length);
        if (ok) {
          const int begin = in.CurrentPosition();
          ok = in.Skip(static_cast<int>(length));
          if (ok) AS_RETURN_IF_ERROR(on_field(tag >> 3, data + begin, static_cast<int>(length)));
        }
        break;
      case 5:
        ok = in.Skip(4);
        break;
      default:
        break;  // Groups are not used by any version.
    }
    if (!ok) {
      return Status::DataLoss("the message is malformed near offset " +
                              std::to_string(origin + in.CurrentPosition()));
    }
  }
  return Status::Ok();
}

}  // namespace allspark::weights

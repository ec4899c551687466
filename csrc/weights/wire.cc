#include "weights/wire.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>

namespace allspark::weights {
namespace {

std::string Hex(uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15];
  return text;
}

}  // namespace

int64_t FindNonZero(const unsigned char* data, int64_t begin, int64_t end) {
  return std::find_if(data + begin, data + end, [](unsigned char c) { return c != 0; }) - data;
}

Status CheckMagicAndVersion(const void* bytes, const char* magic, const char* kind,
                            uint32_t newest) {
  const auto* at = static_cast<const char*>(bytes);
  if (std::memcmp(at, magic, kMagicBytes) != 0) {
    return Status::DataLoss(std::string("not a ") + kind + " file: wrong magic at offset 0");
  }
  const uint32_t version = GetU32(at + 8);
  if (version == 0) return Status::DataLoss("format version 0 at offset 8; the first is 1");
  if (version > newest) {
    return Status::Unimplemented("written by a newer version (format " + std::to_string(version) +
                                 "); this build reads up to " + std::to_string(newest));
  }
  const uint32_t flags = GetU32(at + 12);
  if (flags != 0) {
    return Status::DataLoss("unknown flags " + Hex(flags) + " at offset 12; format " +
                            std::to_string(version) + " has none");
  }
  return Status::Ok();
}

std::string SerializeDeterministic(const google::protobuf::MessageLite& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream out(&stream);
  out.SetSerializationDeterministic(true);  // Map order must not differ between two runs.
  message.SerializeToCodedStream(&out);
  out.Trim();
  return bytes;
}

}  // namespace allspark::weights

// Helpers of the fuzz targets: the form of an input, memory whose exact end the sanitizer knows,
// and a folder for files.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "allspark/status.h"

namespace allspark::fuzz {

// mode (1 byte), size of the head (2 bytes, little-endian), head, tail.
struct Input {
  unsigned mode;
  std::string head, tail;

  static std::optional<Input> Parse(const uint8_t* data, size_t size) {
    if (size < 3) return std::nullopt;
    const size_t head_bytes = std::min(data[1] + size_t{256} * data[2], size - 3);
    const char* head = reinterpret_cast<const char*>(data) + 3;
    return Input{data[0], std::string(head, head_bytes),
                 std::string(head + head_bytes, size - 3 - head_bytes)};
  }

  std::string Bytes() const {
    std::string bytes(1, static_cast<char>(mode));
    bytes += static_cast<char>(head.size() & 0xff);
    bytes += static_cast<char>(head.size() >> 8);
    return bytes + head + tail;
  }
};

// A copy of bytes in memory of exactly their size, aligned to 64.
class ExactBytes {
 public:
  explicit ExactBytes(const std::string& bytes) : size_(bytes.size()) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, std::max<size_t>(size_, 1)) != 0) abort();
    data_ = static_cast<unsigned char*>(memory);
    std::memcpy(data_, bytes.data(), size_);
  }
  ~ExactBytes() { free(data_); }
  ExactBytes(const ExactBytes&) = delete;
  ExactBytes& operator=(const ExactBytes&) = delete;

  const unsigned char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  unsigned char* data_;
  size_t size_;
};

// Checks a step of making a seed.
inline void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "a seed cannot be made: %s\n", status.ToString().c_str());
  abort();
}

inline void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A folder of this process, in an in-memory file system if there is one; removed at exit.
inline const std::string& ScratchFolder() {
  static const std::string folder = [] {
    const char* base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    std::string pattern = std::string(base) + "/allspark-fuzz-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) abort();
    static std::string to_remove = pattern;
    atexit([] {
      std::error_code ignored;
      std::filesystem::remove_all(to_remove, ignored);
    });
    return pattern;
  }();
  return folder;
}

}  // namespace allspark::fuzz

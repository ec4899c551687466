// The few system calls that reader and writer need; errors are Status values that name the path.
// Private to weights/. No shared state; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "allspark/status.h"
#include "platform/home_process.h"
#include "platform/mapping_watch.h"

namespace allspark::weights {

inline constexpr int64_t kHugePageBytes = 2 << 20;

// "cannot <action> <path>: <reason of error number>"; the code distinguishes lack of room, a
// missing file, and other errors.
Status ErrnoStatus(std::string_view action, const std::string& path, int error);
// "<path>: <message of status>", with the code of status.
Status InFile(const std::string& path, const Status& status);

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();
  int get() const { return fd_; }
  // Gives the descriptor to the caller.
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Opens a regular file for reading; anything else (directory, FIFO, device) is an error, and never
// blocks.
struct OpenedFile {
  UniqueFd fd;
  int64_t bytes = 0;
};
Result<OpenedFile> OpenRegularFile(const std::string& path);

Status ReadFully(int fd, const std::string& path, int64_t offset, void* data, int64_t bytes);
Status WriteFully(int fd, const std::string& path, int64_t offset, const void* data, int64_t bytes);

// A read-write anonymous mapping, or a read-only mapping of a file. If the file is made shorter
// meanwhile, the missing part reads as zeros and the mapping is broken.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(watch_, other.watch_);
    return *this;
  }
  ~Mapping();

  // Zeroed memory aligned to a huge page, in huge pages where the system has them.
  static Result<Mapping> Anonymous(int64_t bytes);
  static Result<Mapping> File(const OpenedFile& file, const std::string& path);

  unsigned char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool IsBroken() const { return watch_.IsBroken(); }
  // After this call, a write to the mapping faults.
  void MakeReadOnly();
  // For a file: gives the pages' memory back to the system; the next access reads the file again.
  void ReleasePages() const;
  // Maps the pages of a part now, in one call; false if they cannot be read: the file became
  // shorter.
  bool Populate(int64_t offset, int64_t bytes) const;

 private:
  void* base_ = nullptr;
  size_t mapped_bytes_ = 0;
  unsigned char* data_ = nullptr;
  int64_t bytes_ = 0;
  MappingWatch watch_;  // for a file
};

// A new file in the folder of its final path, under a temporary name. The destructor removes it
// unless it was committed, but not in a fork of the process that writes it. The file is locked: an
// unlocked one is left over from a killed process, and the next TempFile for the same path removes
// it.
class TempFile {
 public:
  TempFile() = default;
  TempFile(TempFile&& other) noexcept { *this = std::move(other); }
  TempFile& operator=(TempFile&& other) noexcept {
    std::swap(home_, other.home_);
    std::swap(fd_, other.fd_);
    std::swap(lock_, other.lock_);
    std::swap(temp_path_, other.temp_path_);
    std::swap(final_path_, other.final_path_);
    return *this;
  }
  ~TempFile();

  // Fails here if the file system or a limit has no room for `bytes`.
  static Result<TempFile> Create(const std::string& final_path, int64_t bytes);
  int fd() const { return fd_.get(); }
  const std::string& final_path() const { return final_path_; }
  Status Close();
  // Renames the closed file to final_path and replaces any file there.
  Status Commit();

 private:
  HomeProcess home_;
  UniqueFd fd_;
  UniqueFd lock_;          // keeps the closed file locked until it has its final name
  std::string temp_path_;  // empty once committed
  std::string final_path_;
};

}  // namespace allspark::weights

// The few system calls that reader and writer need, with errors as Status values that name the
// path. Private to weights/. No shared state; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "allspark/status.h"
#include "platform/home_process.h"
#include "platform/mapping_watch.h"

namespace allspark::weights {

// "cannot <action> <path>: <reason of error number>"; the code tells lack of room, absence, and the
// rest apart.
Status ErrnoStatus(std::string_view action, const std::string& path, int error);

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

// A read-write anonymous, or read-only file mapping. A file that somebody makes shorter meanwhile
// reads as zeros from there on, and the mapping is broken.
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

  // Zeroed memory at a huge page boundary, in huge pages where the system gives them.
  static Result<Mapping> Anonymous(int64_t bytes);
  static Result<Mapping> File(const OpenedFile& file, const std::string& path);

  unsigned char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool IsBroken() const { return watch_.IsBroken(); }
  // From here on a write to it faults.
  void MakeReadOnly();
  // Of a file: gives the memory behind the pages back; they are read again when they are touched.
  void ReleasePages() const;
  // Maps the pages of a part now, in one call; false when the file under it has become shorter.
  bool Populate(int64_t offset, int64_t bytes) const;

 private:
  void* base_ = nullptr;
  size_t mapped_bytes_ = 0;
  unsigned char* data_ = nullptr;
  int64_t bytes_ = 0;
  MappingWatch watch_;  // of a file
};

// A new file beside its final path, under a name of its own; removed unless committed, though not
// by a fork of the process that writes it. It is locked: one without a lock is a killed process's,
// and the next one for the same path removes it.
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

  // `bytes` are asked for up front: a file system or a limit without room for them is an error
  // here.
  static Result<TempFile> Create(const std::string& final_path, int64_t bytes);
  int fd() const { return fd_.get(); }
  const std::string& final_path() const { return final_path_; }
  Status Close();
  // Puts the closed file in place of whatever final_path named.
  Status Commit();

 private:
  HomeProcess home_;
  UniqueFd fd_;
  UniqueFd lock_;          // of the closed file, until it has its final name
  std::string temp_path_;  // empty once committed
  std::string final_path_;
};

}  // namespace allspark::weights

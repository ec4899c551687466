#include "weights/file_io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "platform/system_limits.h"
#include "weights/format.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older C libraries do not name it.
#endif

namespace allspark::weights {
namespace {

StatusCode CodeOfErrno(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return StatusCode::kResourceExhausted;
    case ENOENT:
      return StatusCode::kNotFound;
    case EISDIR:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case EINVAL:
      return StatusCode::kInvalidArgument;
    case EIO:
      return StatusCode::kDataLoss;
    default:
      return StatusCode::kFailedPrecondition;
  }
}

const char* KindOfFile(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISSOCK(mode)) return "a socket";
  return "not a regular file";
}

Status NoRoom(const std::string& path, int64_t bytes, const std::string& why) {
  return Status(StatusCode::kResourceExhausted, AsStatus::kIoError,
                path + " needs " + std::to_string(bytes) + " bytes; " + why);
}

// The status of a failed mapping. If memory or address space ran out, the message adds which limit
// is reached.
Status NoMapping(const std::string& what, int error) {
  const Status status = ErrnoStatus("map", what, error);
  if (error != ENOMEM) return status;
  return Status(status.code(), status.as_status(),
                status.message() + "; " + AvailableMemory().source +
                    "; the memory region of an engine takes less with a lower BFC_MEM_RATIO");
}

// Reports a lack of room before hours of conversion, not after. Each write still checks for it.
Status CheckRoom(int fd, const std::string& path, int64_t bytes) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(bytes)) {
    return NoRoom(path, bytes,
                  "this process may write files of " + std::to_string(limit.rlim_cur) +
                      " bytes (RLIMIT_FSIZE)");
  }
  struct statvfs fs;
  // Some user-space file systems report no sizes at all.
  if (fstatvfs(fd, &fs) != 0 || fs.f_blocks == 0 || fs.f_frsize == 0) return Status::Ok();
  const auto blocks = static_cast<uint64_t>(CeilDiv(bytes, static_cast<int64_t>(fs.f_frsize)));
  if (blocks > fs.f_bavail) {
    return NoRoom(path, bytes,
                  "its file system has " + std::to_string(fs.f_bavail * fs.f_frsize) + " free");
  }
  return Status::Ok();
}

// A system call would take the path to end at a NUL character.
Status CheckPath(const std::string& path) {
  const size_t end = path.find('\0');
  if (end == std::string::npos) return Status::Ok();
  return Status(StatusCode::kInvalidArgument, AsStatus::kIoError,
                path.substr(0, end) + "...: a path with a NUL character at " + std::to_string(end));
}

constexpr std::string_view kTempMark = ".tmp-";

// Removes the temporary files of `final_path` that no process has locked: their processes have
// ended.
void RemoveLeftovers(const std::string& final_path) {
  const std::filesystem::path path(final_path);
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::string prefix = path.filename().string() + std::string(kTempMark);
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (const std::filesystem::directory_iterator end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(prefix) ||
        name.find_first_not_of("0123456789-", prefix.size()) != std::string::npos) {
      continue;
    }
    const std::string& leftover = entry->path().native();
    const UniqueFd fd(open(leftover.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
    if (fd.get() >= 0 && flock(fd.get(), LOCK_EX | LOCK_NB) == 0) unlink(leftover.c_str());
  }
}

// Locks a new file until its descriptors are closed. False: another process has just removed it, or
// is about to, as a leftover.
bool LockNew(int fd, const std::string& path) {
  // On a file system without locks, no leftover is ever removed.
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  return access(path.c_str(), F_OK) == 0;
}

}  // namespace

Status ErrnoStatus(std::string_view action, const std::string& path, int error) {
  return Status(
      CodeOfErrno(error), AsStatus::kIoError,
      "cannot " + std::string(action) + " " + path + ": " + std::generic_category().message(error));
}

Status InFile(const std::string& path, const Status& status) {
  return Status(status.code(), status.as_status(), path + ": " + status.message());
}

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) close(fd_);
}

Result<OpenedFile> OpenRegularFile(const std::string& path) {
  AS_RETURN_IF_ERROR(CheckPath(path));
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (fd.get() < 0) return ErrnoStatus("open", path, errno);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus("inspect", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument, AsStatus::kIoError,
                  path + " is " + KindOfFile(info.st_mode) + "; it must be a regular file");
  }
  OpenedFile file;
  file.fd = std::move(fd);
  file.bytes = info.st_size;
  return file;
}

Status ReadFully(int fd, const std::string& path, int64_t offset, void* data, int64_t bytes) {
  auto* at = static_cast<unsigned char*>(data);
  while (bytes > 0) {
    const ssize_t n = pread(fd, at, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus("read", path, errno);
    if (n == 0) {
      return Status::DataLoss(path + " ends at offset " + std::to_string(offset) + ", " +
                              std::to_string(bytes) + " bytes early");
    }
    at += n;
    offset += n;
    bytes -= n;
  }
  return Status::Ok();
}

Status WriteFully(int fd, const std::string& path, int64_t offset, const void* data,
                  int64_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  while (bytes > 0) {
    const ssize_t n = pwrite(fd, at, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus("write at offset " + std::to_string(offset) + " of", path, errno);
    at += n;
    offset += n;
    bytes -= n;
  }
  return Status::Ok();
}

Mapping::~Mapping() {
  watch_ = MappingWatch();
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
}

Result<Mapping> Mapping::Anonymous(int64_t bytes) {
  const std::string what = "a memory image of " + std::to_string(bytes) + " bytes";
  const MemoryBound available = AvailableMemory();
  // The kernel would grant the memory anyway, and kill the process later.
  if (bytes > available.bytes) {
    return Status::ResourceExhausted(what + " does not fit: " + std::to_string(available.bytes) +
                                     " bytes of memory are available: " + available.source);
  }
  const auto size = static_cast<size_t>(bytes + kHugePageBytes);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NoMapping(what, errno);
  Mapping mapping;
  mapping.base_ = base;
  mapping.mapped_bytes_ = size;
  mapping.data_ = reinterpret_cast<unsigned char*>(
      AlignUp(static_cast<int64_t>(reinterpret_cast<uintptr_t>(base)), kHugePageBytes));
  mapping.bytes_ = bytes;
  // Fails where huge pages are disabled; that costs speed only.
  (void)madvise(mapping.data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return mapping;
}

Result<Mapping> Mapping::File(const OpenedFile& file, const std::string& path) {
  const auto size = static_cast<size_t>(file.bytes);
  void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (base == MAP_FAILED) return NoMapping(path, errno);
  Mapping mapping;
  mapping.base_ = base;
  mapping.mapped_bytes_ = size;
  mapping.data_ = static_cast<unsigned char*>(base);
  mapping.bytes_ = file.bytes;
  mapping.watch_ = MappingWatch(base, size);
  (void)madvise(base, size, MADV_HUGEPAGE);
  (void)madvise(base, size, MADV_WILLNEED);
  return mapping;
}

void Mapping::MakeReadOnly() { (void)mprotect(base_, mapped_bytes_, PROT_READ); }

void Mapping::ReleasePages() const {
  if (base_ != nullptr) (void)madvise(base_, mapped_bytes_, MADV_DONTNEED);
}

bool Mapping::Populate(int64_t offset, int64_t bytes) const {
  const int64_t begin = offset / kTensorAlignment * kTensorAlignment;
  const auto size = static_cast<size_t>(offset + bytes - begin);
  if (madvise(data_ + begin, size, MADV_POPULATE_READ) == 0) return true;
  return errno != EFAULT && errno != EHWPOISON;  // EINVAL: an older kernel.
}

TempFile::~TempFile() {
  if (!temp_path_.empty() && home_.IsHere()) unlink(temp_path_.c_str());
}

Result<TempFile> TempFile::Create(const std::string& final_path, int64_t bytes) {
  static std::atomic<uint64_t> counter{0};
  AS_RETURN_IF_ERROR(CheckPath(final_path));
  struct stat info;
  if (stat(final_path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument, AsStatus::kIoError,
                  final_path + " is " + KindOfFile(info.st_mode) + "; it cannot be replaced");
  }
  RemoveLeftovers(final_path);
  TempFile file;
  file.final_path_ = final_path;
  std::string temp_path;
  do {
    temp_path = final_path + std::string(kTempMark) + std::to_string(getpid()) + "-" +
                std::to_string(counter++);
    file.fd_ = UniqueFd(open(temp_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  } while (file.fd_.get() < 0 ? errno == EEXIST : !LockNew(file.fd(), temp_path));
  if (file.fd_.get() < 0) return ErrnoStatus("create", temp_path, errno);
  file.temp_path_ = temp_path;
  AS_RETURN_IF_ERROR(CheckRoom(file.fd(), final_path, bytes));
  if (ftruncate(file.fd(), bytes) != 0) return ErrnoStatus("extend", temp_path, errno);
  return file;
}

Status TempFile::Close() {
  lock_ = UniqueFd(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  // Network file systems report a failed write only here.
  if (close(fd_.Release()) != 0) return ErrnoStatus("close", temp_path_, errno);
  return Status::Ok();
}

Status TempFile::Commit() {
  if (rename(temp_path_.c_str(), final_path_.c_str()) != 0) {
    return ErrnoStatus("rename " + temp_path_ + " to", final_path_, errno);
  }
  temp_path_.clear();
  lock_ = UniqueFd();
  return Status::Ok();
}

}  // namespace allspark::weights

#include "memory/bfc_region.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/int_math.h"
#include "base/log.h"
#include "memory/poison.h"

namespace allspark {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// The committed part grows by at least this, to keep the number of system calls low.
constexpr size_t kCommitStep = size_t{32} << 20;
// A free chunk gives its pages back once this much of it may be backed by memory.
constexpr size_t kGiveBackBytes = size_t{1} << 20;

// AddressSanitizer writes an eighth of a range that is poisoned or unpoisoned. Of a large range,
// such as a KV pool that was never touched, only the beginning is poisoned.
constexpr size_t kMaxPoison = size_t{64} << 20;

size_t PageBytes() {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

std::byte* AlignDown(std::byte* p, size_t alignment) {
  return p - reinterpret_cast<uintptr_t>(p) % alignment;
}
std::byte* AlignUp(std::byte* p, size_t alignment) {
  const size_t beyond = reinterpret_cast<uintptr_t>(p) % alignment;
  return beyond == 0 ? p : p + (alignment - beyond);
}

// Puts memory behind every page of the range now.
int Populate(std::byte* begin, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;  // EINVAL: a kernel before 5.14.
#endif
  for (size_t at = 0; at < bytes; at += PageBytes()) {
    *reinterpret_cast<volatile unsigned char*>(begin + at) = 0;
  }
  return 0;
}

}  // namespace

Result<std::unique_ptr<BfcRegion>> BfcRegion::Create(int64_t bytes, bool grow) {
  if (bytes < static_cast<int64_t>(kHugePage)) {
    return Status::InvalidArgument("the memory region is " + std::to_string(bytes) +
                                   " bytes; it must be at least " + std::to_string(kHugePage));
  }
  const size_t size = static_cast<size_t>(bytes) / kHugePage * kHugePage;
  const size_t mapping_bytes = size + kHugePage;  // Room to align the base.
  void* mapping =
      mmap(nullptr, mapping_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    const int error = errno;
    return Status::ResourceExhausted(
        "cannot reserve " + std::to_string(size) +
        " bytes of address space: " + std::generic_category().message(error));
  }
  std::byte* const first = static_cast<std::byte*>(mapping);
  std::unique_ptr<BfcRegion> region(
      new BfcRegion(first, mapping_bytes, AlignUp(first, kHugePage), size, grow));
  region->Open();
  // A refusal costs speed only: huge pages may be turned off.
  madvise(region->base_, size, MADV_HUGEPAGE);
  if (!grow) {
    int error = region->Commit(region->base_ + size) ? 0 : errno;
    if (error == 0) error = Populate(region->base_, size);
    if (error != 0) {
      return Status::ResourceExhausted(
          "cannot commit " + std::to_string(size) +
          " bytes of memory: " + std::generic_category().message(error));
    }
  }
  return region;
}

BfcRegion::BfcRegion(std::byte* mapping, size_t mapping_bytes, std::byte* base, size_t bytes,
                     bool grow)
    : mapping_(mapping),
      mapping_bytes_(mapping_bytes),
      base_(base),
      bytes_(bytes),
      grow_(grow),
      committed_end_(base),
      poisoned_end_(base) {}

void BfcRegion::Open() {
  chunks_[base_].size = bytes_;
  free_index_.emplace(bytes_, base_);
  stats_.pool_bytes = static_cast<int64_t>(bytes_);
}

BfcRegion::~BfcRegion() {
  if (stats_.num_live != 0) {
    AS_LOG(kError) << "a memory region ends with " << stats_.num_live << " allocations of "
                   << stats_.bytes_in_use << " bytes still in use";
  }
  Unpoison(base_, static_cast<size_t>(poisoned_end_ - base_));
  munmap(mapping_, mapping_bytes_);
}

void* BfcRegion::Allocate(size_t bytes) {
  if (bytes == 0 || bytes > bytes_) return nullptr;
  const size_t size = AlignUp(bytes, kBufferAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    std::byte* const ptr = AllocateLocked(size);
    if (ptr != nullptr && ptr < poisoned_end_) {
      Unpoison(ptr, std::min(bytes, static_cast<size_t>(poisoned_end_ - ptr)));
    }
    return ptr;
  } catch (const std::bad_alloc&) {
    return nullptr;  // No heap memory for the chunk's records; nothing has changed.
  }
}

// Everything that can fail comes before the first change.
std::byte* BfcRegion::AllocateLocked(size_t size) {
  const auto fit = free_index_.lower_bound({size, nullptr});
  if (fit == free_index_.end()) return nullptr;
  std::byte* const begin = fit->second;
  const auto found = chunks_.find(begin);
  Chunk& chunk = found->second;
  const size_t rest = chunk.size - size;
  ChunkMap rest_chunk;
  FreeIndex rest_index;
  if (rest > 0) {
    rest_chunk[begin + size];
    rest_index.emplace(rest, begin + size);
  }
  if (!Commit(begin + size)) return nullptr;

  chunk.spare = free_index_.extract(fit);
  chunk.in_use = true;
  chunk.size = size;
  if (rest > 0) {
    Chunk& free_chunk = rest_chunk.begin()->second;
    free_chunk.size = rest;
    free_chunk.dirty_begin = std::max(chunk.dirty_begin, begin + size);
    free_chunk.dirty_end = std::max(chunk.dirty_end, free_chunk.dirty_begin);
    chunks_.insert(rest_chunk.extract(rest_chunk.begin()));
    free_index_.insert(rest_index.extract(rest_index.begin()));
  }
  chunk.dirty_begin = chunk.dirty_end = nullptr;

  ++stats_.num_allocs;
  ++stats_.num_live;
  stats_.bytes_in_use += static_cast<int64_t>(size);
  return begin;
}

// Best fit takes the untouched end of the region last, so one high-water mark describes what is
// committed.
bool BfcRegion::Commit(std::byte* end) {
  if (end <= committed_end_) return true;
  const size_t left = static_cast<size_t>(base_ + bytes_ - committed_end_);
  const size_t needed = static_cast<size_t>(end - committed_end_);
  const size_t exact = AlignUp(needed, kHugePage);
  for (const size_t step : {std::min(std::max(exact, kCommitStep), left), exact}) {
    if (mprotect(committed_end_, step, PROT_READ | PROT_WRITE) == 0) {
      committed_end_ += step;
      return true;
    }
  }
  return false;
}

void BfcRegion::Free(void* ptr) {
  if (ptr == nullptr) return;
  std::byte* const begin = static_cast<std::byte*>(ptr);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto chunk = chunks_.find(begin);
  AS_CHECK(chunk != chunks_.end()) << "freed pointer " << ptr << " is no allocation of this region";
  AS_CHECK(chunk->second.in_use) << "pointer " << ptr << " is freed twice";
  const size_t size = chunk->second.size;
  --stats_.num_live;
  stats_.bytes_in_use -= static_cast<int64_t>(size);
  const size_t poisoned = std::min(size, kMaxPoison);
  Poison(begin, poisoned);
  poisoned_end_ = std::max(poisoned_end_, begin + poisoned);

  FreeIndex::node_type entry = std::move(chunk->second.spare);
  chunk->second.in_use = false;
  chunk->second.dirty_begin = begin;
  chunk->second.dirty_end = begin + size;
  const auto next = std::next(chunk);
  if (next != chunks_.end() && !next->second.in_use) chunk = MergeWithNext(chunk);
  if (chunk != chunks_.begin() && !std::prev(chunk)->second.in_use) {
    chunk = MergeWithNext(std::prev(chunk));
  }
  if (grow_) GiveBack(chunk->first, chunk->second);
  entry.value() = {chunk->second.size, chunk->first};
  free_index_.insert(std::move(entry));
}

// Takes the index entries of both out of free_index_ where they have one.
BfcRegion::ChunkMap::iterator BfcRegion::MergeWithNext(ChunkMap::iterator chunk) {
  const auto next = std::next(chunk);
  free_index_.erase({chunk->second.size, chunk->first});
  free_index_.erase({next->second.size, next->first});
  Chunk& low = chunk->second;
  const Chunk& high = next->second;
  if (low.dirty_begin == low.dirty_end) {
    low.dirty_begin = high.dirty_begin;
    low.dirty_end = high.dirty_end;
  } else if (high.dirty_begin != high.dirty_end) {
    low.dirty_end = high.dirty_end;
  }
  low.size += high.size;
  chunks_.erase(next);
  return chunk;
}

void BfcRegion::GiveBack(std::byte* begin, Chunk& chunk) {
  if (static_cast<size_t>(chunk.dirty_end - chunk.dirty_begin) < kGiveBackBytes) return;
  // Widened to huge pages: touching a byte may have put memory behind all of its huge page.
  // Narrowed to the chunk's own pages: one shared with a neighbour in use goes with whichever of
  // the two is freed last.
  std::byte* const first =
      std::max(AlignDown(chunk.dirty_begin, kHugePage), AlignUp(begin, PageBytes()));
  std::byte* const last =
      std::min(AlignUp(chunk.dirty_end, kHugePage), AlignDown(begin + chunk.size, PageBytes()));
  if (first < last) madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED);
  chunk.dirty_begin = chunk.dirty_end = nullptr;
}

AllocatorStats BfcRegion::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  AllocatorStats stats = stats_;
  if (!free_index_.empty()) {
    stats.largest_free_bytes = static_cast<int64_t>(free_index_.rbegin()->first);
  }
  return stats;
}

Status BfcRegion::CheckConsistency() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::byte* expected = base_;
  size_t num_free = 0;
  int64_t num_live = 0, bytes_in_use = 0;
  bool previous_free = false;
  for (const auto& [begin, chunk] : chunks_) {
    const std::string where = "chunk at offset " + std::to_string(begin - base_);
    if (begin != expected) return Status::Internal(where + " does not follow its neighbour");
    if (chunk.size == 0 || chunk.size % kBufferAlignment != 0) {
      return Status::Internal(where + " has size " + std::to_string(chunk.size));
    }
    expected = begin + chunk.size;
    if (chunk.in_use) {
      ++num_live;
      bytes_in_use += static_cast<int64_t>(chunk.size);
      if (chunk.spare.empty()) return Status::Internal(where + " has no spare index entry");
      if (expected > committed_end_) return Status::Internal(where + " is not committed");
    } else {
      ++num_free;
      if (previous_free) return Status::Internal(where + " and its neighbour are both free");
      if (free_index_.count({chunk.size, begin}) != 1) {
        return Status::Internal(where + " is not in the free index");
      }
      if (chunk.dirty_begin != chunk.dirty_end &&
          (chunk.dirty_begin < begin || chunk.dirty_end > expected)) {
        return Status::Internal(where + " has a dirty range outside of it");
      }
    }
    previous_free = !chunk.in_use;
  }
  if (expected != base_ + bytes_) return Status::Internal("chunks do not cover the region");
  if (num_free != free_index_.size()) return Status::Internal("the free index has stray entries");
  if (num_live != stats_.num_live || bytes_in_use != stats_.bytes_in_use) {
    return Status::Internal("the statistics disagree with the chunks");
  }
  return Status::Ok();
}

}  // namespace allspark

// LruList: entries in the order of their last use, with its time; the oldest are the next to be
// forgotten. Sized at construction, nothing allocates later. Private to kv_cache/.
#pragma once

#include <cstdint>
#include <vector>

namespace allspark {

class LruList {
 public:
  static constexpr int32_t kNone = -1;

  // For entries 0 to num_entries - 1, none of which is in it.
  explicit LruList(int64_t num_entries) : entries_(static_cast<size_t>(num_entries)) {}

  int64_t size() const { return size_; }
  // kNone: there is none.
  int32_t oldest() const { return oldest_; }
  int64_t last_used_us(int32_t entry) const {
    return entries_[static_cast<size_t>(entry)].last_used_us;
  }

  // Adds an entry, as the one used last.
  void Append(int32_t entry, int64_t now_us) {
    At(entry) = {.last_used_us = now_us, .older = newest_};
    (newest_ != kNone ? At(newest_).newer : oldest_) = entry;
    newest_ = entry;
    ++size_;
  }
  void Erase(int32_t entry) {
    const Entry& erased = At(entry);
    (erased.older != kNone ? At(erased.older).newer : oldest_) = erased.newer;
    (erased.newer != kNone ? At(erased.newer).older : newest_) = erased.older;
    --size_;
  }

 private:
  struct Entry {
    int64_t last_used_us = 0;
    int32_t older = kNone;
    int32_t newer = kNone;
  };

  Entry& At(int32_t entry) { return entries_[static_cast<size_t>(entry)]; }

  std::vector<Entry> entries_;
  int32_t oldest_ = kNone, newest_ = kNone;
  int64_t size_ = 0;
};

}  // namespace allspark

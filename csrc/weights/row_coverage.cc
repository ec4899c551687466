#include "weights/row_coverage.h"

#include <iterator>

namespace allspark::weights {

RowCoverage::Range RowCoverage::FindOverlap(int64_t begin, int64_t end) const {
  auto after = ranges_.lower_bound(begin);
  if (after != ranges_.begin()) {
    const auto before = std::prev(after);
    if (before->second > begin) return *before;
  }
  if (after != ranges_.end() && after->first < end) return *after;
  return {0, 0};
}

void RowCoverage::Add(int64_t begin, int64_t end) {
  auto after = ranges_.lower_bound(begin);
  if (after != ranges_.end() && after->first == end) {
    end = after->second;
    after = ranges_.erase(after);
  }
  if (after != ranges_.begin() && std::prev(after)->second == begin) {
    std::prev(after)->second = end;
  } else {
    ranges_.emplace_hint(after, begin, end);
  }
}

std::vector<RowCoverage::Range> RowCoverage::Missing() const {
  std::vector<Range> missing;
  int64_t next = 0;
  for (const auto& [begin, end] : ranges_) {
    if (begin > next) missing.emplace_back(next, begin);
    next = end;
  }
  if (next < num_rows_) missing.emplace_back(next, num_rows_);
  return missing;
}

}  // namespace allspark::weights

// Several products in one parallel region. Private to ops/cpu.
#pragma once

#include <algorithm>

#include "base/int_math.h"
#include "ops/cpu/linear_split.h"
#include "platform/thread_pool.h"

namespace allspark::cpu {

// One of them: `rows` rows times a weight [n, k], in `panels` panels. Without rows it is left out.
struct Product {
  int64_t rows, n, k, panels;
  bool may_strip = false;

  // Reading a panel of weights takes about as long as multiplying it with this many rows.
  static constexpr int64_t kRowsPerRead = 24;
  int64_t panel_cost() const { return (rows + kRowsPerRead) * k; }
};

// Cuts the panels of `count` products, one product after the other, into parts of equal cost, and
// calls run(i, strip) for each part's strips of product_at(i), for all of its rows. These are whole
// panels, unless all products allow less and threads get more equal parts by it.
template <class ProductAt, class Run>
void ForEachShare(ThreadPool& pool, int64_t count, const ProductAt& product_at, const Run& run) {
  int64_t cost = 0, panels = 0, work = 0;
  bool may_strip = true;
  for (int64_t i = 0; i < count; ++i) {
    const Product product = product_at(i);
    if (product.rows == 0) continue;
    cost += product.panels * product.panel_cost();
    panels += product.panels;
    work += product.rows * product.n * product.k;
    may_strip = may_strip && product.may_strip;
  }
  if (panels == 0) return;
  const bool serial = work <= kSerialLinearWork;
  const int64_t strips = may_strip && !serial ? StripsFor(panels, pool.num_threads()) : 1;
  cost *= strips;  // in parts of a panel's
  const int64_t items =
      serial ? 1 : std::min(panels * strips, kLinearItemsPerThread * pool.num_threads());
  pool.ParallelForItems(items, [&](int64_t item, int) {
    // This item has the strips whose cost begins in [begin, end).
    const int64_t begin = cost * item / items, end = cost * (item + 1) / items;
    int64_t at = 0;
    for (int64_t i = 0; i < count && at < end; ++i) {
      const Product product = product_at(i);
      if (product.rows == 0) continue;
      const int64_t each = product.panel_cost();
      const int64_t all = product.panels * strips;
      const int64_t first = at >= begin ? 0 : std::min(all, CeilDiv(begin - at, each));
      const int64_t last = std::min(all, CeilDiv(end - at, each));
      at += all * each;
      ForEachStrip({first, last}, strips, product.n, [&](const Strip& strip) { run(i, strip); });
    }
  });
}

}  // namespace allspark::cpu

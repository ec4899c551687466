// AMX's tiles and instructions emulated in memory, in place of the intrinsics. Only for the files
// that compile the emulated kernels. A tile that does not fit its product ends the process, as on
// the processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace allspark::testing::tiles {

struct Tile {
  int rows = 0, bytes = 0;
  unsigned char data[16][64] = {};

  template <class T>
  T At(int row, int64_t element) const {
    T x;
    std::memcpy(&x, data[row] + element * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return x;
  }
  template <class T>
  void Add(int row, int64_t element, T x) {
    x += At<T>(row, element);
    std::memcpy(data[row] + element * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
  }
};

inline thread_local Tile tiles[8];

inline void Configure(const void* from) {
  const auto* config = static_cast<const unsigned char*>(from);
  for (int i = 0; i < 8; ++i) {
    tiles[i] = {};
    tiles[i].rows = config[48 + i];
    tiles[i].bytes = config[16 + 2 * i] + 256 * config[17 + 2 * i];
    if (tiles[i].rows > 16 || tiles[i].bytes > 64) std::abort();
  }
}

inline void Load(int tile, const void* from, int64_t stride) {
  Tile& t = tiles[tile];
  if (t.rows == 0) std::abort();
  std::memset(t.data, 0, sizeof(t.data));
  for (int r = 0; r < t.rows; ++r) {
    std::memcpy(t.data[r], static_cast<const char*>(from) + r * stride,
                static_cast<size_t>(t.bytes));
  }
}

inline void Store(int tile, void* to, int64_t stride) {
  const Tile& t = tiles[tile];
  for (int r = 0; r < t.rows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, t.data[r], static_cast<size_t>(t.bytes));
  }
}

// c[m][n] += sum_of over all lanes a[m][k] and b[k][n]; one value per lane of c.
template <class T, class SumOf>
void ForEachLane(int c, int a, int b, SumOf sum_of) {
  Tile& to = tiles[c];
  const Tile &left = tiles[a], &right = tiles[b];
  const int depth = left.bytes / 4;
  if (to.rows != left.rows || depth != right.rows || to.bytes != right.bytes) std::abort();
  for (int m = 0; m < to.rows; ++m) {
    for (int n = 0; n < to.bytes / 4; ++n) to.Add<T>(m, n, sum_of(left, m, right, n, depth));
  }
}

inline float Widened(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline void DotBf16(int c, int a, int b) {
  ForEachLane<float>(c, a, b, [](const Tile& x, int m, const Tile& y, int n, int depth) {
    float sums[2] = {};
    for (int k = 0; k < depth; ++k) {
      for (int i = 0; i < 2; ++i) {
        sums[i] = std::fma(Widened(x.At<uint16_t>(m, 2 * k + i)),
                           Widened(y.At<uint16_t>(k, 2 * n + i)), sums[i]);
      }
    }
    return sums[0] + sums[1];
  });
}

// Right: of the bytes of b.
template <class Right>
inline void DotBytes(int c, int a, int b) {
  ForEachLane<int32_t>(c, a, b, [](const Tile& x, int m, const Tile& y, int n, int depth) {
    int32_t sum = 0;
    for (int k = 0; k < depth; ++k) {
      for (int i = 0; i < 4; ++i) sum += x.At<int8_t>(m, 4 * k + i) * y.At<Right>(k, 4 * n + i);
    }
    return sum;
  });
}

}  // namespace allspark::testing::tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig(config) allspark::testing::tiles::Configure(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(t)                                     \
  std::memset(allspark::testing::tiles::tiles[t].data, 0, \
              sizeof(allspark::testing::tiles::Tile::data))
#define _tile_loadd(t, from, stride) allspark::testing::tiles::Load(t, from, stride)
#define _tile_stream_loadd(t, from, stride) _tile_loadd(t, from, stride)
#define _tile_stored(t, to, stride) allspark::testing::tiles::Store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) allspark::testing::tiles::DotBf16(c, a, b)
#define _tile_dpbsud(c, a, b) allspark::testing::tiles::DotBytes<uint8_t>(c, a, b)
#define _tile_dpbssd(c, a, b) allspark::testing::tiles::DotBytes<int8_t>(c, a, b)

// AMX's tiles and instructions emulated in memory, in place of the intrinsics. Only for the files
// that compile the emulated kernels. A tile that does not fit its product ends the process, as on
// the processor.
#pragma once

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
  void Set(int row, int64_t element, T x) {
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

inline void CheckShapes(const Tile& to, const Tile& left, const Tile& right) {
  if (to.rows != left.rows || left.bytes != 4 * right.rows || to.bytes != right.bytes) std::abort();
}

// Sums of the even and of the odd products, each product fused, then c + (even + odd). Lanes that c
// does not have come out as anything: nobody stores them.
inline void DotBf16(int c, int a, int b) {
  Tile& to = tiles[c];
  const Tile &left = tiles[a], &right = tiles[b];
  CheckShapes(to, left, right);
  const __m256i high = _mm256_set1_epi32(-65536);
  const auto floats = [](__m256i x) { return _mm256_castsi256_ps(x); };
  for (int m = 0; m < to.rows; ++m) {
    for (int part = 0; part < 64; part += 32) {
      __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
      for (int k = 0; k < left.bytes / 4; ++k) {
        const __m256i x = _mm256_set1_epi32(left.At<int32_t>(m, k));
        const __m256i y =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(right.data[k] + part));
        even = _mm256_fmadd_ps(floats(_mm256_slli_epi32(x, 16)), floats(_mm256_slli_epi32(y, 16)),
                               even);
        odd = _mm256_fmadd_ps(floats(_mm256_and_si256(x, high)), floats(_mm256_and_si256(y, high)),
                              odd);
      }
      auto* sums = reinterpret_cast<float*>(to.data[m] + part);
      _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), _mm256_add_ps(even, odd)));
    }
  }
}

// Right: of the bytes of b.
template <class Right>
inline void DotBytes(int c, int a, int b) {
  Tile& to = tiles[c];
  const Tile &left = tiles[a], &right = tiles[b];
  CheckShapes(to, left, right);
  for (int m = 0; m < to.rows; ++m) {
    for (int n = 0; n < to.bytes / 4; ++n) {
      int32_t sum = to.At<int32_t>(m, n);
      for (int k = 0; k < left.bytes / 4; ++k) {
        for (int i = 0; i < 4; ++i) {
          sum += left.At<int8_t>(m, 4 * k + i) * right.At<Right>(k, 4 * n + i);
        }
      }
      to.Set(m, n, sum);
    }
  }
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

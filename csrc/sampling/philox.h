// Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3" (SC 2011): a keyed bijection of 128-bit counters. It has no state, so that a
// draw depends on its key and counter alone, whatever was drawn before and on whichever thread.
#pragma once

#include <array>
#include <cstdint>

namespace allspark {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

constexpr PhiloxCounter Philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

// The uniform number in [0, 1) that chooses the token at `position` of the request with `seed`: 53
// bits, the key is the seed, the counter the position.
constexpr double PositionUniform(uint64_t seed, int64_t position) {
  const auto p = static_cast<uint64_t>(position);
  const PhiloxCounter bits =
      Philox4x32({static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t word = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace allspark

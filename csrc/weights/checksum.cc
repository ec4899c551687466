#include "weights/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <new>

#include "weights/format.h"

namespace allspark::weights {

static_assert(sizeof(XXH3_state_t) <= sizeof(StreamHasher));
static_assert(alignof(XXH3_state_t) <= alignof(StreamHasher));

uint64_t Hash64(const void* data, int64_t bytes) {
  return XXH3_64bits(data, static_cast<size_t>(bytes));
}

StreamHasher::StreamHasher() { XXH3_64bits_reset(new (state_) XXH3_state_t); }

void StreamHasher::Update(const void* data, int64_t bytes) {
  XXH3_64bits_update(reinterpret_cast<XXH3_state_t*>(state_), data, static_cast<size_t>(bytes));
}

uint64_t StreamHasher::Digest() const {
  return XXH3_64bits_digest(reinterpret_cast<const XXH3_state_t*>(state_));
}

void ForEachPart(ThreadPool* pool, int64_t n, FunctionRef<void(int64_t, int64_t, int)> fn) {
  if (n <= 0) return;
  if (pool == nullptr) {
    fn(0, n, 0);
  } else {
    pool->ParallelFor(n, 1, fn);
  }
}

int64_t NumPieces(int64_t tensor_bytes) { return CeilDiv(tensor_bytes, kPieceBytes); }

uint64_t CombinePieces(const std::vector<uint64_t>& piece_hashes) {
  return Hash64(piece_hashes.data(), static_cast<int64_t>(piece_hashes.size() * sizeof(uint64_t)));
}

uint64_t TensorChecksum(const void* data, int64_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::vector<uint64_t> piece_hashes;
  for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    piece_hashes.push_back(Hash64(at + begin, std::min(kPieceBytes, bytes - begin)));
  }
  return CombinePieces(piece_hashes);
}

}  // namespace allspark::weights

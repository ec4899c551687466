// XXH3-64 as the file format uses it: over whole buffers, as a stream, and over a tensor's pieces,
// which threads share. Only checksum.cc compiles the hash library's code. Private to weights/.
#pragma once

#include <cstdint>
#include <vector>

#include "platform/thread_pool.h"

namespace allspark::weights {

// XXH3-64 with seed 0.
uint64_t Hash64(const void* data, int64_t bytes);

// The same hash, fed in parts.
class StreamHasher {
 public:
  StreamHasher();
  void Update(const void* data, int64_t bytes);
  uint64_t Digest() const;

 private:
  alignas(64) unsigned char state_[640];  // XXH3_state_t; its size is asserted in checksum.cc.
};

// Runs fn over [0, n) on the pool, or on the caller when pool is null.
void ForEachPart(ThreadPool* pool, int64_t n, FunctionRef<void(int64_t, int64_t, int)> fn);

int64_t NumPieces(int64_t tensor_bytes);
// A tensor's checksum: the hash of the concatenated hashes of its pieces.
uint64_t CombinePieces(const std::vector<uint64_t>& piece_hashes);
// The checksum of a tensor in memory, computed on the caller's thread.
uint64_t TensorChecksum(const void* data, int64_t bytes);

}  // namespace allspark::weights

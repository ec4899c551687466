// Opens a LoRA adapter (NAME.aslora, or the same bytes in memory), checks it, and gives out its
// pairs of matrices. A file is read into memory, not mapped: adapters are loaded while requests
// run, and a mapped file that becomes shorter would end these requests. Immutable after Open; any
// thread may read. Format: weights/README.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "allspark/status.h"

namespace allspark {

// A whole adapter in memory: the bytes of the file.
class LoraImage {
 public:
  virtual ~LoraImage() = default;
  virtual std::span<const unsigned char> bytes() const = 0;  // 64-byte aligned
};

// One module's adapter: b * (a * x) is added to rows [row_begin, row_begin + rows) of the model's
// tensor `tensor`. b includes the adapter's scale.
struct LoraPair {
  std::string tensor;  // a name of weights/README.md
  int64_t row_begin = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t rank = 0;
  // float32, row-major, 64-byte aligned. Finite, unless the file is forged.
  const float* a = nullptr;  // [rank, cols]; for "embedding" transposed, [cols, rank]
  const float* b = nullptr;  // [rows, rank]
};

class LoraFile {
 public:
  // Errors name the file, the tensor and the offset; every checksum is compared.
  static Result<std::shared_ptr<const LoraFile>> Open(const std::string& path);
  static Result<std::shared_ptr<const LoraFile>> OpenImage(std::shared_ptr<const LoraImage> image);
  virtual ~LoraFile() = default;

  // No two pairs of one tensor share a row. The caller checks whether the pairs fit a model.
  virtual std::span<const LoraPair> pairs() const = 0;
  // The file's name or "memory image", for messages.
  virtual const std::string& source() const = 0;
};

}  // namespace allspark

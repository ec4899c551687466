// Writes a model in the native format (NAME.asgraph + NAME.asparam, or an image in memory) tensor
// by tensor, or a LoRA adapter (NAME.aslora) pair by pair. The DecoderSpec and BuildRecord come as
// serialised protobuf messages (proto/allspark.proto), so that no protobuf header is needed here.
// One thread at a time per serializer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "allspark/engine.h"
#include "allspark/status.h"

namespace [[gnu::visibility("default")]] allspark {

// A tensor that a spec requires.
struct TensorRequirement {
  std::string name;
  std::string dtype;           // as stored: "float32", "bfloat16", "uint8", "uint4" or "int32"
  int layout = 0;              // proto Layout
  std::vector<int64_t> shape;  // [out_features, in_features] for a matrix
  bool quantizable = false;    // an entry of weight_quant may name it
  // Of a weight that takes adapters: where the output features of each of its modules end. Those of
  // "embedding" are a token's features. Empty: it takes none.
  std::vector<int64_t> modules;
};

// InvalidArgument when the spec is malformed or inconsistent; names the field, the value and the
// bound.
Result<std::vector<TensorRequirement>> RequiredTensors(std::string_view spec);

// Quantises the rows of `weight` [rows, cols] as the serializer does (csrc/weights/README.md): to
// `values` [rows, cols] of 0 to 2^bits - 1, float32 `scales` and `zeros`, both [rows, cols /
// group_size]; group_size 0: all of a row. `search`: as search_scales of the serializer. `zeros`
// may be null where !asymmetric. Any thread. InvalidArgument names the parameter, or the first
// element that is not finite.
Status QuantizeRows(const float* weight, int64_t rows, int64_t cols, int64_t bits, bool asymmetric,
                    int64_t group_size, bool search, uint8_t* values, float* scales,
                    uint8_t* zeros);

class ModelSerializer {
 public:
  // Empty paths: writes an image in memory. Nothing appears under the final names before Finish,
  // and a serializer that is dropped unfinished leaves nothing behind. search_scales: each group of
  // 4-bit weights that are quantised here gets the scale with the least squared error of 13.
  static Result<std::unique_ptr<ModelSerializer>> Create(std::string_view spec,
                                                         std::string_view build,
                                                         const std::string& graph_path,
                                                         const std::string& param_path,
                                                         bool search_scales = false);
  virtual ~ModelSerializer() = default;

  // Adds rows [row_begin, row_begin + shape[0]) of tensor `name`, converted to its stored type and
  // layout. data: row-major, dtype "float32", "float16" or "bfloat16" (2-byte bit patterns). Float
  // rows of a quantised weight are quantised here. A weight that is already quantised comes in
  // parts: its values as "uint8", one per byte, "<name>_scale" as floats, "<name>_zero" as "uint8".
  // "<name>_order" comes as "int32".
  virtual Status AddTensor(std::string_view name, int64_t row_begin, std::string_view dtype,
                           const std::vector<int64_t>& shape, const void* data) = 0;
  // Fails naming what is missing. Returns the image, or null when files were written.
  virtual Result<std::shared_ptr<const ModelImage>> Finish() = 0;
};

class LoraSerializer {
 public:
  // `build`: a serialised BuildRecord, or empty. `path` empty: writes an image in memory. Nothing
  // appears at `path` before Finish, and a serializer that is dropped unfinished leaves nothing.
  static Result<std::unique_ptr<LoraSerializer>> Create(std::string_view build,
                                                        const std::string& path);
  virtual ~LoraSerializer() = default;

  // Adds b * (a * x) to rows [row_begin, row_begin + rows) of the model's tensor `tensor` (names
  // and rows as in csrc/weights/README.md). The adapter's scale is included in b. a: [rank, cols],
  // row-major; for "embedding" the transpose, [cols, rank]. b: [rows, rank]. Errors name the
  // tensor.
  virtual Status AddPair(std::string_view tensor, int64_t row_begin, int64_t rows, int64_t cols,
                         int64_t rank, std::span<const float> a, std::span<const float> b) = 0;
  // Returns the image, or null when a file was written.
  virtual Result<std::shared_ptr<const LoraImage>> Finish() = 0;
};

}  // namespace allspark

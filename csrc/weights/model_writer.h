// Writes a serialised model tensor by tensor, to files or to an image in memory. Offsets are
// planned from the spec before the first tensor arrives, so every row is stored in its final place.
// An image takes the memory of the model once; beside it, and for files, only the tensor being
// added and small buffers are in memory. One thread at a time.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "allspark/status.h"
#include "platform/thread_pool.h"
#include "proto/allspark.pb.h"
#include "tensor/tensor_view.h"

namespace allspark {

// A whole model in anonymous memory: the bytes of both files.
class ModelImage {
 public:
  virtual ~ModelImage() = default;
  virtual std::string_view graph() const = 0;  // serialised ModelFile with its header
  virtual const unsigned char* param() const = 0;
  virtual int64_t param_bytes() const = 0;
};

class ModelWriter {
 public:
  // `graph_path` empty: writes an image. Files appear under their final names only in Finish.
  // `search_scales`: QuantFormat::search of weights that are quantised here.
  static Result<std::unique_ptr<ModelWriter>> Create(const proto::DecoderSpec& spec,
                                                     const proto::BuildRecord& build,
                                                     const std::string& graph_path,
                                                     const std::string& param_path,
                                                     ThreadPool* pool, bool search_scales = false);
  // An unfinished writer removes what it wrote.
  virtual ~ModelWriter() = default;

  // Adds rows [row_begin, row_begin + value.dims[0]) of tensor `name` (a fused tensor such as qkv
  // comes in parts), converted to its stored dtype and packed to its layout. `value` is row-major
  // [rows, cols] or [rows], float32, float16 or bfloat16. A weight that the spec quantises is added
  // in one of two ways: as such floats, which also fill its scales and zero points; or as uint8
  // values, one per byte, with "_scale" (a float dtype) and "_zero" (uint8) added as tensors of
  // their own. "_order" (int32) is always a tensor of its own. Errors name the tensor: unknown,
  // wrong shape, rows added twice or in both ways, not finite.
  virtual Status AddTensor(std::string_view name, int64_t row_begin, const TensorView& value) = 0;
  // Fails naming the row ranges not added, up to 256. Returns the image when writing one, else
  // null.
  virtual Result<std::shared_ptr<const ModelImage>> Finish() = 0;
};

}  // namespace allspark

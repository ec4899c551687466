// Opens a serialised model (two files, or an image in memory), checks it, and gives out views of
// its tensors in place: the files are mapped, never copied. The views are those of RequiredTensors
// (required_tensors.h), all of them, with the dtypes, layouts and shapes that these have. Immutable
// after Open; any thread may read. Format: weights/README.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "allspark/status.h"
#include "base/dtype.h"
#include "platform/thread_pool.h"
#include "proto/allspark.pb.h"

namespace allspark {

class ModelImage;

struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  proto::Layout layout = proto::ROW_MAJOR;
  int64_t rank = 0;
  int64_t shape[4] = {};
  int64_t bytes = 0;
};

class ModelReader {
 public:
  // Errors name the file, the tensor and the offset. `pool` (may be null) runs the checksum work.
  // verify = false skips the tensors' checksums; the structure is always checked.
  static Result<std::unique_ptr<ModelReader>> OpenFiles(const std::string& graph_path,
                                                        const std::string& param_path,
                                                        ThreadPool* pool, bool verify = true);
  static Result<std::unique_ptr<ModelReader>> OpenImage(std::shared_ptr<const ModelImage> image,
                                                        ThreadPool* pool, bool verify = true);
  virtual ~ModelReader() = default;

  virtual const proto::ModelFile& file() const = 0;
  const proto::DecoderSpec& spec() const { return file().spec(); }
  // The graph's file name or "memory image", for messages.
  virtual const std::string& source() const = 0;
  // NotFound naming tensor and file.
  virtual Result<WeightView> Find(std::string_view name) const = 0;
  // Gives the memory of mapped weights back to the system; the next access reads the file again. An
  // image in memory stays, since it is the only copy.
  virtual void ReleasePages() const {}
  // DataLoss once views gave zeros because the mapped file became shorter or its disk failed. A
  // caller that computes with views must ask before it uses the results.
  virtual Status CheckViews() const { return Status::Ok(); }
};

}  // namespace allspark

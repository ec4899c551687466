// The writer's destination for the bytes of .asparam: memory that is written in place, or a file. A
// file is written through buffers, so that its pages do not count as this process's memory. Private
// to weights/. Write and Read may run on several threads over disjoint ranges.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "allspark/status.h"
#include "weights/model_writer.h"

namespace allspark::weights {

class ParamStore {
 public:
  virtual ~ParamStore() = default;
  // The byte at `offset` when the store is memory, else null. Bytes never written are zero.
  virtual unsigned char* Direct(int64_t offset) = 0;
  virtual Status Write(int64_t offset, const void* data, int64_t bytes) = 0;
  virtual Status Read(int64_t offset, void* data, int64_t bytes) = 0;
  // Adds the graph and ends the store: returns the image, or null after renaming the files.
  virtual Result<std::shared_ptr<const ModelImage>> Finish(std::string graph) = 0;
};

Result<std::unique_ptr<ParamStore>> CreateImageStore(int64_t param_bytes);
Result<std::unique_ptr<ParamStore>> CreateFileStore(const std::string& graph_path,
                                                    const std::string& param_path,
                                                    int64_t param_bytes);

}  // namespace allspark::weights

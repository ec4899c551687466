#include "weights/param_store.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/int_math.h"
#include "weights/file_io.h"

namespace allspark::weights {
namespace {

class MemoryImage final : public ModelImage {
 public:
  MemoryImage(std::string graph, Mapping param)
      : graph_(std::move(graph)), param_(std::move(param)) {}

  std::string_view graph() const override { return graph_; }
  const unsigned char* param() const override { return param_.data(); }
  int64_t param_bytes() const override { return param_.bytes(); }

 private:
  std::string graph_;
  Mapping param_;
};

class ImageStore final : public ParamStore {
 public:
  explicit ImageStore(Mapping mapping) : mapping_(std::move(mapping)) {}

  unsigned char* Direct(int64_t offset) override { return mapping_.data() + offset; }
  Status Write(int64_t offset, const void* data, int64_t bytes) override {
    std::memcpy(Direct(offset), data, static_cast<size_t>(bytes));
    return Status::Ok();
  }
  Status Read(int64_t offset, void* data, int64_t bytes) override {
    std::memcpy(data, Direct(offset), static_cast<size_t>(bytes));
    return Status::Ok();
  }
  Result<std::shared_ptr<const ModelImage>> Finish(std::string graph) override {
    mapping_.MakeReadOnly();
    return std::shared_ptr<const ModelImage>(
        std::make_shared<MemoryImage>(std::move(graph), std::move(mapping_)));
  }

 private:
  Mapping mapping_;
};

// Writes zeros to a file, a huge page at a time, before anything else is written there: file
// systems that cache files in large units make a unit of what is first written at once. A reader's
// mapping of such a file has huge pages, with fewer misses of address translation. Elsewhere it
// changes nothing.
class HugePageUnits {
 public:
  HugePageUnits(const TempFile& file, int64_t file_bytes)
      : file_(file),
        file_bytes_(file_bytes),
        zeros_(static_cast<size_t>(kHugePageBytes)),
        is_made_(static_cast<size_t>(CeilDiv(file_bytes, kHugePageBytes))) {}

  // Makes the units of a range that are not there yet. Any thread.
  Status Make(int64_t offset, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    for (int64_t unit = offset / kHugePageBytes; unit * kHugePageBytes < offset + bytes; ++unit) {
      const auto index = static_cast<size_t>(unit);
      if (is_made_[index]) continue;
      const int64_t begin = unit * kHugePageBytes;
      AS_RETURN_IF_ERROR(WriteFully(file_.fd(), file_.final_path(), begin, zeros_.data(),
                                    std::min(kHugePageBytes, file_bytes_ - begin)));
      is_made_[index] = true;
    }
    return Status::Ok();
  }

 private:
  const TempFile& file_;
  const int64_t file_bytes_;
  const std::vector<unsigned char> zeros_;
  std::mutex mutex_;
  std::vector<bool> is_made_;  // guarded by mutex_
};

class FileStore final : public ParamStore {
 public:
  FileStore(TempFile graph, TempFile param, int64_t param_bytes)
      : graph_(std::move(graph)), param_(std::move(param)), units_(param_, param_bytes) {}

  unsigned char* Direct(int64_t /*offset*/) override { return nullptr; }
  Status Write(int64_t offset, const void* data, int64_t bytes) override {
    AS_RETURN_IF_ERROR(units_.Make(offset, bytes));
    return WriteFully(param_.fd(), param_.final_path(), offset, data, bytes);
  }
  Status Read(int64_t offset, void* data, int64_t bytes) override {
    return ReadFully(param_.fd(), param_.final_path(), offset, data, bytes);
  }
  Result<std::shared_ptr<const ModelImage>> Finish(std::string graph) override {
    AS_RETURN_IF_ERROR(WriteFully(graph_.fd(), graph_.final_path(), 0, graph.data(),
                                  static_cast<int64_t>(graph.size())));
    AS_RETURN_IF_ERROR(graph_.Close());
    AS_RETURN_IF_ERROR(param_.Close());
    // The graph comes last: a reader that sees the new graph finds its parameters. Between the two
    // renames an older graph may meet newer parameters; the file ids then differ.
    AS_RETURN_IF_ERROR(param_.Commit());
    const Status committed = graph_.Commit();
    if (!committed.ok()) {
      unlink(param_.final_path().c_str());
      return committed;
    }
    return std::shared_ptr<const ModelImage>();
  }

 private:
  TempFile graph_;
  TempFile param_;
  HugePageUnits units_;
};

}  // namespace

Result<std::unique_ptr<ParamStore>> CreateImageStore(int64_t param_bytes) {
  AS_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Anonymous(param_bytes));
  return std::unique_ptr<ParamStore>(std::make_unique<ImageStore>(std::move(mapping)));
}

Result<std::unique_ptr<ParamStore>> CreateFileStore(const std::string& graph_path,
                                                    const std::string& param_path,
                                                    int64_t param_bytes) {
  AS_ASSIGN_OR_RETURN(TempFile graph, TempFile::Create(graph_path, 0));
  AS_ASSIGN_OR_RETURN(TempFile param, TempFile::Create(param_path, param_bytes));
  return std::unique_ptr<ParamStore>(
      std::make_unique<FileStore>(std::move(graph), std::move(param), param_bytes));
}

}  // namespace allspark::weights

// Where the time of a model's last steps and requests went: a ring of records that the step thread
// fills without allocating, written as a file in Chrome's trace format, which Perfetto opens. Any
// thread may write the file.
#pragma once

#include <string>
#include <vector>

#include "allspark/status.h"
#include "base/mutex.h"
#include "engine/step_record.h"

namespace allspark {

class StepTrace {
 public:
  // Keeps the last `capacity` steps and as many requests.
  StepTrace(std::string model_name, size_t capacity);

  // The step thread's.
  void Add(const StepRecord& step);
  void Add(const RequestRecord& request);

  Status Write(const std::string& path) const;
  std::string Json() const;

 private:
  template <typename Record>
  struct Ring {
    std::vector<Record> records;
    size_t next = 0;
    bool is_full = false;

    void Add(const Record& record);
    std::vector<Record> InOrder() const;
  };

  const std::string model_name_;

  mutable Mutex mutex_;
  // A reader holds the mutex for as long as a copy takes.
  Ring<StepRecord> steps_ AS_GUARDED_BY(mutex_);
  Ring<RequestRecord> requests_ AS_GUARDED_BY(mutex_);
};

}  // namespace allspark

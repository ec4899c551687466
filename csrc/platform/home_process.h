// The process in which an object was made. A fork of it has the object's memory, but none of the
// threads that work on the object. Locks stay as these threads held them, so a wait there never
// ends. Any thread may call.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string_view>

#include "allspark/status.h"

namespace allspark {

class HomeProcess {
 public:
  HomeProcess();

  // False in a fork. No system call: queues ask for every token.
  bool IsHere() const;
  // FailedPrecondition in a fork; `what` the object is, such as "engine".
  Status Check(std::string_view what) const;

 private:
  uint32_t generation_;
  pid_t id_;  // for messages
};

}  // namespace allspark

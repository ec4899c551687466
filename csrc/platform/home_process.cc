#include "platform/home_process.h"

#include <unistd.h>

#include <string>

namespace allspark {

HomeProcess::HomeProcess() : id_(getpid()) {}

bool HomeProcess::IsHere() const { return getpid() == id_; }

Status HomeProcess::Check(std::string_view what) const {
  if (IsHere()) return Status::Ok();
  const std::string name(what);
  return Status::FailedPrecondition("this " + name + " was created in process " +
                                    std::to_string(id_) + " and does not live in process " +
                                    std::to_string(getpid()) + ", its fork; create one there");
}

}  // namespace allspark

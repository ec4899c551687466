#include "platform/home_process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace allspark {

namespace {

// How many forks lie between this process and the one that loaded the library. An object of another
// generation came through a fork.
std::atomic<uint32_t> generation{0};

void CountFork() { generation.fetch_add(1, std::memory_order_relaxed); }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &CountFork);

}  // namespace

HomeProcess::HomeProcess()
    : generation_(generation.load(std::memory_order_relaxed)), id_(getpid()) {}

bool HomeProcess::IsHere() const {
  return generation.load(std::memory_order_relaxed) == generation_;
}

Status HomeProcess::Check(std::string_view what) const {
  if (IsHere()) return Status::Ok();
  const std::string name(what);
  return Status::FailedPrecondition("this " + name + " was created in process " +
                                    std::to_string(id_) + " and does not live in process " +
                                    std::to_string(getpid()) + ", its fork; create one there");
}

}  // namespace allspark

// HomeProcess: an object belongs to the process that made it, through any number of forks.

#include "platform/home_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace allspark {
namespace {

// What `check` returns in a fork of this process.
bool InFork(const std::function<bool()>& check) {
  const pid_t child = fork();
  if (child == 0) _exit(check() ? 1 : 0);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

TEST(HomeProcessTest, AnObjectLivesOnlyWhereItWasMade) {
  const HomeProcess parents;
  EXPECT_TRUE(parents.IsHere());
  EXPECT_TRUE(InFork([&] { return !parents.IsHere(); }));
  EXPECT_TRUE(InFork([&] {
    const HomeProcess childs;
    return childs.IsHere() && childs.Check("engine").ok() &&
           InFork([&] { return !parents.IsHere() && !childs.IsHere(); });
  }));
  EXPECT_TRUE(parents.IsHere());
}

}  // namespace
}  // namespace allspark

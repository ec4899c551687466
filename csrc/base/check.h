// AS_CHECK: broken invariants throw InternalError, which owns its message. The step loop catches at
// one place. Expected failures are Status values, never these.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace allspark {

class InternalError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace internal {

// Collects the message of a failed check and throws at the end of the statement.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure() noexcept(false);
  template <typename T>
  CheckFailure& operator<<(const T& value) {
    stream_ << value;
    return *this;
  }

 private:
  std::ostringstream stream_;
};

}  // namespace internal
}  // namespace allspark

// The switch keeps an `else` that follows in the caller's code from binding to the `if` in here.
#define AS_CHECK(cond)     \
  switch (0)               \
  case 0:                  \
  default:                 \
    if (cond) [[likely]] { \
    } else                 \
      ::allspark::internal::CheckFailure(__FILE__, __LINE__, #cond)

#ifdef NDEBUG
#define AS_DCHECK(cond) \
  while (false) AS_CHECK(cond)
#else
#define AS_DCHECK(cond) AS_CHECK(cond)
#endif

// ScopedVariable: sets a variable of the environment, and restores it at its end. Neither may
// happen while another thread uses the environment.
#pragma once

#include <stdlib.h>

#include <optional>
#include <string>
#include <utility>

namespace allspark::testing {

class ScopedVariable {
 public:
  ScopedVariable(std::string name, const std::string& value) : name_(std::move(name)) {
    if (const char* before = getenv(name_.c_str())) before_ = before;
    Set(value);
  }
  ~ScopedVariable() {
    if (before_) {
      Set(*before_);
    } else {
      unsetenv(name_.c_str());
    }
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

  // Sets it to another value.
  void Set(const std::string& value) const { setenv(name_.c_str(), value.c_str(), 1); }

 private:
  const std::string name_;
  std::optional<std::string> before_;
};

}  // namespace allspark::testing

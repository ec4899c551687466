// Releasing the GIL and taking it again. If a thread without the GIL, such as a daemon thread,
// takes it while the interpreter ends, Python up to 3.13 ends that thread: pthread_exit unwinds it,
// and the first destructor on the way ends the process by std::terminate. Such a thread waits here
// instead, without the GIL, until the process has ended; Python from 3.14 on does the same.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace allspark::python {

[[noreturn]] inline void StayForEver() noexcept {
  for (;;) pause();
}

inline void TakeGil(PyThreadState* state) noexcept {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {  // No exception: the unwinding of pthread_exit.
    StayForEver();
  }
}

// The calling thread is without the GIL while this lives. In place of py::gil_scoped_release.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { TakeGil(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  // Calls `ask` with the GIL, on the thread that released it. `ask` throws nothing, and keeps no
  // C++ object across a call that runs Python: the thread may end there.
  template <typename Ask>
  auto WithGil(Ask ask) noexcept {
    TakeGil(state_);
    try {
      auto answer = ask();
      state_ = PyEval_SaveThread();
      return answer;
    } catch (...) {
      StayForEver();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace allspark::python

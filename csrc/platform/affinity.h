// Which cores this process may run on, and binding a thread to one of them. Linux. Any thread may
// call.
#pragma once

#include <pthread.h>

#include <vector>

namespace allspark {

// The cores of the calling thread's affinity mask, ascending; never empty.
std::vector<int> AffinityCores();

// Binds `thread` to one core. Returns false when the system refuses.
bool PinThread(pthread_t thread, int core);

}  // namespace allspark

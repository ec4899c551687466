// Which cores this process may run on, and binding a thread to one of them. Linux. Any thread may
// call.
#pragma once

#include <pthread.h>

#include <vector>

namespace allspark {

// The cores of the calling thread's affinity mask, ascending; never empty.
std::vector<int> AffinityCores();

// Binds `thread` to these cores, one at least. Returns false when the system refuses.
bool PinThread(pthread_t thread, const std::vector<int>& cores);

}  // namespace allspark

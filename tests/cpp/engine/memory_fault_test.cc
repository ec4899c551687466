// Every allocation of an engine's life fails once, on the device and on the heap: the call says
// ResourceExhausted, nothing leaks, and what comes next works.

#include "cpp/engine/memory_faults.h"

namespace allspark::testing {
namespace {

// The first ones are those of install and start, the others a sample of all.
TEST_F(MemoryFaultTest, EachAllocationOfTheDeviceFailsOnce) { FailDevice(); }
TEST_F(MemoryFaultTest, AllocationsOfACallersHeapFailOnce) { FailCallersHeap(50, 37); }
TEST_F(MemoryFaultTest, AllocationsOfTheStepThreadsHeapFailOnce) { FailStepThreadsHeap(20, 7); }

}  // namespace
}  // namespace allspark::testing

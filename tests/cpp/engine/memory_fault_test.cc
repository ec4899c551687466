// Allocations of an engine's life fail once each, all of the device's and a sample of the heap's:
// the call returns ResourceExhausted, nothing leaks, and later calls work.

#include "cpp/engine/memory_faults.h"

namespace allspark::testing {
namespace {

// All of the device's. Of the heap's, the first ones, which are those of install and start, and a
// sample of the others.
TEST_F(MemoryFaultTest, EachAllocationOfTheDeviceFailsOnce) { FailDevice(); }
TEST_F(MemoryFaultTest, AllocationsOfACallersHeapFailOnce) { FailCallersHeap(50, 37); }
TEST_F(MemoryFaultTest, AllocationsOfTheStepThreadsHeapFailOnce) { FailStepThreadsHeap(20, 7); }

}  // namespace
}  // namespace allspark::testing

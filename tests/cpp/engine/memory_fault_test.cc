// Allocations of an engine's life fail once each, on the device and on the heap: the call returns
// ResourceExhausted, nothing leaks, and later calls work.

#include "cpp/engine/memory_faults.h"

namespace allspark::testing {
namespace {

// The first allocations are those of install and start; the others are a sample of the rest.
TEST_F(MemoryFaultTest, EachAllocationOfTheDeviceFailsOnce) { FailDevice(); }
TEST_F(MemoryFaultTest, AllocationsOfACallersHeapFailOnce) { FailCallersHeap(50, 37); }
TEST_F(MemoryFaultTest, AllocationsOfTheStepThreadsHeapFailOnce) { FailStepThreadsHeap(20, 7); }

}  // namespace
}  // namespace allspark::testing

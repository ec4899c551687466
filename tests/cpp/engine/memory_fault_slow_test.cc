// All memory faults of the heap; memory_fault_test.cc runs a sample of them.

#include "cpp/engine/memory_faults.h"

namespace allspark::testing {
namespace {

TEST_F(MemoryFaultTest, EveryAllocationOfACallersHeapFailsOnce) { FailCallersHeap(0, 1); }
TEST_F(MemoryFaultTest, EveryAllocationOfTheStepThreadsHeapFailsOnce) { FailStepThreadsHeap(0, 1); }

}  // namespace
}  // namespace allspark::testing

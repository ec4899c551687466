// The one table through which the CPU's ops reach kernels, for every instruction set. Filled from
// the portable reference upwards; a null entry that a model needs is an Unimplemented at load.
// Tables are immutable once built; any thread may read them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/args.h"
#include "kernels/kernel_slots.h"

namespace allspark::kernels {

// Query tokens per attention work item for which the kernels are tuned (a hint for the split).
int64_t AttentionTileTokens(int64_t group);

// Tables this CPU can run, weakest first: "reference"; on x86-64 "avx2", "avx2_vnni",
// "avx512", "avx512_vnni", "avx512_bf16", "amx"; on 64-bit Arm "neon", "neon_dotprod", "neon_bf16",
// "neon_i8mm".
const std::vector<const KernelTable*>& AvailableTables();
// Null if the name is unknown or the table is not available here.
const KernelTable* FindTable(std::string_view name);
// The strongest, except where a weaker one is faster.
const KernelTable* FastestTable();
// The fastest table, or the one that ALLSPARK_CPU_ISA names. Null if that one cannot run here.
const KernelTable* DefaultTable();

}  // namespace allspark::kernels

// The one table through which ops reach kernels, for every device and instruction set.
// Filled from the portable reference upwards; a null entry that a model needs is an
// Unimplemented at load. Tables are immutable once built; any thread may read them.
#pragma once

#include <string_view>
#include <vector>

#include "kernels/args.h"

namespace allspark::kernels {

struct KernelTable {
  const char* name = "";
  // Indexed by DType (static_cast<int>): weight dtype x activation dtype.
  void (*gemm[kNumDTypes][kNumDTypes])(const GemmArgs&, Stream) noexcept = {};
  // Output dtype.
  void (*rms_norm[kNumDTypes])(const RmsNormArgs&, Stream) noexcept = {};
  void (*gated_act[kNumDTypes])(const GatedActArgs&, Stream) noexcept = {};
  // Table dtype.
  void (*embedding[kNumDTypes])(const EmbeddingArgs&, Stream) noexcept = {};
  // Cache dtype.
  void (*kv_write[kNumDTypes])(const KvWriteArgs&, Stream) noexcept = {};
  // Cache dtype x output dtype.
  void (*attention[kNumDTypes][kNumDTypes])(const AttentionArgs&, Stream) noexcept = {};
  void (*rope)(const RopeArgs&, Stream) noexcept = nullptr;
  void (*argmax)(const ArgMaxArgs&, Stream) noexcept = nullptr;
};

// Floats of scratch one attention call needs, any table.
int64_t AttentionScratchFloats(int64_t group, int64_t head_dim);
// Query tokens per attention work item for which the kernels are tuned (a hint for the split).
int64_t AttentionTileTokens(int64_t group);

// Each fills what its instruction set improves over what is there; one exported function per ISA file.
void FillReference(KernelTable& table) noexcept;   // double precision, portable
void FillAvx2(KernelTable& table) noexcept;        // AVX2 + FMA + F16C
void FillAvx512(KernelTable& table) noexcept;      // AVX-512 F, BW, VL, DQ
void FillAvx512Bf16(KernelTable& table) noexcept;  // + BF16

// Tables this CPU can run, weakest first ("reference", "avx2", "avx512", "avx512_bf16"); at least one.
const std::vector<const KernelTable*>& AvailableTables();
// By name; null where unknown or not available here.
const KernelTable* FindTable(std::string_view name);
// The strongest, or the one ALLSPARK_CPU_ISA names. Null when that names none that can run here.
const KernelTable* DefaultTable();

}  // namespace allspark::kernels

// The kernel table's layout and the functions that fill it. Separate from kernel_table.h, which
// adds the look-up: ISA files include this header without any of the standard library. They must
// not compile an inline library function for a newer CPU than the program's.
#pragma once

#include "kernels/args.h"

namespace allspark::kernels {

struct KernelTable {
  const char* name = "";
  // Indexed by DType (static_cast<int>): weight dtype x activation dtype.
  void (*gemm[kNumDTypes][kNumDTypes])(const GemmArgs&) noexcept = {};
  // Indexed as gemm. Null: gemm, then gated_act.
  void (*gemm_gated[kNumDTypes][kNumDTypes])(const GemmGatedArgs&) noexcept = {};
  // From this many rows per thread on, a GEMM is better cut by rows than by panels: a thread then
  // finds the rows that it computed itself in its own cache. The weights are read once more, but
  // arrive in time.
  int64_t local_rows = 128;
  // Of adapters, by the dtype of a and b.
  AddLowRankFunction low_rank[kNumDTypes] = {};
  // Output dtype.
  void (*rms_norm[kNumDTypes])(const NormArgs&) noexcept = {};
  void (*layer_norm[kNumDTypes])(const NormArgs&) noexcept = {};
  void (*gated_act[kNumDTypes])(const GatedActArgs&) noexcept = {};
  // Table dtype.
  void (*embedding[kNumDTypes])(const EmbeddingArgs&) noexcept = {};
  // Cache dtype.
  void (*kv_write[kNumDTypes])(const KvWriteArgs&) noexcept = {};
  // Cache dtype x output dtype.
  void (*attention[kNumDTypes][kNumDTypes])(const AttentionArgs&) noexcept = {};
  // Source dtype x result dtype.
  void (*convert[kNumDTypes][kNumDTypes])(const ConvertArgs&) noexcept = {};
  // Dtype of source and result.
  void (*gather_columns[kNumDTypes])(const GatherColumnsArgs&) noexcept = {};
  void (*quantize)(const QuantizeArgs&) noexcept = nullptr;
  // Output dtype. Null: the table's attention writes no partial results.
  void (*attention_merge[kNumDTypes])(const AttentionMergeArgs&) noexcept = {};
  void (*scale)(const ScaleArgs&) noexcept = nullptr;
  void (*route)(const RouteArgs&) noexcept = nullptr;
  void (*combine)(const CombineArgs&) noexcept = nullptr;
  void (*rope)(const RopeArgs&) noexcept = nullptr;
  void (*hadamard)(const HadamardArgs&) noexcept = nullptr;
  void (*argmax)(const ArgMaxArgs&) noexcept = nullptr;
  void (*sum_exp)(const SumExpArgs&) noexcept = nullptr;
};

// Each sets the entries that its instruction set improves; one exported function per ISA file.
void FillReference(KernelTable& table) noexcept;    // double precision, portable
void FillAvx2(KernelTable& table) noexcept;         // AVX2 + FMA + F16C
void FillAvx2Vnni(KernelTable& table) noexcept;     // + AVX-VNNI
void FillAvx512(KernelTable& table) noexcept;       // AVX-512 F, BW, VL, DQ
void FillAvx512Vnni(KernelTable& table) noexcept;   // + VNNI
void FillAvx512Bf16(KernelTable& table) noexcept;   // + BF16
void FillAmx(KernelTable& table) noexcept;          // + AMX tiles, BF16, INT8
void FillNeon(KernelTable& table) noexcept;         // 64-bit Arm
void FillNeonDotprod(KernelTable& table) noexcept;  // + DotProd
void FillNeonBf16(KernelTable& table) noexcept;     // + BF16
void FillNeonI8mm(KernelTable& table) noexcept;     // + I8MM

}  // namespace allspark::kernels

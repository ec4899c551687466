#include "kernels/kernel_table.h"

#include <cstdlib>

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/attention_scratch.h"

namespace allspark::kernels {
namespace {

struct Candidate {
  const char* name;
  void (*fill)(KernelTable&) noexcept;
  bool available;
  bool is_slower = false;  // than the one before it, on this processor
};

#if defined(__x86_64__)
// Every processor with AVX2 has F16C, but a virtual machine may hide it. GCC's builtin does not
// know its name.
bool HaveF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// Whether the processor has AMX and the system lets this process use it. A process must ask for the
// 8 KiB of tile state.
bool HaveAmx() {
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return (edx & kAll) == kAll && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Intel's processors since Sapphire Rapids have AMX for bfloat16. Their dot product for vectors
// takes four times as long as a multiply-add of float32, for twice the products (Emerald Rapids).
// The only one before them that has it is Cooper Lake, which is not measured.
bool HasSlowBf16Dot() { return __builtin_cpu_is("intel") && !__builtin_cpu_is("cooperlake"); }

// AVX's form of VNNI, which processors without AVX-512 have. GCC's builtin does not know its name.
bool HaveAvxVnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 4)) != 0;
}
#endif

// Weakest first; each is filled over the ones before it that are available.
std::vector<Candidate> Candidates() {
  std::vector<Candidate> candidates = {{"reference", FillReference, true}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HaveF16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
  candidates.push_back({"avx2", FillAvx2, avx2});
  candidates.push_back({"avx2_vnni", FillAvx2Vnni, avx2 && HaveAvxVnni()});
  candidates.push_back({"avx512", FillAvx512, avx512});
  candidates.push_back({"avx512_vnni", FillAvx512Vnni, avx512_vnni});
  candidates.push_back({"avx512_bf16", FillAvx512Bf16, avx512_bf16, HasSlowBf16Dot()});
  candidates.push_back({"amx", FillAmx, avx512_bf16 && HaveAmx()});
#elif defined(__aarch64__)
  const bool dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  const bool bf16 = dotprod && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
  const bool i8mm = bf16 && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
  candidates.push_back({"neon", FillNeon, true});
  candidates.push_back({"neon_dotprod", FillNeonDotprod, dotprod});
  candidates.push_back({"neon_bf16", FillNeonBf16, bf16});
  candidates.push_back({"neon_i8mm", FillNeonI8mm, i8mm});
#endif
  return candidates;
}

struct TableSet {
  std::vector<KernelTable> tables;
  std::vector<const KernelTable*> pointers;
  size_t fastest = 0;

  TableSet() {
    KernelTable table;
    for (const Candidate& candidate : Candidates()) {
      if (!candidate.available) continue;
      candidate.fill(table);
      table.name = candidate.name;
      if (!candidate.is_slower) fastest = tables.size();
      tables.push_back(table);
    }
    for (const KernelTable& t : tables) pointers.push_back(&t);
  }
};

}  // namespace

int64_t AttentionTileTokens(int64_t group) {
  const int64_t tokens = kAttentionRows / (group > 0 ? group : 1);
  return tokens > 0 ? tokens : 1;
}

namespace {

const TableSet& Tables() {
  // Leaked on purpose: worker threads may still run kernels while statics are destroyed.
  static const TableSet* const set = new TableSet;
  return *set;
}

}  // namespace

const std::vector<const KernelTable*>& AvailableTables() { return Tables().pointers; }

const KernelTable* FastestTable() { return Tables().pointers[Tables().fastest]; }

const KernelTable* FindTable(std::string_view name) {
  for (const KernelTable* table : AvailableTables()) {
    if (name == table->name) return table;
  }
  return nullptr;
}

const KernelTable* DefaultTable() {
  const char* isa = std::getenv("ALLSPARK_CPU_ISA");
  if (isa != nullptr && isa[0] != '\0') return FindTable(isa);
  return FastestTable();
}

}  // namespace allspark::kernels

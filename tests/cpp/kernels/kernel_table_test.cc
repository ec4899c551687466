// Which tables there are and how one is chosen.
#include <cstring>
#include <set>
#include <string>

#include "cpp/kernels/kernel_test_util.h"
#include "kernels/attention_scratch.h"
#include "support/environment.h"

namespace allspark::kernels {
namespace {

TEST(KernelTableTest, TheReferenceComesFirst) {
  ASSERT_FALSE(AvailableTables().empty());
  EXPECT_STREQ(AvailableTables().front()->name, "reference");
}

TEST(KernelTableTest, NamesAreDistinctAndFindTheirTable) {
  std::set<std::string> names;
  for (const KernelTable* table : AvailableTables()) {
    EXPECT_TRUE(names.insert(table->name).second) << table->name;
    EXPECT_EQ(FindTable(table->name), table);
  }
  EXPECT_EQ(FindTable("mmx"), nullptr);
  EXPECT_EQ(FindTable(""), nullptr);
}

TEST(KernelTableTest, TheEnvironmentChooses) {
  const testing::ScopedVariable choice("ALLSPARK_CPU_ISA", "reference");
  EXPECT_EQ(DefaultTable(), &Reference());
  choice.Set("no_such_isa");
  EXPECT_EQ(DefaultTable(), nullptr);
  choice.Set("");
  EXPECT_EQ(DefaultTable(), FastestTable());
}

// Both ways: Intel's processors after Cooper Lake, and no others, are better off without a dot
// product of bfloat16 unless they have AMX.
TEST(KernelTableTest, TheStrongestIsTheFastestExceptOnIntelWithoutAmx) {
  const KernelTable* expected = AvailableTables().back();
#if defined(__x86_64__)
  const bool is_slow = __builtin_cpu_is("intel") && !__builtin_cpu_is("cooperlake");
  if (is_slow && expected == FindTable("avx512_bf16")) expected = FindTable("avx512_vnni");
#endif
  EXPECT_STREQ(FastestTable()->name, expected->name);
}

TEST(KernelTableTest, EveryTableHasTheSlotsOfBothDTypes) {
  for (const KernelTable* table : testing::AllTestTables()) {
    for (int dtype : {kSlotOf<float>, kSlotOf<BFloat16>}) {
      EXPECT_NE(table->gemm[dtype][dtype], nullptr) << table->name;
      EXPECT_NE(table->rms_norm[dtype], nullptr) << table->name;
      EXPECT_NE(table->layer_norm[dtype], nullptr) << table->name;
      EXPECT_NE(table->gated_act[dtype], nullptr) << table->name;
      EXPECT_NE(table->embedding[dtype], nullptr) << table->name;
      EXPECT_NE(table->kv_write[dtype], nullptr) << table->name;
      EXPECT_NE(table->attention[dtype][dtype], nullptr) << table->name;
      EXPECT_NE(table->gather_columns[dtype], nullptr) << table->name;
    }
    for (DType cache : {DType::kInt8, DType::kUInt4, DType::kInt8UInt4}) {
      const int slot = static_cast<int>(cache);
      EXPECT_NE(table->kv_write[slot], nullptr) << table->name;
      EXPECT_NE(table->attention[slot][kSlotOf<float>], nullptr) << table->name;
      EXPECT_NE(table->attention[slot][kSlotOf<BFloat16>], nullptr) << table->name;
    }
    EXPECT_NE(table->rope, nullptr) << table->name;
    EXPECT_NE(table->hadamard, nullptr) << table->name;
    EXPECT_NE(table->argmax, nullptr) << table->name;
    EXPECT_NE(table->sum_exp, nullptr) << table->name;
  }
}

TEST(KernelTableTest, TheEmulationIsAmongTheTestedTables) {
  if (!testing::CanEmulateTables()) {
    GTEST_SKIP()
        << "no SIMDe (libsimde-dev) at build time, a sanitizer build, or no AVX2: kernels of later "
           "instruction sets are tested only where the processor has them";
  }
  std::vector<std::string> names;
  for (const KernelTable* table : testing::EmulatedTables()) names.push_back(table->name);
  EXPECT_EQ(names, (std::vector<std::string>{"avx2_vnni_emulated", "avx512_emulated",
                                             "avx512_vnni_emulated", "avx512_bf16_emulated",
                                             "amx_emulated"}));
}

// On a processor with AVX-512, nothing is left of what AVX-VNNI put into the table.
TEST(KernelTableTest, Avx512ReplacesAllOfAvxVnni) {
  if (!testing::CanEmulateTables()) {
    GTEST_SKIP() << "no SIMDe (libsimde-dev) at build time, a sanitizer build, or no AVX2";
  }
  KernelTable over_avx2 = *FindTable("avx2"), over_vnni = over_avx2;
  testing::FillEmulatedAvx2Vnni(over_vnni);
  EXPECT_NE(std::memcmp(&over_avx2, &over_vnni, sizeof(KernelTable)), 0);
  testing::FillEmulatedAvx512(over_avx2);
  testing::FillEmulatedAvx512(over_vnni);
  EXPECT_EQ(std::memcmp(&over_avx2, &over_vnni, sizeof(KernelTable)), 0);
}

TEST(KernelTableTest, AttentionSizesArePositive) {
  for (int64_t group : {1, 2, 7, 8, 64, 128}) {
    EXPECT_GE(AttentionTileTokens(group), 1);
  }
  EXPECT_GT(AttentionScratchFloats(64), AttentionScratchFloats(32));
}

}  // namespace
}  // namespace allspark::kernels

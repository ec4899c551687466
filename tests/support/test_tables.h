// The kernel tables that tests run: those of this processor, and the emulated ones.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"
#include "support/emulated_tables.h"

namespace allspark::testing {

using KernelTables = std::vector<const kernels::KernelTable*>;

// AVX-VNNI, AVX-512 and AMX emulated, weakest first: "avx2_vnni_emulated" and so on. Empty where
// they cannot run.
inline const KernelTables& EmulatedTables() {
  static const KernelTables* const tables = [] {
    auto* all = new KernelTables;
    if (!CanEmulateTables()) return all;
    kernels::KernelTable table = *kernels::FindTable("avx2");
    const auto add = [&](void (*fill)(kernels::KernelTable&), const char* name) {
      fill(table);
      table.name = name;
      all->push_back(new kernels::KernelTable(table));
    };
    add(FillEmulatedAvx2Vnni, "avx2_vnni_emulated");
    add(FillEmulatedAvx512, "avx512_emulated");
    add(FillEmulatedAvx512Vnni, "avx512_vnni_emulated");
    add(FillEmulatedAvx512Bf16, "avx512_bf16_emulated");
    add(FillEmulatedAmx, "amx_emulated");
    return all;
  }();
  return *tables;
}

inline bool IsEmulated(const kernels::KernelTable& table) {
  return std::string_view(table.name).ends_with("_emulated");
}

// Whether the table's instruction set is `isa`, on the processor or emulated.
inline bool IsOf(const kernels::KernelTable& table, std::string_view isa) {
  return table.name == isa || table.name == std::string(isa) + "_emulated";
}

// AMX cuts K into tiles and adds their results.
inline bool IsAmx(const kernels::KernelTable& table) { return IsOf(table, "amx"); }

// Whether attention multiplies in bfloat16.
inline bool HasBf16Products(const kernels::KernelTable& table) {
  return IsAmx(table) || IsOf(table, "avx512_bf16") || IsOf(table, "neon_bf16") ||
         IsOf(table, "neon_i8mm");
}

// Every table of this processor, and all emulated ones.
inline const KernelTables& AllTestTables() {
  static const KernelTables* const tables = [] {
    auto* all = new KernelTables(kernels::AvailableTables());
    all->insert(all->end(), EmulatedTables().begin(), EmulatedTables().end());
    return all;
  }();
  return *tables;
}

// Every table of this processor, and emulated tables only for those it lacks: for longer tests.
inline const KernelTables& TestTables() {
  static const KernelTables* const tables = [] {
    auto* all = new KernelTables(kernels::AvailableTables());
    for (const kernels::KernelTable* table : EmulatedTables()) {
      const std::string_view name = table->name;
      if (kernels::FindTable(name.substr(0, name.find("_emulated"))) == nullptr) {
        all->push_back(table);
      }
    }
    return all;
  }();
  return *tables;
}

inline std::string TableName(const ::testing::TestParamInfo<const kernels::KernelTable*>& info) {
  return info.param->name;
}

}  // namespace allspark::testing

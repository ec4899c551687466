// libFuzzer's entry to a target: a namespace of allspark::fuzz with Run and WriteSeeds. With
// ALLSPARK_FUZZ_SEEDS=<folder>, the target's seeds of a few KB are first written to that folder.
#pragma once

#include <google/protobuf/stubs/logging.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// The parser reports each bad string on stderr: thousands per second while fuzzing.
#define AS_FUZZ_ENTRY(target)                                               \
  extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {    \
    google::protobuf::SetLogHandler(nullptr);                               \
    if (const char* folder = getenv("ALLSPARK_FUZZ_SEEDS"))                 \
      allspark::fuzz::target::WriteSeeds(folder);                           \
    return 0;                                                               \
  }                                                                         \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { \
    allspark::fuzz::target::Run(data, size);                                \
    return 0;                                                               \
  }

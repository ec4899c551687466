#include "fuzz/entry.h"
#include "fuzz/lora_file_target.h"

AS_FUZZ_ENTRY(lora_file)

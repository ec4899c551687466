#include "fuzz/entry.h"
#include "fuzz/model_reader_target.h"

AS_FUZZ_ENTRY(model_reader)

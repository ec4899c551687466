"""FastLLM's logits of a checkpoint in float32: `fast_llm_logits.py CHECKPOINT VOCABULARY IDS OUT`,
with IDS a JSON list and OUT a .npy, float32 [tokens, VOCABULARY]. Run by the Python that has ftllm.
It calls the library directly; ftllm's Python part makes the same calls but needs many packages.
"""

from __future__ import annotations

import json
import sys
from ctypes import CDLL, POINTER, c_bool, c_char_p, c_float, c_int, c_void_p
from importlib.util import find_spec
from pathlib import Path

import numpy as np

FLOAT32 = 0


def library():
    folder = Path(find_spec("ftllm").origin).parent
    CDLL(str(folder / "libnuma.so.1"))
    lib = CDLL(str(folder / "libfastllm_tools-cpu.so"))
    lib.create_llm_model_fromhf.argtypes = [
        c_char_p, c_int, c_int, c_bool, c_char_p, c_bool, c_int, c_int, c_char_p,
    ]  # fmt: skip
    lib.set_model_atype.argtypes = [c_int, c_char_p]
    lib.launch_response_llm_model.argtypes = [
        c_int, c_int, c_void_p, c_int, c_int, c_bool, c_float, c_int, c_float, c_float, c_bool,
        c_int, POINTER(c_int),
    ]  # fmt: skip
    lib.fetch_response_logits_llm_model.argtypes = [c_int, c_int, POINTER(c_float)]
    return lib


def main():
    checkpoint, size, ids_path, out = sys.argv[1:]
    ids, size = json.loads(Path(ids_path).read_text()), int(size)
    lib = library()
    lib.set_cpu_threads(1)
    model = lib.create_llm_model_fromhf(
        checkpoint.encode(), FLOAT32, 0, True, b"", False, FLOAT32, 0, b""
    )
    lib.set_model_atype(model, b"float32")
    rows = []
    for end in range(1, len(ids) + 1):  # It returns the logits of the last token only.
        prompt = (c_int * end)(*ids[:end])
        handle = lib.launch_response_llm_model(
            model, end, prompt, 1, 0, False, 1, 1, 1, 1, True, 0, (c_int * 1)()
        )
        row = (c_float * size)()
        if lib.fetch_response_logits_llm_model(model, handle, row) < 0:
            sys.exit(f"FastLLM gives no logits of {end} tokens")
        rows.append(np.array(row, np.float32))
        while lib.fetch_response_logits_llm_model(model, handle, row) >= 0:
            pass
    np.save(out, np.stack(rows))


if __name__ == "__main__":
    main()

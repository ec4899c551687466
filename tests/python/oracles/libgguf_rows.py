"""Quantises rows by libgguf: `libgguf_rows.py ROWS OUT TYPE...`. ROWS is a NumPy file, float32
[rows, columns]; OUT gets of each type the raw blocks and, as TYPE.floats, what they stand for.
"""

from __future__ import annotations

import sys

import libgguf
import numpy as np


def main(rows_file, out, *names):
    rows, made = np.load(rows_file), {}
    for name in names:
        kind = libgguf.GGMLQuantizationType[name]
        made[name] = libgguf.quantize_rows(rows, kind)
        made[f"{name}.floats"] = libgguf.dequantize_rows(made[name], kind, n_per_row=rows.shape[1])
    np.savez(out, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])

#!/usr/bin/env python3
"""Fails if code compiled for one instruction set could be linked into the rest of the program.

usage: check_isa_symbols.py BUILD_DIR

The linker keeps one copy of every weak symbol. If that copy came from a file compiled with AVX-512,
an AVX2 machine would crash in code that has nothing to do with kernels. So no object of
csrc/kernels/cpu may have a weak symbol, and each must export exactly one function.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

ISA_OBJECT = re.compile(r"kernels/cpu/[^/]*\.cc\.o$")
NM_LINE = re.compile(r"[0-9a-f]* +([A-Za-z]) (.+)$")  # an undefined symbol has no address
WEAK_TYPES = set("wWvVu")  # u: a unique global, such as a static local of an inline function


def check_symbols(name: str, nm_output: str) -> list[str]:
    """The problems of one object, from the output of `nm`."""
    problems, exported = [], []
    for line in nm_output.splitlines():
        fields = NM_LINE.match(line)
        if fields is None:
            continue
        kind, symbol = fields.groups()
        if kind in WEAK_TYPES:
            problems.append(f"{name}: weak symbol {symbol}")
        elif kind == "U":
            # Not an inline copy yet, but a small change could make one.
            if symbol.startswith(("std::", "operator new", "operator delete", "__cxa_")):
                problems.append(f"{name}: uses the C++ library: {symbol}")
        elif kind.isupper():
            if kind != "T":
                problems.append(f"{name}: exports data: {symbol}")
            exported.append(symbol)
    if len(exported) != 1:
        listed = ", ".join(exported) or "none"
        problems.append(f"{name}: exports {len(exported)} symbols, not one: {listed}")
    return problems


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    build_dir = Path(sys.argv[1])
    objects = sorted(p for p in build_dir.rglob("*.o") if ISA_OBJECT.search(p.as_posix()))
    if not objects and platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        print(f"check_isa_symbols: no object to check under {build_dir}; is it built?")
        return 1
    problems = []
    for obj in objects:
        command = ["nm", "--demangle", str(obj)]
        nm = subprocess.run(command, capture_output=True, text=True, check=True)
        problems += check_symbols(obj.name, nm.stdout)
    for problem in problems:
        print(problem)
    print(f"check_isa_symbols: {len(objects)} object(s), {len(problems)} problem(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

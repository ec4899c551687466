#!/usr/bin/env python3
"""Fails if clang refuses a kernel source of 64-bit Arm. It reads them on any processor and compiles
nothing, so that a change of shared kernel code cannot break Arm unseen where only x86-64 is built.

usage: check_arm_kernels.py CLANG++ [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The flags of an instruction set (cmake/AllsparkLayers.cmake).
_ISA = re.compile(r"^set\(ALLSPARK_ISA_(neon\w*)([^)]*)\)", re.MULTILINE)
# What the C library's headers of another processor lack. Both have types of the same sizes.
_STUBS = {"gnu/stubs-32.h": "", "bits/wordsize.h": "#define __WORDSIZE 64\n"}


def include_folders(clang: str) -> list[str]:
    """Where clang looks for this processor's system headers, but for its own."""
    command = [clang, "-E", "-v", "-x", "c++", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    listed = said.partition("#include <...> search starts here:")[2].partition("End of search")[0]
    return [line.strip() for line in listed.splitlines() if line.strip() and "/clang/" not in line]


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    clang, root = sys.argv[1], Path(*sys.argv[2:] or [Path(__file__).parent.parent]).resolve()
    found = _ISA.findall((root / "cmake" / "AllsparkLayers.cmake").read_text())
    problems = [] if found else ["cmake/AllsparkLayers.cmake names no instruction set of Arm"]
    with tempfile.TemporaryDirectory() as stubs:
        for name, text in _STUBS.items():
            path = Path(stubs, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        folders = [f"-isystem{folder}" for folder in (stubs, *include_folders(clang))]
        csrc = root / "csrc"
        for isa, flags in found:
            source = csrc / "kernels" / "cpu" / f"kernels_{isa}.cc"
            march = [flag for flag in flags.split() if flag.startswith("-march")]
            command = [clang, "--target=aarch64-linux-gnu", "-std=c++20", "-fsyntax-only",
                       f"-I{csrc}", f"-I{csrc}/include", *folders, *march, str(source)]  # fmt: skip
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                problems.append(result.stderr.strip())
    for text in problems:
        print(text)
    print(f"check_arm_kernels: {len(found)} source(s), {len(problems)} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

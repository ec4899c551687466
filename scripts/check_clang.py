#!/usr/bin/env python3
"""Fails on any source that clang refuses or warns of, although GCC builds it. Nothing is compiled:
clang reads each source with the flags of a configured build, and those given. With -Wthread-safety
it finds members that are used without the lock that guards them (csrc/base/mutex.h).

usage: check_clang.py BUILD_DIR CLANG++ [FLAG...]
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def syntax_command(command: str, clang: list[str]) -> list[str]:
    """The compiler's command of compile_commands.json as a check by clang: no object is written."""
    words = shlex.split(command)
    # A launcher such as ccache may come first; the compiler is the word before the first flag.
    begin = next(index for index, word in enumerate(words) if word.startswith("-"))
    flags: list[str] = []
    rest = iter(words[begin:])
    for word in rest:
        if word == "-o":
            next(rest, None)
        elif word != "-c":
            flags.append(word)
    return [*clang, "-fsyntax-only", *flags]


def problem(entry: dict[str, str], clang: list[str]) -> str:
    """What clang says of one source; empty where it accepts it."""
    result = subprocess.run(
        syntax_command(entry["command"], clang),
        cwd=entry["directory"],
        capture_output=True,
        text=True,
    )
    if result.returncode == 0:
        return ""
    return result.stderr.strip() or f"{entry['file']}: {clang[0]} ended with {result.returncode}"


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    database, clang = Path(sys.argv[1]) / "compile_commands.json", sys.argv[2:]
    if not database.is_file():
        print(f"check_clang: {database} does not exist; is it configured?")
        return 1
    entries = json.loads(database.read_text())
    if not entries:
        print(f"check_clang: {database} names no source")
        return 1
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = [text for text in pool.map(lambda entry: problem(entry, clang), entries) if text]
    for text in problems:
        print(text)
    print(f"check_clang: {len(entries)} source(s), {len(problems)} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

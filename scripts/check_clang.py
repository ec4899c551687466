#!/usr/bin/env python3
"""Fails on any source that clang refuses or warns of, although GCC builds it. Nothing is compiled:
clang reads each source by itself, with the flags of a configured build, and those given. With
-Wthread-safety it finds members that are used without the lock that guards them
(csrc/base/mutex.h).

usage: check_clang.py BUILD_DIR CLANG++ [FLAG...]
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Headers that this share of the sources with the same flags include are parsed once for all.
_COMMON_SHARE = 0.1
_MIN_SOURCES = 8
# Of GCC alone.
_UNKNOWN_FLAGS = ("-finline-small-functions", "-Wno-subobject-linkage")
_UNITY = re.compile(r"/Unity/unity_\d+_cxx\.cxx$")
_UNITY_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_SYSTEM_INCLUDE = re.compile(r"^#include (<[^>]+>)", re.MULTILINE)


@dataclass
class Source:
    """A source of compile_commands.json, with the flags that clang reads it with."""

    path: str
    directory: str
    flags: list[str]

    @property
    def kind(self) -> tuple[str, ...]:
        """The flags that a precompiled header must share: all but paths and warnings."""
        return tuple(flag for flag in self.flags if not flag.startswith(("-I", "-W", "/")))


def to_sources(entry: dict[str, str]) -> list[Source]:
    """The sources of an entry: its file, or those that a file of CMAKE_UNITY_BUILD includes."""
    words = shlex.split(entry["command"])
    # A launcher such as ccache may come first; the compiler is the word before the first flag.
    begin = next(index for index, word in enumerate(words) if word.startswith("-"))
    flags: list[str] = []
    rest = iter(words[begin:])
    for word in rest:
        if word == "-o":
            next(rest, None)
        elif word not in ("-c", entry["file"], *_UNKNOWN_FLAGS):
            flags.append(word)
    paths = [entry["file"]]
    if _UNITY.search(entry["file"]):
        paths = _UNITY_INCLUDE.findall(Path(entry["directory"], entry["file"]).read_text())
    return [Source(path, entry["directory"], flags) for path in paths]


def precompile(sources: list[Source], clang: list[str], header: Path) -> list[str]:
    """Flags that give these sources, which are of one kind, their common headers precompiled; none
    where it does not pay. `header` is written, and the result beside it."""
    if len(sources) < _MIN_SOURCES:
        return []
    counts = Counter(
        header
        for source in sources
        for header in set(_SYSTEM_INCLUDE.findall(Path(source.directory, source.path).read_text()))
    )
    common = [name for name, count in counts.items() if count >= _COMMON_SHARE * len(sources)]
    header.write_text("".join(f"#include {name}\n" for name in sorted(common)))
    output = header.with_suffix(".pch")
    first = sources[0]
    command = [*clang, *first.flags, "-x", "c++-header", str(header), "-o", str(output)]
    made = subprocess.run(command, cwd=first.directory, capture_output=True)
    return ["-include-pch", str(output)] if made.returncode == 0 else []


def problem(source: Source, clang: list[str], precompiled: list[str]) -> str:
    """What clang says of one source; empty where it accepts it."""
    result = subprocess.run(
        [*clang, "-fsyntax-only", *source.flags, *precompiled, source.path],
        cwd=source.directory,
        capture_output=True,
        text=True,
    )
    if result.returncode == 0:
        return ""
    return result.stderr.strip() or f"{source.path}: {clang[0]} ended with {result.returncode}"


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
    kinds: dict[tuple[str, ...], list[Source]] = {}
    all_sources = [source for entry in entries for source in to_sources(entry)]
    for source in all_sources:
        kinds.setdefault(source.kind, []).append(source)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        checks = []
        for number, sources in enumerate(kinds.values()):
            precompiled = precompile(sources, clang, Path(folder, f"{number}.h"))
            checks += [pool.submit(problem, source, clang, precompiled) for source in sources]
        problems = [text for check in checks if (text := check.result())]
    for text in problems:
        print(text)
    print(f"check_clang: {len(all_sources)} source(s), {len(problems)} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""python -m allspark.dashinfer_compat"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import allspark.dashinfer_compat


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(allspark.dashinfer_compat.__doc__)
        return 0 if argv else 2
    if not os.path.exists(argv[0]):
        print(f"allspark.dashinfer_compat: {argv[0]}: no such file", file=sys.stderr)
        return 2
    allspark.dashinfer_compat.install()
    sys.argv = list(argv)
    # A script imports modules from its own directory, as when Python runs it.
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    # multiprocessing passes sys.path to the processes that it spawns, which find dashinfer there.
    sys.path.append(str(Path(__file__).parent / "shim"))
    runpy.run_path(argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

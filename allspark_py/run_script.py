"""Runs a script that was written for another engine: the command of the packages that stand in for
one."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def run(package: ModuleType, argv: Sequence[str]) -> int:
    """Runs a script while the modules of the other engine are those of `package`.

    Args:
        package: its documentation is that of the command, its `install` makes the modules, and its
            folder `shim` has the engine's name.
        argv: the script and its arguments.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(package.__doc__)
        return 0 if argv else 2
    if not os.path.exists(argv[0]):
        print(f"{package.__name__}: {argv[0]}: no such file", file=sys.stderr)
        return 2
    package.install()
    sys.argv = list(argv)
    # A script imports modules from its own directory, as when Python runs it.
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    # multiprocessing passes sys.path to the processes that it spawns, which find the engine there.
    sys.path += [str(Path(folder) / "shim") for folder in package.__path__]
    runpy.run_path(argv[0], run_name="__main__")
    return 0

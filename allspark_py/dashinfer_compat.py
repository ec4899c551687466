"""Runs a script that was written for DashInfer.

usage: python -m allspark.dashinfer_compat SCRIPT [ARG ...]

`dashinfer`, `dashinfer.allspark` and its submodules resolve to this package while the script runs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
import types
from collections.abc import Sequence

_ROOT = "dashinfer"
_PREFIX = "dashinfer.allspark"


class _AliasLoader(importlib.abc.Loader):
    """Hands out an existing module under the alias that was asked for."""

    def __init__(self, target: str):
        self._target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # Importing the target has run it. The machinery has just put the alias's spec on it.
        module.__spec__ = self._spec


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds dashinfer.allspark[.x] as allspark[.x]."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PREFIX and not fullname.startswith(_PREFIX + "."):
            return None
        name = "allspark" + fullname[len(_PREFIX):]
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(name), is_package=True)


def install() -> None:
    """Makes `from dashinfer import allspark` import this package from now on."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    package = types.ModuleType(_ROOT)
    package.__path__ = []  # a package, so that submodules are looked for
    sys.modules[_ROOT] = package
    package.allspark = importlib.import_module("allspark")  # type: ignore[attr-defined]
    sys.modules[_PREFIX] = package.allspark


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    install()
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

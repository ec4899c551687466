"""Runs a script that was written for DashInfer.

usage: python -m allspark.dashinfer_compat SCRIPT [ARG ...]

`dashinfer`, `dashinfer.allspark` and its submodules resolve to this package while the script runs:
its classes, with the names, keywords and habits that only such a script needs. docs/dashinfer.md
says what is otherwise here, and what is not served.
"""

from allspark.dashinfer_compat.aliases import install

__all__ = ["install"]

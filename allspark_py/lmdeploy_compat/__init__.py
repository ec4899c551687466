"""Runs a script that was written for LMDeploy.

usage: python -m allspark.lmdeploy_compat SCRIPT [ARG ...]

`lmdeploy` and its documented submodules resolve to this package while the script runs, and in the
processes that it spawns. docs/lmdeploy.md says what is otherwise here, and what is not served.
"""

from allspark.lmdeploy_compat.aliases import install

__all__ = ["install"]

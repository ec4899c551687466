"""python -m allspark.dashinfer_compat"""

from __future__ import annotations

import sys

import allspark.dashinfer_compat
from allspark.run_script import run

if __name__ == "__main__":
    sys.exit(run(allspark.dashinfer_compat, sys.argv[1:]))

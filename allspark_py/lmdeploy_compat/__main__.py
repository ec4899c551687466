"""python -m allspark.lmdeploy_compat"""

from __future__ import annotations

import sys

import allspark.lmdeploy_compat
from allspark.run_script import run

if __name__ == "__main__":
    sys.exit(run(allspark.lmdeploy_compat, sys.argv[1:]))

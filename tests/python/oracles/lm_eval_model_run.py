"""Runs a module of allspark in lm-eval's environment, which has no allspark: its packages come
last on the path, so that those of the environment are used where both have one.

usage: lm_eval_model_run.py PATHS MODULE ARGUMENT...
"""

from __future__ import annotations

import os
import runpy
import sys

sys.path += sys.argv[1].split(os.pathsep)
module = sys.argv[2]
sys.argv = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__")

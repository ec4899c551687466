"""Replaces itself by the alias of the same name."""

import sys

from allspark.lmdeploy_compat import install

del sys.modules["lmdeploy"]
install()

"""Replaces itself by the alias of the same name."""

import sys

from allspark.dashinfer_compat import install

del sys.modules["dashinfer"]
install()

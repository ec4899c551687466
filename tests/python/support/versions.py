"""Which versions of dependencies a test runs with: some behave differently."""

from __future__ import annotations

import re
from importlib.metadata import version


def is_before(package: str, *numbers: int) -> bool:
    """Whether the installed version of the package is lower."""
    return tuple(map(int, re.findall(r"\d+", version(package))))[: len(numbers)] < numbers

"""What a loader says of a model that it takes: warnings of one line."""

from __future__ import annotations

import warnings


def notice(text: str) -> None:
    """Warns with a UserWarning. It names no place in the program: the text is about a file, and
    with the place Python would print a second line, the program's own."""
    warnings.warn_explicit(text, UserWarning, "allspark", 0)

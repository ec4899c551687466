"""A bar on a terminal that counts layers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def layer_progress() -> Iterator[Callable[[int, int], object]]:
    """A function to be called with the number of layers that are done, and of all."""
    from tqdm import tqdm

    with tqdm(unit=" layers", disable=not sys.stderr.isatty()) as bar:

        def show(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        yield show

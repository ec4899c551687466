"""Abort: ends a request, also before it has started."""

from __future__ import annotations

from collections.abc import Callable


class Abort:
    """Ends one request, from any thread: at once, or as soon as it has started."""

    def __init__(self) -> None:
        self._is_asked = False
        self._stop: Callable[[], object] | None = None

    def ask(self) -> None:
        """Ends the request. A second call has no effect."""
        # Both methods write their field before they read the other's: whichever thread comes first,
        # one of them calls `_stop`.
        self._is_asked = True
        if self._stop is not None:
            self._stop()

    def started(self, stop: Callable[[], object]) -> None:
        """The request runs now; `stop` ends it, and may be called twice."""
        self._stop = stop
        if self._is_asked:
            stop()

"""ResultQueue: the output of a request, with the getters of the DashInfer interface, iteration and
`async for`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from allspark._allspark import (
    ByteLevelText,
    GeneratedElements,
    GenerateRequestStatus,
    NativeResultQueue,
)
from allspark.aio import wait_changed


class ResultQueue:
    """Tokens, status and statistics of one request.

    Readable from any thread, also after the request was released and after the engine is gone.
    Each token is delivered once, in order, whichever getter fetches it.
    """

    # Stop strings: whether there are any, and whether it stopped at one. Ids alone have none.
    _has_stops = False
    _stopped = False

    def __init__(self, native: NativeResultQueue):
        self._native = native

    def GenerateStatus(self) -> GenerateRequestStatus:
        """The request's status; never blocks."""
        return self._native.status()

    def GeneratedLength(self) -> int:
        """Output tokens so far, fetched or not."""
        return self._native.generated_length()

    def RequestStatInfo(self) -> dict[str, int]:
        """Statistics by key (see `allspark.engine.RequestStatInfo`): ms, tokens, tokens/s."""
        return self._native.stat_info()

    def Get(self) -> GeneratedElements | None:
        """Blocks until there are new tokens and returns all of them.

        Returns None once the request has ended and all tokens were fetched.
        """
        return self._take(lambda: self._native.get(-1))

    def GetWithTimeout(self, timeout_ms: int) -> GeneratedElements | None:
        """As Get, but returns None if nothing came within `timeout_ms` milliseconds (>= 0)."""
        if timeout_ms < 0:
            raise ValueError(f"timeout_ms is {timeout_ms}; it must be at least 0")
        return self._take(lambda: self._native.get(timeout_ms))

    def GetNoWait(self) -> GeneratedElements | None:
        """New tokens, or None when there are none; never blocks."""
        return self._take(self._native.get_nowait)

    @property
    def finished(self) -> bool:
        """True once the status is terminal; tokens may still wait to be fetched."""
        return self._native.is_terminal

    @property
    def finish_reason(self) -> str | None:
        """'stop', 'length', 'cancelled', 'deadline', 'interrupted' or 'error'; None while it
        runs."""
        return self._native.finish_reason() or None

    @property
    def error(self) -> str | None:
        """The error message, where the status is InternalError or GenerateInterrupted."""
        return self._native.error() or None

    @property
    def stop_word(self) -> str | None:
        """The stop string at which the output ended; None if it ended otherwise, as it always does
        where no text is made."""
        return None

    @property
    def sequence_score(self) -> float | None:
        """The score by which the sequence was ranked, with num_beams or best_of: the sum of its
        log-probabilities / length ** length_penalty. None until it has ended."""
        return self._native.sequence_score()

    @property
    def request_id(self) -> int:
        """The id of the request's handle."""
        return self._native.request_id

    async def get(self) -> GeneratedElements | None:
        """Get for asyncio: waits on the running loop instead of blocking a thread."""
        while True:
            # The status is read first: tokens from before a terminal status are in the queue by
            # then.
            finished = self.finished
            elements = self._take(self._native.get_nowait)
            if elements is not None or finished:
                return elements
            await wait_changed(self._native)

    def _take(self, fetch: Callable[[], GeneratedElements | None]) -> GeneratedElements | None:
        """All getters call this."""
        return fetch()

    def _put(self, ids: list[int], is_end: bool) -> tuple[str, int]:
        """What the tokens are worth that were read past the getters: their text, and how many of
        them the output has. `is_end`: they are the last."""
        return "", len(ids)

    def _plain_decoder(self) -> tuple[ByteLevelText, list[int]] | None:
        """What makes the queue's text of its ids, and nothing else does; None: there is none."""
        return None

    def _end_plain(self, num_ids: int) -> None: ...

    def __iter__(self) -> Iterator[GeneratedElements]:
        while (elements := self.Get()) is not None:
            yield elements

    async def __aiter__(self) -> AsyncIterator[GeneratedElements]:
        while (elements := await self.get()) is not None:
            yield elements

    def __repr__(self) -> str:
        return (
            f"ResultQueue(request_id={self.request_id}, status={self.GenerateStatus().name}, "
            f"generated={self.GeneratedLength()}, finish_reason={self.finish_reason!r})"
        )

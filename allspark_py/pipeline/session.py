"""Session: a conversation with a pipeline."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from allspark.pipeline.abort import Abort
from allspark.pipeline.conversation import Conversation
from allspark.pipeline.response import Response

if TYPE_CHECKING:
    from allspark.pipeline.configs import GenerationConfig

_ids = itertools.count()


class Session:
    """The turns of a conversation so far. `Pipeline.session()` makes one."""

    def __init__(self, gen_config: GenerationConfig | None = None):
        self.session_id = next(_ids)
        self.gen_config = gen_config
        self.prompt: str | None = None
        self.response: Response | None = None
        # (what was asked, what was answered), oldest first.
        self.history: list[tuple[str, str]] = []
        self.conversation = Conversation()
        self._abort: Abort | None = None  # of the turn that runs

    @property
    def step(self) -> int:
        """Tokens of the conversation so far."""
        if self.response is None:
            return 0
        return self.response.input_token_len + self.response.generate_token_len

    def abort(self) -> None:
        """Ends the turn that runs; from any thread."""
        abort = self._abort
        if abort is not None:
            abort.ask()

    def close(self) -> None:
        """Ends the turn that runs, and forgets the conversation."""
        self.abort()
        self.prompt = self.response = None
        self.history.clear()
        self.conversation = Conversation()

    async def async_abort(self) -> None:
        """abort, for scripts that await it."""
        self.abort()

    async def async_close(self) -> None:
        """close, for scripts that await it."""
        self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        turns = [f"USER:\n{asked}\nASSISTANT:\n{answer}\n" for asked, answer in self.history]
        return "".join(turns)

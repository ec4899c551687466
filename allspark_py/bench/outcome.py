"""Outcome: what became of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


class RequestFailed(Exception):
    """A request got no answer, or only a part of one; the text says why."""


@dataclass(slots=True)
class Outcome:
    """Times are seconds since the run began."""

    asked: int  # most output tokens
    due: float = 0.0  # when it was to be sent
    sent: float = 0.0
    end: float = 0.0  # of the whole answer, or when it failed
    # When each chunk with output came; several may have come together.
    times: list[float] = field(default_factory=list)
    # As the server or the engine counts them; None: it did not say.
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    # Whether there is output in an answer that came whole; None: it came in chunks.
    whole_has_output: bool | None = None

    @property
    def num_output(self) -> int:
        """Output tokens: those of the server's count, else a token for each chunk."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def is_counted(self) -> bool:
        """Whether anything says how many tokens there are: a count, or chunks."""
        return self.output_tokens is not None or self.whole_has_output is None

    @property
    def is_empty(self) -> bool:
        """Whether the answer has no output."""
        return self.num_output == 0 if self.is_counted else not self.whole_has_output

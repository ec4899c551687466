"""Response: what a prompt gave, whole or a piece of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Response:
    """The output of one prompt; in a stream what came since the response before.

    Of a stream's pieces `extend` makes the whole.
    """

    text: str = ""
    # Output tokens so far, without the stop token that ended the output.
    generate_token_len: int = 0
    # Prompt tokens, those of the chat template included.
    input_token_len: int = 0
    # "stop", "length", "error" or "abort"; None while there is more to come.
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    # For each output token the likeliest ids and the token's own, with their log-probabilities.
    logprobs: list[dict[int, float]] | None = None
    # float32 [tokens, vocab_size] and [tokens, hidden_size], where the config asks for them. The
    # token that ended the output has a row, too.
    logits: np.ndarray | None = None
    last_hidden_state: np.ndarray | None = None
    # The prompt's position among those of the call.
    index: int = 0
    # Prompt tokens that the prefix cache had.
    cached_tokens: int = 0
    # Why there is no output, where finish_reason is "error".
    error_code: str | None = None
    error_message: str | None = None

    @property
    def session_id(self) -> int:
        """The name of `index` in older scripts."""
        return self.index

    def extend(self, piece: Response) -> Response:
        """Appends the next piece of a stream; returns this response."""
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        self.logits = joined(self.logits, piece.logits)
        self.last_hidden_state = joined(self.last_hidden_state, piece.last_hidden_state)
        self.generate_token_len = piece.generate_token_len
        self.input_token_len = piece.input_token_len
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        self.finish_reason = piece.finish_reason
        self.index = piece.index
        self.error_code = piece.error_code
        self.error_message = piece.error_message
        return self


def joined(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Rows of both, where there are any."""
    if first is None or second is None:
        return second if first is None else first
    return np.concatenate([first, second])

"""RemoteError: what a server answered in place of what was asked for."""

from __future__ import annotations

import json
from typing import Any

CUT = "the connection ended in the middle of the answer"
NO_WORDS = "an error without words"
_MOST_TEXT = 300


class RemoteError(RuntimeError):
    """A failure that the server itself reports.

    Args:
        message: the server's own words, where it has some.
        status: the HTTP status; 200 for an error within an answer that had begun.
        error: the `error` object of the body; None where there is none.
    """

    def __init__(self, message: str, status: int, error: Any = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.error = error

    @classmethod
    def of(cls, status: int, body: bytes, reason: str = "") -> RemoteError:
        """The error of an answer with this status and body."""
        text = body.decode(errors="replace").strip()
        try:
            found = json.loads(text)
        except ValueError:
            shown = " ".join(text.split())[:_MOST_TEXT]
            return cls(shown or reason or "no reason is given", status)
        error = found.get("error") if isinstance(found, dict) else None
        return cls(message_of(found) or text[:_MOST_TEXT], status, error)


def message_of(body: Any) -> str:
    """The words of an error's body: OpenAI's, FastAPI's `detail`, or a bare `message`; "" where
    there are none."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    for found in (inner, body.get("message"), body.get("detail")):
        if found:
            return found if isinstance(found, str) else json.dumps(found)[:_MOST_TEXT]
    return ""

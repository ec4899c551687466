"""Server-sent events, as they are read, and what OpenAI's chunks hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from allspark.remote.errors import RemoteError

DONE = b"[DONE]"


class EventReader:
    """Takes a stream apart. `feed` is given bytes as they come, cut anywhere, and returns the data
    of the events that are complete. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that ends in `data`."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b""
        if lines and not lines[-1].endswith(b"\n"):
            # Also a carriage return: it may be the first half of a line's end.
            self._rest = lines.pop()
        events = []
        for line in lines:
            text = line.rstrip(b"\r\n")
            if not text:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif text.startswith(b"data:"):
                self._data.append(text[6:] if text[5:6] == b" " else text[5:])
        return events

    def end(self) -> list[bytes]:
        """What a stream without an empty line at its end still holds."""
        return self.feed(b"\n\n") if self._rest or self._data else []


class LineReader:
    """The same for streams of which each line is an event; empty lines and comments are none."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        texts = [line.strip() for line in lines]
        return [text for text in texts if text and not text.startswith(b":")]

    def end(self) -> list[bytes]:
        """A last line without an end."""
        return self.feed(b"\n")


class Delta(NamedTuple):
    """What the first choice of a chunk, or of a whole answer, adds."""

    text: str = ""
    reasoning: str = ""
    # Whether there is output in it, of any kind: a part of a tool call has no text.
    has_output: bool = False
    finish_reason: str | None = None


_NOTHING = Delta()


def delta_of(chunk: dict[str, Any]) -> Delta:
    """The Delta of a chunk of either route, or of an answer that came whole.

    Raises:
        RemoteError: it has another form.
    """
    choices = chunk.get("choices")
    if not choices:
        return _NOTHING
    try:
        choice = choices[0]
        reason = choice.get("finish_reason")
        text = choice.get("text")
        if text is not None:
            return Delta(str(text), "", bool(text), reason)
        message = choice.get("delta") or choice.get("message") or {}
        text = str(message.get("content") or "")
        reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
        has_output = bool(text or reasoning or message.get("tool_calls"))
    except (AttributeError, KeyError, TypeError):
        message = f"the server sent choices of another form: {choices!r:.80}"
        raise RemoteError(message, 200) from None
    return Delta(text, reasoning, has_output, reason)


class Usage(NamedTuple):
    """Tokens as a server counts them; None: it does not say."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None


def usage_of(chunk: dict[str, Any]) -> Usage | None:
    """The usage in a chunk or a whole answer; None where it has none."""
    usage = chunk.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
    return Usage(*(count if isinstance(count, int) else None for count in found))

"""OutputBuilder: the items of a response from an output's text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.serve.message import Parser, read_deltas
from allspark.serve.parsers.json_texts import is_json_object
from allspark.serve.parsers.messages import ContentDelta, Delta, ReasoningDelta, ToolCallBegin
from allspark.serve.responses.record import Kind, OutputItem, Record, item_id
from allspark.serve.responses.token_texts import TokenText


class OutputBuilder:
    """Adds to the items of a record.

    Args:
        parser: None where the output is text and nothing else.
        has_rows: text comes by put_tokens, with log-probabilities.
    """

    def __init__(self, record: Record, parser: Parser | None, has_rows: bool = False):
        self._record = record
        self._parser = parser
        self._has_rows = has_rows
        self._waiting: list[TokenText] = []  # tokens that no item has yet

    def put(self, text: str) -> None:
        """Adds text."""
        self._add_all(read_deltas(self._parser, text, is_end=False))

    def put_tokens(self, tokens: Sequence[TokenText]) -> None:
        """Adds text token by token, so that the items' log-probabilities are the same however the
        output is cut."""
        for token in tokens:
            self._waiting.append(token)
            self.put(token.text)

    def end(self, is_whole: bool) -> None:
        """The output has ended; `is_whole` is False where it was cut off."""
        self._add_all(read_deltas(self._parser, "", is_end=True))
        items = self._record.items
        if not items and is_whole:
            self._open("message")
        if items:
            last = items[-1]
            last.is_done = True
            # A call may be whole where its output is not; and a stop string may cut it.
            is_call = last.kind == "function_call"
            last.is_whole = is_json_object(last.text) if is_call else is_whole

    @property
    def reasoning(self) -> str:
        """All that was found of it."""
        return "".join(item.text for item in self._record.items if item.kind == "reasoning")

    def _add_all(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._add(delta)
            self._waiting.clear()

    def _add(self, delta: Delta) -> None:
        if isinstance(delta, ToolCallBegin):
            self._open("function_call", call_id=delta.id, name=delta.name)
        elif isinstance(delta, ContentDelta):
            item = self._need("message")
            item.pieces.append(delta.text)
            if item.rows is not None:
                item.rows.append(_rows(self._waiting, len(delta.text)))
        elif isinstance(delta, ReasoningDelta):
            self._need("reasoning").pieces.append(delta.text)
        else:  # arguments, which are always the last call's
            self._record.items[-1].pieces.append(delta.text)

    def _need(self, kind: Kind) -> OutputItem:
        """The last item, if it is of a kind; else a new one."""
        items = self._record.items
        if not items or items[-1].kind != kind:
            self._open(kind)
        return items[-1]

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> None:
        items = self._record.items
        if items:
            items[-1].is_done = True
        item = OutputItem(kind, item_id(self._record.id, kind, f"{len(items):04d}"), call_id, name)
        if kind == "message" and self._has_rows:
            item.rows = []
        items.append(item)


def _rows(waiting: list[TokenText], length: int) -> list[dict[str, Any]]:
    """The log-probabilities of the last tokens that a text of some length needs. Those before are
    of markers, which are no text."""
    found = []
    while waiting and (length > 0 or (not waiting[-1].text and not waiting[-1].is_special)):
        token = waiting.pop()
        length -= len(token.text)
        # A special token without text ends the output.
        if token.row is not None and (token.text or not token.is_special):
            found.append(token.row)
    return found[::-1]

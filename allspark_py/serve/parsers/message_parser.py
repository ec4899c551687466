"""Turns the text of an output, which comes in pieces, into the parts of an assistant message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.messages import Delta, Message
from allspark.serve.parsers.reader import Markers, Reader, Steps, markers
from allspark.serve.parsers.reasoning import ReasoningParser, in_force
from allspark.serve.parsers.tool_parser import ToolParser
from allspark.serve.parsers.tools import Tool


class MessageParser:
    """Parses one output.

    However the output is cut into pieces, what `put` and `flush` return adds up to the same
    message. It takes any text and never raises for one; its time is linear in the text.

    Args:
        tool_parser: the syntax of tool calls; None: there are none.
        reasoning_parser: the syntax of reasoning; None: there is none.
        tools: the request's tools. Calls of others are delivered, too.
        enable_thinking: the request's flag. Some reasoning parsers do nothing without it.
        begins_in_reasoning: the prompt has opened the reasoning, as `is_opened_by` finds out.
            None: it has where the reasoning parser needs `enable_thinking`.
        content_has_format: there are calls or content in a format, and not both: once content has
            begun, what looks like a marker belongs to it.
        left_out: further texts that are left out, such as the tokenizer's end-of-turn token.
        make_id: makes the ids of calls; None: as the tool parser does.
    """

    def __init__(
        self,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        *,
        tools: Sequence[Tool] = (),
        enable_thinking: bool | None = None,
        begins_in_reasoning: bool | None = None,
        content_has_format: bool = False,
        left_out: Iterable[str] = (),
        make_id: Callable[[], str] | None = None,
    ):
        self._tool_parser = tool_parser
        self._reasoning_parser, is_inside = in_force(
            reasoning_parser, enable_thinking, begins_in_reasoning
        )
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._content_has_format = content_has_format
        self._left_out = tuple(left_out)
        self._reader = Reader()
        if make_id is None:
            make_id = tool_parser.make_id if tool_parser else str  # without a parser no call comes
        self._out = Collector(make_id, self._markers())
        self._has_ended = False
        self._steps = self._read(is_inside)
        next(self._steps, None)

    def put(self, text: str) -> list[Delta]:
        """Adds a piece of the output. Returns what is certain now."""
        if self._has_ended:
            raise RuntimeError("put() after flush(): a MessageParser parses one output")
        self._reader.feed(text)
        next(self._steps, None)
        return self._out.deltas()

    def flush(self) -> list[Delta]:
        """The output has ended. Returns the rest."""
        if not self._has_ended:
            self._has_ended = True
            self._reader.end()
            next(self._steps, None)
            self._out.flush()
        return self._out.deltas()

    def message(self) -> Message:
        """The message so far; after `flush` the whole one."""
        return self._out.message()

    def parse(self, text: str) -> Message:
        """The message of a whole output."""
        self.put(text)
        self.flush()
        return self.message()

    def _markers(self) -> Markers:
        """Of all syntaxes."""
        parser = self._tool_parser
        tools = (*parser.begins, *parser.ends) if parser else ()
        reasoning = self._reasoning_parser.markers if self._reasoning_parser else ()
        texts = dict.fromkeys((*tools, *reasoning, *self._left_out))
        # All that are looked for at once: raises here, if ever, not for some output.
        markers(*texts, *(parser.inside if parser else ()))
        return markers(*texts)

    def _read(self, is_in_reasoning: bool) -> Steps[None]:
        reasoning, tools, out = self._reasoning_parser, self._tool_parser, self._out
        if reasoning and is_in_reasoning:
            # Some models write the marker that the prompt has, too.
            yield from self._reader.blanks()
            yield from self._reader.marker(markers(reasoning.begin))
            yield from self._read_reasoning(reasoning)
        may_begin = True
        while True:
            if may_begin and tools and out.is_empty:
                yield from tools.read_first(self._reader, out, self._parameters)
            if may_begin and self._content_has_format and not out.has_calls:
                mark = yield from self._first_marker(out.has_reasoning)
                if mark is None:
                    yield from self._read_content()
            else:
                mark = yield from self._reader.until(out.markers, out.content)
            if mark is None:
                out.cut(self._reader.cut)
                return
            out.marker()
            # Other markers end what was not begun, and are left out.
            may_begin = bool(reasoning and mark in reasoning.markers)
            if reasoning and mark == reasoning.begin:
                yield from self._read_reasoning(reasoning)
            elif tools and mark in tools.begins:
                yield from tools.read(mark, self._reader, out, self._parameters)

    def _first_marker(self, has_reasoning: bool) -> Steps[str | None]:
        """The marker of reasoning or calls with which the output goes on; None: it is content."""
        reasoning, tools = self._reasoning_parser, self._tool_parser
        begins = [*(tools.begins if tools else ())]
        if reasoning and not has_reasoning:
            begins.append(reasoning.begin)
        blanks: list[str] = []
        yield from self._reader.blanks(blanks.append)
        mark = yield from self._reader.marker(markers(*begins))
        if mark is None:
            self._out.content("".join(blanks))
        return mark

    def _read_content(self) -> Steps[None]:
        """Reads the rest of the output as content."""
        while (yield from self._reader.until(markers(*self._left_out), self._out.content)):
            self._out.marker()

    def _read_reasoning(self, parser: ReasoningParser) -> Steps[None]:
        """Reads to the end of the reasoning. In it, the markers of tool calls are text."""
        end, out = parser.end, self._out
        out.begin_reasoning()
        inside = markers(*dict.fromkeys((end, *self._left_out)))
        while True:
            mark = yield from self._reader.until(inside, out.reasoning)
            if mark is None:
                out.reasoning(self._reader.cut)
            if mark in (None, end):
                break
        out.end_reasoning()

"""DeepSeek's syntaxes: V3 and R1 with a fenced block of JSON, V3.1 without."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allspark.serve.parsers import formats
from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.formats import CallFormat, Parts
from allspark.serve.parsers.reader import Reader, Steps, markers
from allspark.serve.parsers.tool_parser import Parameters, ToolParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_LANGUAGE = re.compile(r"[a-z]*")
_NAME = re.compile(r"[^\n`{<]*")
_AFTER_ARGUMENTS = re.compile(r"[\s`]*")


class DeepSeekParser(ToolParser):
    """Between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, for each call
    `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a fenced block and `<｜tool▁call▁end｜>`, or
    `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    names = ("deepseek-v3",)
    begins = (_CALLS, _CALL)
    ends = (_CALLS_END, _CALL_END, _SEPARATOR)

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        found: str | None = marker
        while found == _CALL:
            found = yield from self._read_call(reader, out)

    def _read_call(self, reader: Reader, out: Collector) -> Steps[str | None]:
        """Returns the marker after the call, if it took one."""
        everything = (*self.begins, *self.ends)
        head: list[str] = []
        mark = yield from reader.until(markers(*everything), head.append)
        if mark != _SEPARATOR:
            out.released("".join(head))
            if mark:
                out.marker()
            return mark
        name = "".join(head).strip()
        char = yield from reader.blanks()
        if char != "{":
            # That was the kind of the call; or the name of one without arguments.
            mark = yield from reader.marker(markers(*everything))
            if mark:
                _end_without_arguments(out, name)
                return mark
            pieces: list[str] = []
            char = yield from reader.run(_NAME, pieces.append)
            name = "".join(pieces).strip()
            if not char or not name:
                out.released("".join(pieces))
                return None
        elif not name:
            return None
        out.begin_call(name)
        yield from self._read_arguments(reader, out)
        return None

    def _read_arguments(self, reader: Reader, out: Collector) -> Steps[None]:
        """Reads the arguments, fenced or not."""
        yield from reader.blanks()
        if (yield from reader.marker(markers(_FENCE))):
            yield from reader.run(_LANGUAGE)
            yield from reader.blanks()
        is_whole = False
        if (yield from reader.blanks()) == "{":
            is_whole = yield from reader.value(out.arguments, (*self.begins, *self.ends))
        out.end_call(is_whole)
        yield from reader.run(_AFTER_ARGUMENTS)

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        forms = [
            form
            for call in calls
            for form in (
                formats.tag(
                    f"{_CALL}function{_SEPARATOR}{call.name}\n```json\n",
                    call.arguments,
                    f"\n```{_CALL_END}",
                ),
                formats.tag(f"{_CALL}{call.name}{_SEPARATOR}", call.arguments, _CALL_END),
            )
        ]
        listed = formats.listed(formats.one_of(*forms), formats.regex(r"\n?"), many)
        section = formats.tag(_CALLS, listed, _CALLS_END)
        return Parts((_CALLS,), [section], separator=None, excludes=(_CALL,))


def _end_without_arguments(out: Collector, name: str) -> None:
    if name:
        out.begin_call(name)
        out.arguments("{}")
        out.end_call(is_whole=True)

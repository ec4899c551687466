"""Mistral's syntaxes: a list of objects after one marker, or a marker, a name and arguments."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from allspark.serve.ids import random_bytes
from allspark.serve.parsers import formats
from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.formats import CallFormat, Parts
from allspark.serve.parsers.json_calls import read_objects
from allspark.serve.parsers.json_parsers import object_begin
from allspark.serve.parsers.reader import Reader, Steps, markers
from allspark.serve.parsers.tool_parser import Parameters, ToolParser

_NAME = re.compile(r"[\w.:/-]*")
_ID_CHARS = string.ascii_letters + string.digits
_NUM_ID_CHARS = 9
_ID = re.compile(rf"[A-Za-z0-9]{{{_NUM_ID_CHARS}}}")
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or for each call
    `[TOOL_CALLS]name[ARGS]{...}`, where `[CALL_ID]` and an id may stand before `[ARGS]`."""

    names = ("mistral",)
    begins = ("[TOOL_CALLS]",)
    ends = (_ARGS, _CALL_ID)

    def make_id(self) -> str:
        # The chat templates refuse others.
        return "".join(_ID_CHARS[each % len(_ID_CHARS)] for each in random_bytes(_NUM_ID_CHARS))

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        while (yield from reader.blanks()) == "[":
            # Of a list, or of the next marker.
            if not (yield from reader.marker(markers(*self.begins, *self.ends))):
                reader.take()
                yield from read_objects(reader, out)
                return
        if (yield from reader.blanks()) == "{":
            yield from read_objects(reader, out)
        else:
            yield from self._read_named(reader, out)

    def _read_named(self, reader: Reader, out: Collector) -> Steps[None]:
        name: list[str] = []
        call_id: list[str] = []
        char = yield from reader.run(_NAME, name.append)
        mark = yield from reader.marker(markers(_ARGS, _CALL_ID))
        if mark == _CALL_ID:
            yield from reader.run(_NAME, call_id.append)
            mark = yield from reader.marker(markers(_ARGS))
        if not name or not (mark or call_id or char == "{"):
            out.released("".join((*name, *call_id)))
            return
        own_id = "".join(call_id)
        out.begin_call("".join(name), own_id if _ID.fullmatch(own_id) else "")
        is_whole = False
        if (yield from reader.blanks()) == "{":
            is_whole = yield from reader.value(out.arguments)
        out.end_call(is_whole)

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        objects = formats.one_of(
            *(
                formats.tag(object_begin(call.name, "arguments"), call.arguments, "}")
                for call in calls
            )
        )
        listed = formats.sequence(
            formats.regex(r" ?\["),
            formats.listed(objects, formats.const(", "), many),
            formats.const("]"),
        )
        named = [formats.tag(call.name + _ARGS, call.arguments, "") for call in calls]
        tag = formats.tag(self.begins[0], formats.one_of(listed, *named), "")
        return Parts(self.begins, [tag])

"""Syntaxes whose calls are JSON objects between markers: Qwen and Hermes, InternLM, Llama 3."""

from __future__ import annotations

import json
from collections.abc import Sequence

from allspark.serve.parsers import formats
from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.formats import CallFormat, Parts
from allspark.serve.parsers.json_calls import read_objects
from allspark.serve.parsers.reader import Reader, Steps, markers
from allspark.serve.parsers.tool_parser import Parameters, ToolParser


def object_begin(name: str, key: str) -> str:
    """A call's object up to its arguments, as chat templates write it."""
    return f'{{"name": {json.dumps(name)}, "{key}": '


class QwenParser(ToolParser):
    """`<tool_call>`, a newline, an object, a newline, `</tool_call>` for each call."""

    names = ("qwen", "qwen3", "qwen2d5", "hermes")
    begins = ("<tool_call>",)
    ends = ("</tool_call>",)

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        yield from read_objects(reader, out, (*self.begins, *self.ends))

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        tags = [
            formats.tag(
                "<tool_call>\n" + object_begin(call.name, "arguments"),
                call.arguments,
                "}\n</tool_call>",
            )
            for call in calls
        ]
        return Parts(self.begins, tags, separator="\n")


class InternParser(ToolParser):
    """`<|action_start|><|plugin|>`, an object, `<|action_end|>` for each call."""

    names = ("internlm", "intern-s1")
    begins = ("<|action_start|>",)
    # Code for the interpreter is content.
    ends = ("<|action_end|>", "<|plugin|>", "<|interpreter|>")

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        yield from reader.blanks()  # some decoders put one between special tokens
        yield from reader.marker(markers(*self.ends[1:]))
        yield from read_objects(reader, out, (*self.begins, *self.ends))

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        # Chat templates of this family differ in the key.
        key = formats.one_of(formats.const('"parameters": '), formats.const('"arguments": '))
        tags = [
            formats.tag(
                "<|action_start|><|plugin|>",
                formats.sequence(
                    formats.regex(r"\n?"),
                    formats.const(f'{{"name": {json.dumps(call.name)}, '),
                    key,
                    call.arguments,
                    formats.regex(r"\}\n?"),
                ),
                "<|action_end|>",
            )
            for call in calls
        ]
        return Parts(self.begins, tags)


class LlamaParser(ToolParser):
    """`<|python_tag|>` and objects; or the objects alone, at the beginning of the output."""

    names = ("llama3",)
    begins = ("<|python_tag|>",)
    ends = ("<|eom_id|>",)

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        if (yield from reader.blanks()) == "[":
            reader.take()
        yield from read_objects(reader, out, (*self.begins, *self.ends))

    def read_first(self, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        if (yield from reader.blanks(out.content)) == "{":
            yield from read_objects(reader, out, (*self.begins, *self.ends), known=tools)

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        objects = formats.one_of(
            *(
                formats.tag(object_begin(call.name, "parameters"), call.arguments, "}")
                for call in calls
            )
        )
        listed = formats.listed(objects, formats.const("; "), many)
        return Parts(
            self.begins, [formats.tag(self.begins[0], listed, "")], separator=None, first=listed
        )

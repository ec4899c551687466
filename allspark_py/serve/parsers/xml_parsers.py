"""Syntaxes whose arguments are marked one by one and written as plain text: Qwen3-Coder, GLM."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from allspark.serve.parsers import formats, plain_text
from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.formats import CallFormat, Format, Parts
from allspark.serve.parsers.reader import Reader, Steps, markers
from allspark.serve.parsers.tool_parser import Parameters, ToolParser
from allspark.serve.parsers.typed_values import KINDS, TypedValue, kinds

# A name in a tag: up to its end.
_IN_TAG = re.compile(r"[^<>\n]*")
_LINE = re.compile(r"[^<\n]*")
_NAME = re.compile(r"[^\s{}<>\"\[\]]+")


class _Arguments:
    """Writes the arguments of the call that begins, as JSON."""

    def __init__(self, out: Collector, name: str, tools: Parameters, trims: bool):
        self._out = out
        self._parameters = tools.get(name, {})
        self._trims = trims
        self._separator = "{"
        out.begin_call(name)

    def read(self, key: str, reader: Reader, end: str) -> Steps[bool]:
        """Reads a value up to its end marker. Returns False where the output ends before it."""
        self._out.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        value = TypedValue(self._out.arguments, self._kinds(key), self._trims)
        if (yield from reader.until(markers(end), value.put)):
            value.end()
            return True
        value.cut()
        return False

    def _kinds(self, key: str) -> frozenset[str]:
        properties = self._parameters.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return kinds(properties[key], self._parameters)
        if "additionalProperties" in self._parameters:
            return kinds(self._parameters["additionalProperties"], self._parameters)
        return KINDS

    def end(self, is_whole: bool) -> None:
        if is_whole:
            self._out.arguments("{}" if self._separator == "{" else "}")
        self._out.end_call(is_whole)


class XmlParser(ToolParser):
    """What both syntaxes have in common."""

    def _next(self, reader: Reader, out: Collector, *inside: str) -> Steps[str | None]:
        """The next marker in a call or after it, which is taken; None at the end of the output.
        Text before it is content."""
        expected = (*inside, *self.begins, *self.ends)
        while True:
            yield from reader.blanks()
            mark = yield from reader.until(markers(*expected, *out.others(expected)), out.content)
            out.interrupt()
            if mark is None or mark in expected:
                return mark

    @abstractmethod
    def parameter(self, name: str, value: Format | None) -> Format:
        """The format of one parameter; None: a string of any text."""

    @abstractmethod
    def any_parameter(self) -> Format:
        """The format of one parameter of any name, with any text."""

    def arguments(self, parameters: Mapping[str, Any] | None) -> Format:
        if parameters is None:
            return formats.star(self.any_parameter())
        elements = []
        for name, value, is_required in plain_text.parameters(parameters):
            element = self.parameter(name, value)
            elements.append(element if is_required else formats.optional(element))
        return formats.sequence(*elements) if elements else formats.const("")

    def unenforced(self, parameters: Mapping[str, Any]) -> str | None:
        return plain_text.unenforced(parameters)


class Qwen3CoderParser(XmlParser):
    """`<tool_call>`, `<function=name>`, for each argument `<parameter=name>`, its value and
    `</parameter>`, then `</function>` and `</tool_call>`, each on a line of its own."""

    names = ("qwen3coder",)
    begins = ("<tool_call>", "<function=")
    ends = ("</tool_call>",)
    inside = ("</function>", "<parameter=", "</parameter>")

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        found: str | None = marker
        if found == "<tool_call>":
            yield from reader.blanks()
            found = yield from reader.marker(markers("<function="))
        while found == "<function=":
            found = yield from self._read_call(reader, out, tools)

    def _read_call(self, reader: Reader, out: Collector, tools: Parameters) -> Steps[str | None]:
        """Returns the marker after the call, if it took one."""
        name: list[str] = []
        after = yield from reader.run(_IN_TAG, name.append)
        if after != ">" or not name:
            out.released("".join(name))
            return None
        reader.take()
        arguments = _Arguments(out, "".join(name).strip(), tools, trims=True)
        while True:
            mark = yield from self._next(reader, out, "<parameter=", "</function>")
            if mark != "<parameter=":
                arguments.end(mark is not None)
                return mark
            key: list[str] = []
            if (yield from reader.run(_IN_TAG, key.append)) != ">":
                out.released("".join(key))
                continue
            reader.take()
            yield from arguments.read("".join(key).strip(), reader, "</parameter>")

    def parameter(self, name: str, value: Format | None) -> Format:
        if value is None:
            # The value's last newline belongs to the text, which ends at the marker.
            return formats.tag(f"<parameter={name}>\n", formats.any_text(), "</parameter>\n")
        return formats.tag(f"<parameter={name}>\n", value, "\n</parameter>\n")

    def any_parameter(self) -> Format:
        return formats.sequence(
            formats.const("<parameter="),
            formats.regex(r"[^<>\n]{1,100}"),
            formats.tag(">\n", formats.any_text(), "</parameter>\n"),
        )

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        tags = [
            formats.tag(
                f"<tool_call>\n<function={call.name}>\n",
                call.arguments,
                "</function>\n</tool_call>",
            )
            for call in calls
        ]
        return Parts(("<tool_call>",), tags, separator="\n", excludes=("<function=",))


class GlmParser(XmlParser):
    """`<tool_call>name`, for each argument `<arg_key>`, its name, `</arg_key>`, `<arg_value>`, its
    value and `</arg_value>`, then `</tool_call>`. GLM-4.5 writes newlines between them."""

    names = ("glm47",)
    begins = ("<tool_call>",)
    ends = ("</tool_call>",)
    inside = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        found: str | None = marker
        while found == marker:
            found = yield from self._read_call(reader, out, tools)

    def _read_call(self, reader: Reader, out: Collector, tools: Parameters) -> Steps[str | None]:
        """Returns the marker after the call, if it took one."""
        line: list[str] = []
        yield from reader.blanks()
        after = yield from reader.run(_LINE, line.append)
        name = "".join(line).strip()
        if not after or not _NAME.fullmatch(name):
            out.released("".join(line))
            return None
        arguments = _Arguments(out, name, tools, trims=False)
        while True:
            mark = yield from self._next(reader, out, "<arg_key>")
            if mark != "<arg_key>":
                arguments.end(mark is not None)
                return mark
            key: list[str] = []
            if not (yield from reader.until(markers("</arg_key>"), key.append)):
                continue
            yield from reader.blanks()
            if (yield from reader.marker(markers("<arg_value>"))):
                yield from arguments.read("".join(key).strip(), reader, "</arg_value>")

    def parameter(self, name: str, value: Format | None) -> Format:
        newline = formats.regex(r"\n?")
        return formats.sequence(
            formats.const(f"<arg_key>{name}</arg_key>"),
            newline,
            formats.tag("<arg_value>", value or formats.any_text(), "</arg_value>"),
            newline,
        )

    def any_parameter(self) -> Format:
        newline = formats.regex(r"\n?")
        return formats.sequence(
            formats.const("<arg_key>"),
            formats.regex(r"[^<>\n]{1,100}"),
            formats.const("</arg_key>"),
            newline,
            formats.tag("<arg_value>", formats.any_text(), "</arg_value>"),
            newline,
        )

    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        tags = [
            formats.tag(
                "<tool_call>" + call.name,
                formats.sequence(formats.regex(r"\n?"), call.arguments),
                "</tool_call>",
            )
            for call in calls
        ]
        return Parts(self.begins, tags, separator="\n")

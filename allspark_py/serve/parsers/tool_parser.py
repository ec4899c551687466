"""What the parsers of all syntaxes of tool calls have in common.

A `ToolParser` knows one syntax: how calls are read, and which formats keep the model from writing
anything else. It has no state, so one object serves all requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from allspark.serve.ids import make_id
from allspark.serve.parsers import formats
from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.formats import CallFormat, Format, Parts
from allspark.serve.parsers.reader import Reader, Steps

# The schemas of the tools' parameters, by the tools' names.
Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]


class ToolParser(ABC):
    """One syntax of tool calls.

    Attributes:
        names: what users call it. Messages use the first.
        begins: the markers that begin a part of the output with calls.
        ends: the markers that end one. They are left out elsewhere, too.
        inside: markers that mean something between these only.
    """

    names: ClassVar[tuple[str, ...]]
    begins: ClassVar[tuple[str, ...]]
    ends: ClassVar[tuple[str, ...]]
    inside: ClassVar[tuple[str, ...]] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them. Where some are special tokens, the output must be decoded with these."""
        return (*self.begins, *self.ends, *self.inside)

    def make_id(self) -> str:
        """An id that no other call has."""
        return make_id("chatcmpl-tool")

    @abstractmethod
    def read(self, marker: str, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        """Reads what follows one of `begins`. What is no call becomes content."""

    def read_first(self, reader: Reader, out: Collector, tools: Parameters) -> Steps[None]:
        """Reads calls without a marker, where nothing but reasoning has been written."""
        yield from ()

    @abstractmethod
    def parts(self, calls: Sequence[CallFormat], many: bool) -> Parts:
        """The formats of parts with these calls: any number of them, or if not `many` one."""

    def arguments(self, parameters: Mapping[str, Any] | None) -> Format:
        """The format of arguments with this schema; None: of any object."""
        return formats.schema({"type": "object"} if parameters is None else parameters)

    def unenforced(self, parameters: Mapping[str, Any]) -> str | None:
        """A keyword of the schema that this syntax cannot enforce, though JSON could."""
        return None

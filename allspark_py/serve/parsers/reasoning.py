"""The syntaxes of reasoning: what a model writes before it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningParser:
    """Reasoning between two markers.

    Attributes:
        names: what users call it. Messages use the first.
        needs_flag: there is reasoning only where the request enables it. Then the prompt is taken
            to have opened it, unless it is known.
    """

    names: tuple[str, ...]
    begin: str = "<think>"
    end: str = "</think>"
    needs_flag: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Both. Where they are special tokens, the output must be decoded with these."""
        return (self.begin, self.end)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the marker that begins reasoning."""
        return prompt.rstrip().endswith(self.begin)


REASONING_PARSERS = (
    ReasoningParser(("default", "qwen-qwq", "intern-s1", "deepseek-r1")),
    ReasoningParser(("deepseek-v3",), needs_flag=True),
)


def in_force(
    parser: ReasoningParser | None, enable_thinking: bool | None, begins_inside: bool | None
) -> tuple[ReasoningParser | None, bool]:
    """The parser for an output, None where there is no reasoning; and whether the output begins
    within the reasoning."""
    if parser is None or (parser.needs_flag and not enable_thinking):
        return None, False
    return parser, parser.needs_flag if begins_inside is None else begins_inside

"""The `format` of a structural tag: a tree of texts, schemas and tags, turned into a Lark grammar.

The kinds of nodes and their fields are those of XGrammar's structural tags, of which this takes
those below. Pure functions, as in response_format.py; docs/guided_decoding.md lists the kinds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Turns a schema into text for the compiler; the second argument names its place for messages.
SchemaText = Callable[[Any, str], str]
# Turns a response format into a Lark grammar.
FormatText = Callable[[Any], str]
ANY = r"/(?s:.*)/"


def quoted(*texts: str) -> str:
    """A literal of the Lark syntax, or several as alternatives."""
    # One call quotes all: a call per text takes longer, which other threads of Python wait for.
    written = json.dumps(texts, ensure_ascii=False, separators=(" | ", ": "))[1:-1]
    return written.replace("\x7f", r"\u007f")  # which the compiler takes for no character


def pieces(text: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Text, cut before and after each special token in it."""
    names = sorted(special_tokens, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return [part for part in parts if part]


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Text as a sequence of Lark literals and special tokens."""
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else quoted(piece)
        for piece in pieces(text, special_tokens)
    )


def to_lark(
    node: Any,
    special_tokens: Mapping[str, int],
    schema_text: SchemaText,
    format_text: FormatText,
) -> str:
    """The grammar of a format.

    Raises:
        ValueError: an unknown kind or field, or one that is not there; it says where.
    """
    writer = _Writer(special_tokens, schema_text, format_text)
    start = writer.written(node, "format")
    return "\n".join([f"start: {start}", *writer.rules])


class _Writer:
    """Writes each node as an expression, and what needs a name of its own as a rule before it."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        schema_text: SchemaText,
        format_text: FormatText,
    ):
        self.rules: list[str] = []
        self._special_tokens = special_tokens
        self._schema_text = schema_text
        self._format_text = format_text
        self._texts: dict[tuple[str, ...], str] = {}
        self._num_names = 0

    def written(self, node: Any, place: str) -> str:
        """The node as an expression that can stand anywhere in a rule."""
        self._check(node, place)
        return _KINDS[node["type"]][2](self, node, place)

    def _check(self, node: Any, place: str) -> None:
        """Raises ValueError unless the node has a known type, and the fields of that type."""
        if not isinstance(node, Mapping) or node.get("type") not in list(_KINDS):
            kind = node.get("type") if isinstance(node, Mapping) else node
            known = ", ".join(map(repr, _KINDS))
            raise ValueError(
                f"response_format's {place!r} has the type {kind!r}; it must be one of {known}"
            )
        required, optional, _ = _KINDS[node["type"]]
        for field in node:
            if field != "type" and field not in (*required, *optional):
                raise ValueError(f"response_format's {place!r} has the unknown field {field!r}")
        for field in required:
            if field not in node:
                raise ValueError(f"response_format's {place!r} lacks {field!r}")

    # Fields.

    def _text(self, node: Mapping[str, Any], field: str, place: str) -> str:
        if not isinstance(node[field], str):
            raise ValueError(f"response_format's {place}.{field} must be a str")
        return str(node[field])

    def _texts_of(self, node: Mapping[str, Any], field: str, place: str) -> tuple[str, ...]:
        value = node.get(field, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(t, str) and t for t in value):
            raise ValueError(f"response_format's {place}.{field} must be a list of texts")
        return tuple(value)

    def _flag(self, node: Mapping[str, Any], field: str, place: str) -> bool:
        value = node.get(field, False)
        if not isinstance(value, bool):
            raise ValueError(f"response_format's {place}.{field} must be true or false")
        return value

    def _all(self, node: Mapping[str, Any], field: str, place: str) -> list[str]:
        """The written elements of a field, at least one."""
        elements = node[field]
        if not isinstance(elements, (list, tuple)) or not elements:
            raise ValueError(f"response_format's {place}.{field} must be a list, not empty")
        return [self.written(e, f"{place}.{field}[{i}]") for i, e in enumerate(elements)]

    # Rules.

    def _name(self, stem: str) -> str:
        self._num_names += 1
        return f"{stem}_{self._num_names}"

    def _rule(self, body: str, options: str = "") -> str:
        name = self._name("rule")
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _free(self, excludes: Sequence[str], begins_without: Sequence[str] = ()) -> str:
        """The name of a terminal: text that contains none of `excludes`, and begins with none of
        `begins_without`, blanks left out."""
        excludes = tuple(dict.fromkeys(excludes))
        key = (*excludes, "\0", *begins_without)
        if key not in self._texts:
            body = ANY
            if excludes:
                some = "|".join(map(_escaped, excludes))
                body += f" & ~/(?s:.*)({some})(?s:.*)/"
            if begins_without:
                some = "|".join(map(_escaped, begins_without))
                body += rf" & ~/\s*({some})(?s:.*)/"
            self._texts[key] = self._name("TEXT")
            self.rules.append(f"{self._texts[key]}: {body}")
        return self._texts[key]

    def _up_to(self, excludes: Sequence[str], end: str, begins_without: Sequence[str] = ()) -> str:
        """Free text, and the first `end` in it."""
        parts = pieces(end, self._special_tokens)
        plain = parts[0] not in self._special_tokens
        if plain and len(parts) == 1:
            # Lazy: the text ends where `end` first occurs, so it cannot skip it.
            free = self._free(excludes, begins_without)
            return self._rule(f"{free} {quoted(end)}", "[lazy]")
        free = self._free((*excludes, end), begins_without)
        if plain:
            # The special token ends the text; what stands before it must be there by then.
            name = self._name("TEXT")
            self.rules.append(f"{name}: {free} {quoted(parts[0])}")
            return f"{name} {literal(''.join(parts[1:]), self._special_tokens)}"
        return f"{free} {literal(end, self._special_tokens)}"

    # Nodes.

    def const_string(self, node: Mapping[str, Any], place: str) -> str:
        return literal(self._text(node, "value", place), self._special_tokens) or '""'

    def json_schema(self, node: Mapping[str, Any], place: str) -> str:
        return "%json " + self._schema_text(node["json_schema"], f"{place}.json_schema")

    def response_format(self, node: Mapping[str, Any], place: str) -> str:
        lark = self._format_text(node["response_format"])
        return self._rule(f"%lark {{\n{lark}\n}}")

    def regex(self, node: Mapping[str, Any], place: str) -> str:
        pattern = self._text(node, "pattern", place)
        name = self._name("REGEX")
        self.rules.append(f"{name}: /{_without_slashes(pattern)}/")
        return name

    def any_text(self, node: Mapping[str, Any], place: str) -> str:
        return self._free(self._texts_of(node, "excludes", place))

    def sequence(self, node: Mapping[str, Any], place: str) -> str:
        return "(" + " ".join(self._all(node, "elements", place)) + ")"

    def either(self, node: Mapping[str, Any], place: str) -> str:
        return "(" + " | ".join(self._all(node, "elements", place)) + ")"

    def optional(self, node: Mapping[str, Any], place: str) -> str:
        return f"({self.written(node['content'], f'{place}.content')})?"

    def star(self, node: Mapping[str, Any], place: str) -> str:
        return f"({self.written(node['content'], f'{place}.content')})*"

    def plus(self, node: Mapping[str, Any], place: str) -> str:
        return f"({self.written(node['content'], f'{place}.content')})+"

    def tag(self, node: Mapping[str, Any], place: str) -> str:
        begin = self._text(node, "begin", place)
        return self._rule(" ".join(self._tag_parts(node, place, begin)))

    def _tag_parts(self, node: Mapping[str, Any], place: str, begin: str) -> list[str]:
        """The tag, of whose beginning only `begin` is left."""
        content, end = node["content"], self._text(node, "end", place)
        parts = [literal(begin, self._special_tokens)]
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            self._check(content, f"{place}.content")
            excludes = self._texts_of(content, "excludes", f"{place}.content")
            parts.append(self._up_to(excludes, end))
        else:
            parts.append(self.written(content, f"{place}.content"))
            parts.append(literal(end, self._special_tokens))
        return [part for part in parts if part]

    def _tags(self, node: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
        """The tags of a node, each checked to be one."""
        tags = node["tags"]
        if not isinstance(tags, (list, tuple)) or not tags:
            raise ValueError(f"response_format's {place}.tags must be a list, not empty")
        for index, tag in enumerate(tags):
            if not isinstance(tag, Mapping) or tag.get("type") != "tag":
                raise ValueError(
                    f"response_format's {place}.tags[{index}] must have the type 'tag'"
                )
        return list(tags)

    def tags_with_separator(self, node: Mapping[str, Any], place: str) -> str:
        tags = self._tags(node, place)
        tag = self._rule(
            " | ".join(self.written(t, f"{place}.tags[{i}]") for i, t in enumerate(tags))
        )
        separator = literal(self._text(node, "separator", place), self._special_tokens)
        if self._flag(node, "stop_after_first", place):
            body = tag
        else:
            body = f"{tag} ({separator} {tag})*"
        return f"({body})" if self._flag(node, "at_least_one", place) else f"({body})?"

    def triggered_tags(self, node: Mapping[str, Any], place: str) -> str:
        triggers = self._texts_of(node, "triggers", place)
        excludes = self._texts_of(node, "excludes", place)
        begins_without = self._texts_of(node, "begins_without", place)
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(self._tags(node, place)):
            at = f"{place}.tags[{index}]"
            self._check(tag, at)
            begin = self._text(tag, "begin", at)
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise ValueError(
                    f"response_format's {at} begins with {begin!r}, which no trigger begins"
                )
            bodies[trigger].append(" ".join(self._tag_parts(tag, at, begin[len(trigger) :])))
        if not bodies or not all(bodies.values()):
            raise ValueError(f"response_format's {place}: triggers and tags must have one another")
        after = {trigger: self._rule(" | ".join(body)) for trigger, body in bodies.items()}
        # A special token ends the text before it; its name, spelled with others, is not written.
        special = [trigger for trigger in triggers if trigger in self._special_tokens]
        excludes = (*excludes, *special)

        def tagged(begins_without: Sequence[str] = ()) -> str:
            return self._rule(
                " | ".join(
                    f"{self._up_to(excludes, trigger, begins_without)} {after[trigger]}"
                    for trigger in triggers
                )
            )

        if self._flag(node, "at_least_one", place):
            first = self._rule(
                " | ".join(
                    f"{literal(trigger, self._special_tokens)} {after[trigger]}"
                    for trigger in triggers
                )
            )
            if self._flag(node, "stop_after_first", place):
                return first
            return f"({first} {tagged()}* {self._free(excludes)})"
        without = self._free(excludes, begins_without)
        if self._flag(node, "stop_after_first", place):
            return f"({tagged(begins_without)} | {without})"
        if begins_without:
            rest = f"{tagged()}* {self._free(excludes)}"
            return f"({tagged(begins_without)} {rest} | {without})"
        return f"({tagged()}* {without})"


def _escaped(text: str) -> str:
    """An expression for a text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _without_slashes(pattern: str) -> str:
    """An expression in which each slash is escaped, as one would end it."""
    return re.sub(
        r"\\.|/|\n",
        lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]),
        pattern,
        flags=re.DOTALL,
    )


_Write = Callable[[_Writer, Mapping[str, Any], str], str]
# Type -> (the fields that it must have, those that it may have, the function that writes it).
_KINDS: dict[Any, tuple[tuple[str, ...], tuple[str, ...], _Write]] = {
    "const_string": (("value",), (), _Writer.const_string),
    "json_schema": (("json_schema",), (), _Writer.json_schema),
    "response_format": (("response_format",), (), _Writer.response_format),
    "regex": (("pattern",), (), _Writer.regex),
    "any_text": ((), ("excludes",), _Writer.any_text),
    "sequence": (("elements",), (), _Writer.sequence),
    "or": (("elements",), (), _Writer.either),
    "optional": (("content",), (), _Writer.optional),
    "star": (("content",), (), _Writer.star),
    "plus": (("content",), (), _Writer.plus),
    "tag": (("begin", "content", "end"), (), _Writer.tag),
    "triggered_tags": (
        ("triggers", "tags"),
        ("at_least_one", "stop_after_first", "excludes", "begins_without"),
        _Writer.triggered_tags,
    ),
    "tags_with_separator": (
        ("tags", "separator"),
        ("at_least_one", "stop_after_first"),
        _Writer.tags_with_separator,
    ),
}

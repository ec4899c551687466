"""The forms of `response_format`, each turned into a grammar that the compiler accepts.

Pure functions: nothing is compiled here. docs/guided_decoding.md lists the forms.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import llguidance
from allspark import json_schema, structural_format
from allspark.error_text import wrong_type
from allspark.structural_format import literal, quoted
from llguidance.gbnf_to_lark import is_lark_syntax

# A keyword that the compiler cannot enforce is an error, whatever options the schema contains.
_STRICT = {"lenient": False, "coerce_one_of": False}
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Allowed between the parts of a JSON text. Without a bound, small models emit blanks forever.
_WHITESPACE = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}

# The characters that may follow a backslash in a text, without an option of the schema.
_ESCAPES = 'nrbtf\\"u'

# Special tokens, by their text.
SpecialTokens = Mapping[str, int]


@dataclass
class _Conversion:
    """The inputs of a conversion, and what was found during it."""

    special_tokens: SpecialTokens
    one_of_is_any_of: bool = False
    undecided: list[str] = field(default_factory=list)  # as Grammar.undecided


# Turns a response format's fields into a grammar; None for plain text.
_Convert: TypeAlias = Callable[[Mapping[str, Any], _Conversion], str | None]


@dataclass(frozen=True)
class Grammar:
    """A response format for the compiler."""

    text: str
    undecided: tuple[str, ...] = ()  # places of `oneOf` whose branches may overlap
    one_of_is_any_of: bool = False

    def explain(self, problem: str) -> str:
        """The compiler's message, in terms of a response format."""
        problem = _of_schema(problem)
        if "oneOf constraints" not in problem:
            return explain(problem)
        places = ", ".join(self.undecided)
        if not places:
            return "the branches of a oneOf may overlap; write anyOf"
        if self.one_of_is_any_of:
            return f"the oneOf at {places} stays one, since a $ref leads through a oneOf"
        return (
            f"the branches of the oneOf at {places} may overlap; they must differ in their types, "
            "or in the const, enum or type of a required property. 'oneOf': 'anyOf' in the "
            "response_format takes each oneOf as anyOf: outputs may match several branches"
        )


def _of_schema(problem: str) -> str:
    """Of a message about a schema within a grammar, what is about the schema: the place and the
    text of the grammar are none that a user wrote."""
    found = re.match(r"at \d+\(\d+\): failed to compile JSON schema: ", problem)
    return re.split(r"\n *\d+ \| ", problem[found.end() :])[0] if found else problem


def explain(problem: str) -> str:
    """The compiler's message without what only its authors can use."""
    text = re.split(r"\n<(?:backtrace|non-verbose)", problem)[0]
    if "too many expressions" in text or "too many states" in text:
        text += " (an expression or the bound of a length is too complex; use shorter repetitions)"
    return text


def to_grammar(response_format: Any, special_tokens: SpecialTokens) -> Grammar | None:
    """The grammar of a response format; None for plain text.

    Raises:
        ValueError: an unknown type or key, or a bad value. TypeError: a value of the wrong type.
    """
    if response_format is None:
        return None
    conversion = _Conversion(special_tokens)
    text = _converted(response_format, conversion)
    if text is None:
        return None
    return Grammar(text, tuple(conversion.undecided), conversion.one_of_is_any_of)


def _converted(response_format: Any, conversion: _Conversion) -> str | None:
    if not isinstance(response_format, Mapping):
        raise wrong_type("response_format", response_format, "a dict with the key 'type'")
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in _FORMS:
        known = ", ".join(map(repr, _FORMS))
        raise ValueError(f"response_format has the type {kind!r}; it must be one of {known}")
    keys, convert = _FORMS[kind]
    for key in response_format:
        if key != "type" and key not in keys:
            allowed = ", ".join(map(repr, ("type", *keys)))
            raise ValueError(
                f"response_format of type {kind!r} has the key {key!r}; its keys are {allowed}"
            )
    if _is_any_of(response_format):
        conversion.one_of_is_any_of = True
    return convert(response_format, conversion)


def _as_lark(response_format: Any, conversion: _Conversion) -> str:
    """A response format within another one, in Lark's syntax."""
    text = _converted(response_format, conversion)
    if text is None:
        return f"start: TEXT\nTEXT: {structural_format.ANY}"
    if not text.lstrip().startswith("{"):
        return text
    (grammar,) = json.loads(text)["grammars"]
    if grammar.get("lark_grammar") is not None:
        return str(grammar["lark_grammar"])
    return f"start: %json {json.dumps(grammar['json_schema'], separators=(',', ':'))}"


def _is_any_of(fields: Mapping[str, Any]) -> bool:
    if "oneOf" not in fields:
        return False
    if fields["oneOf"] != "anyOf":
        raise ValueError(f"response_format's 'oneOf' is {fields['oneOf']!r}; it must be 'anyOf'")
    return True


def _field(fields: Mapping[str, Any], key: str, kind: type | tuple[type, ...], text: str) -> Any:
    """fields[key], which must have that type; `text` names the type in messages."""
    if key not in fields:
        raise ValueError(f"response_format lacks {key!r}")
    if not isinstance(fields[key], kind):
        raise wrong_type(f"response_format's {key!r}", fields[key], text)
    return fields[key]


def _strict(schema: Any, conversion: _Conversion, key: str = "json_schema") -> str:
    """A schema, or the text of one, as text with which the compiler ignores nothing."""
    name = f"response_format's {key!r}"
    if isinstance(schema, str):
        schema = json_schema.read(schema, name)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise wrong_type(name, schema, "a schema: a dict or its text")
    json_schema.check_depth(schema, name)
    try:
        # As the compiler will see it: keys are strings, tuples are lists.
        schema = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no JSON value: {error}") from error
    options = schema.pop("x-guidance", {})
    if not isinstance(options, Mapping):
        raise wrong_type(f"{name}: 'x-guidance'", options, "a dict")
    blanks = _WHITESPACE if options.get("whitespace_flexible", True) else {}
    try:
        prepared = json_schema.prepare(schema, conversion.one_of_is_any_of)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    conversion.undecided += [key + place for place in prepared.undecided]
    escapes = options.get("json_allowed_escapes") or _ESCAPES
    if prepared.is_open and isinstance(escapes, str):
        options = {**options, "json_allowed_escapes": escapes.replace("u", "")}
    options = {**blanks, **options, **_STRICT}
    return json.dumps({**prepared.schema, "x-guidance": options}, separators=(",", ":"))


def _json_object(fields: Mapping[str, Any], conversion: _Conversion) -> str:
    return _json_grammar(fields.get("json_schema", {"type": "object"}), conversion)


def _json_schema(fields: Mapping[str, Any], conversion: _Conversion) -> str:
    schema = _field(fields, "json_schema", (Mapping, str, bool), "a schema: a dict or its text")
    # {"name": ..., "schema": {...}}; 'schema' is not a keyword of JSON Schema.
    if isinstance(schema, Mapping) and "schema" in schema:
        schema = schema["schema"]
    return _json_grammar(schema, conversion)


def _json_grammar(schema: Any, conversion: _Conversion) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(_strict(schema, conversion))


def _regex(key: str) -> _Convert:
    def convert(fields: Mapping[str, Any], _: _Conversion) -> str:
        return llguidance.LLMatcher.grammar_from_regex(_field(fields, key, str, "a str"))

    return convert


def _choice(fields: Mapping[str, Any], _: _Conversion) -> str:
    choices = _field(fields, "choice", (list, tuple), "a list of str")
    if not choices:
        raise ValueError("response_format's 'choice' is empty; it must have at least 1 str")
    for choice in choices:
        if not isinstance(choice, str):
            raise wrong_type("an element of response_format's 'choice'", choice, "a str")
    # As a terminal: its compilation is linear in their lengths, that of a rule is quadratic.
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {quoted(*choices)}")


def _grammar(fields: Mapping[str, Any], _: _Conversion) -> str:
    text = _field(fields, "grammar", str, "a str")
    # A schema in a grammar has the bound of others.
    for number in _NEGATIVE.findall(text) if "%json" in text else ():
        if float(number) <= json_schema.NUMBER_BOUND:
            raise ValueError(
                f"response_format's 'grammar' has {number:.40} beside %json; numbers must be "
                f"above {json_schema.NUMBER_BOUND}"
            )
    # Lark syntax, or llama.cpp's EBNF, recognised by its '::='.
    if "::=" in text and not is_lark_syntax(text):
        text = _EBNF_PARTS.sub(_plain, text)
    return llguidance.grammar_from("grammar", text)


# Comments, literals and classes of llama.cpp's EBNF, and escapes in the latter two.
_EBNF_PARTS = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
_EBNF_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _plain(part: re.Match[str]) -> str:
    """A part of EBNF without the escapes that llguidance converts to none of Lark's."""

    def character(escape: re.Match[str]) -> str:
        digits = escape[1] or escape[2]
        if digits:
            code = int(digits, 16)
            if code < 0x80:
                return f"\\x{code:02x}"
            is_character = code < 0xD800 or 0xE000 <= code <= sys.maxunicode
            return chr(code) if is_character else escape[0]
        is_bracket = part[0][0] == '"' and escape[0] in (r"\[", r"\]")
        return escape[0][1:] if is_bracket else escape[0]

    return part[0] if part[0][0] == "#" else _EBNF_ESCAPES.sub(character, part[0])


def _structural_tag(fields: Mapping[str, Any], conversion: _Conversion) -> str:
    """Free text in which each trigger must begin one of the structures that start with it; or a
    tree of texts, schemas and tags."""
    if "format" in fields:
        return _format(fields, conversion)
    special_tokens = conversion.special_tokens
    triggers = _field(fields, "triggers", (list, tuple), "a list of str")
    structures = _field(fields, "structures", (list, tuple), "a list of dicts")
    bodies: dict[str, list[str]] = {}
    for trigger in triggers:
        if not isinstance(trigger, str) or not trigger:
            raise ValueError(f"response_format's 'triggers' has {trigger!r}; each is a text")
        bodies[trigger] = []
    for index, structure in enumerate(structures):
        name = f"structures[{index}]"
        if not isinstance(structure, Mapping) or set(structure) != {"begin", "schema", "end"}:
            raise ValueError(f"response_format's {name!r} must have 'begin', 'schema' and 'end'")
        begin = _field(structure, "begin", str, "a str")
        trigger = next((text for text in bodies if begin.startswith(text)), None)
        if trigger is None:
            raise ValueError(
                f"response_format's {name!r} begins with {begin!r}, which no trigger begins"
            )
        body = (
            literal(begin[len(trigger):], special_tokens),
            f"%json {_strict(structure['schema'], conversion, f'{name}.schema')}",
            literal(_field(structure, "end", str, "a str"), special_tokens),
        )
        bodies[trigger].append(" ".join(part for part in body if part))
    if not bodies or not all(bodies.values()):
        raise ValueError("response_format's 'triggers' and 'structures' must have one another")
    return llguidance.LLMatcher.grammar_from_lark(_tag_grammar(bodies, special_tokens))


def _format(fields: Mapping[str, Any], conversion: _Conversion) -> str:
    for key in ("triggers", "structures"):
        if key in fields:
            raise ValueError(f"response_format has both 'format' and {key!r}; it must have one")
    lark = structural_format.to_lark(
        fields["format"],
        conversion.special_tokens,
        lambda schema, place: _strict(schema, conversion, place),
        lambda response_format: _as_lark(response_format, conversion),
    )
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _tag_grammar(bodies: Mapping[str, list[str]], special_tokens: SpecialTokens) -> str:
    rules = ["TEXT: /(.|\\n)*/", "rest: TEXT"]
    for index, (trigger, alternatives) in enumerate(bodies.items()):
        if trigger in special_tokens:
            rules.append(f"trigger_{index}: TEXT <[{special_tokens[trigger]}]>")
        else:
            # Lazy: the text ends where the trigger first occurs, so it cannot skip the trigger.
            rules.append(f"trigger_{index}[lazy]: TEXT {quoted(trigger)}")
        rules.append(f"tag_{index}: trigger_{index} ({' | '.join(alternatives)})")
    tags = " | ".join(f"tag_{index}" for index in range(len(bodies)))
    return "\n".join([f"start: ({tags})* rest", *rules])


# Type -> (its keys, the function that makes a grammar).
_FORMS: dict[Any, tuple[tuple[str, ...], _Convert]] = {
    "text": ((), lambda fields, conversion: None),
    "json_object": (("json_schema", "oneOf"), _json_object),
    "json_schema": (("json_schema", "oneOf"), _json_schema),
    "regex_schema": (("regex_schema",), _regex("regex_schema")),
    "regex": (("regex",), _regex("regex")),
    "choice": (("choice",), _choice),
    "grammar": (("grammar",), _grammar),
    "structural_tag": (("triggers", "structures", "format", "oneOf"), _structural_tag),
}

"""What of a tool's schema is kept where each argument is written as plain text, not as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from allspark.json_formats import ENFORCED
from allspark.serve.parsers import formats
from allspark.serve.parsers.formats import Format
from allspark.serve.parsers.typed_values import KINDS, kinds, pointed_to, types

# Keywords of JSON Schema that make values invalid. Others are annotations.
_OF_ANY = frozenset(
    {"type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref",
     "$dynamicRef"}
)  # fmt: skip
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames",
     "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
     "unevaluatedProperties"}
)  # fmt: skip
_OF_STRINGS = frozenset(
    {"pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType"}
)
_OF_OTHERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items",
     "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems",
     "maxItems", "uniqueItems", "unevaluatedItems"}
)  # fmt: skip
_KEYWORDS = _OF_ANY | _OF_OBJECTS | _OF_STRINGS | _OF_OTHERS
_MAX_REFERENCES = 16


def parameters(schema: Mapping[str, Any]) -> Iterator[tuple[str, Format | None, bool]]:
    """Each parameter's name, the format of its value (None: any text), and whether it must be
    there."""
    properties, required = _properties(schema), _required(schema)
    for name in dict.fromkeys((*properties, *required)):
        yield name, _value(properties.get(name, {}), schema), name in required


def unenforced(schema: Mapping[str, Any]) -> str | None:
    """The first thing in a tool's schema that the formats of its parameters do not keep."""
    for keyword in schema:
        if keyword in _KEYWORDS - {"type", "properties", "required", "additionalProperties"}:
            return f"the keyword {keyword!r}"
    for name, part in _properties(schema).items():
        if not name or name != name.strip() or any(char in name for char in "<>\n"):
            return f"the name of the property {name!r}"
        keyword_of_value = _unenforced(_resolved(part, schema), schema)
        if keyword_of_value:
            return f"the keyword {keyword_of_value!r} of the property {name!r}"
    return None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [name for name in names if isinstance(name, str)]


def _resolved(part: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a schema of one reference stands for."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(part, Mapping) or _asserted(part) != {"$ref"}:
            break
        reference = part["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target = pointed_to(reference, root)
        if target is None:
            break
        part = target
    return part


def _asserted(part: Mapping[str, Any]) -> set[str]:
    return {keyword for keyword in part if keyword in _KEYWORDS}


def _texts(part: Any) -> list[str] | None:
    """The only strings that a schema allows; None for any."""
    if not isinstance(part, Mapping):
        return None
    values = [part["const"]] if "const" in part else part.get("enum")
    return [value for value in values if isinstance(value, str)] if values else None


def _value(part: Any, root: Mapping[str, Any]) -> Format | None:
    part = _resolved(part, root)
    allowed = kinds(part, root)
    if "string" not in allowed:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return formats.schema({**definitions, **part})
    texts = _texts(part) if allowed == {"string"} else None
    return formats.one_of(*map(formats.const, texts)) if texts else None


def _unenforced(part: Any, root: Mapping[str, Any]) -> str | None:
    """The keyword of a value's schema that its format does not keep."""
    allowed = kinds(part, root)
    if "string" not in allowed:
        return None  # it is JSON
    if allowed == {"string"}:
        keywords = _asserted(part) - {"type", "enum", "const"}
        if "format" in keywords and part["format"] not in list(ENFORCED):
            keywords.remove("format")  # an annotation
        return min(keywords, default=None)
    return _unenforced_union(part)


def _unenforced_union(part: Any) -> str | None:
    """Of a schema of strings and others: any text is valid for it, unless it has other keywords."""
    if not isinstance(part, Mapping):
        return None
    for keyword in sorted(_asserted(part)):
        if keyword == "type":
            named = types(part)
            if any(kind not in KINDS and kind != "integer" for kind in named):
                return keyword  # there is none of this name
            if "integer" in named and "number" not in named:
                return keyword  # 0.5 would be read as a number
        elif keyword == "anyOf" and isinstance(part["anyOf"], list):
            problems = [_unenforced_union(branch) for branch in part["anyOf"]]
            found = next((problem for problem in problems if problem), None)
            if found:
                return found
        else:
            return keyword
    return None

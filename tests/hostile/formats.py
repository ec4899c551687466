"""Response formats of somebody else: compiled, and walked for some tokens."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from allspark.grammar_compiler import Compiler
from allspark.model_loader.tokenizer import load_tokenizer
from support.vocabularies import tokenizer_directory
from values import NUMBERS, TEXTS, expression, hostile

_compilers: list[Compiler] = []


def prepare(_: Path) -> None:
    names = ["byte_level"]
    try:
        tokenizer_directory("qwen2.5")
        names.append("qwen2.5")  # a vocabulary of real size
    except BaseException:  # pytest.skip's, where there is no shared data
        pass
    for name in names:
        compiler = Compiler(load_tokenizer(tokenizer_directory(name)))
        compiler.matcher({"type": "regex", "regex": "a"})
        _compilers.append(compiler)


def _walk(rng: Random, response_format: Any) -> str:
    compiler = rng.choice(_compilers)
    try:
        matcher = compiler.matcher(response_format)
    except (ValueError, TypeError) as error:
        assert str(error)
        return "refused"
    if matcher is None:
        return "taken"
    row = np.empty((1, compiler.mask_words), np.uint32)
    for _ in range(12):
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            return "ended"
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(rng.choice(allowed)))
    return "taken"


# -- schemas -----------------------------------------------------------------------------------

_LENGTHS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
_BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
_FORMATS = ["date", "time", "date-time", "uuid", "email", "hostname", "ipv6", "uri", "regex", "x"]
_TYPES = ["string", "integer", "number", "boolean", "null", "array", "object", "x"]


def _text(rng: Random) -> str:
    return rng.choice(TEXTS[:20])


def _leaf(rng: Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return {"type": "string", rng.choice(_LENGTHS[:2]): rng.choice(NUMBERS)}
    if kind == 1:
        return {"type": "string", "pattern": expression(rng)}
    if kind == 2:
        return {"type": rng.choice(["integer", "number"]), rng.choice(_BOUNDS): rng.choice(NUMBERS)}
    if kind == 3:
        values = [f"v{i * 7919}" for i in range(rng.choice([0, 1, 50, 5000]))]
        return {"enum": [*values, hostile(rng)]}
    if kind == 4:
        return {"const": hostile(rng)}
    if kind == 5:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    return rng.choice([True, False, {}, {"type": [rng.choice(_TYPES), rng.choice(_TYPES)]}])


def _schema(rng: Random, depth: int) -> Any:
    if depth == 0:
        return _leaf(rng)
    kind = rng.randrange(8)
    if kind == 0:
        return _leaf(rng)
    if kind == 1:
        count = rng.choice([0, 1, 3, 30, 300]) if depth < 3 else rng.choice([0, 1, 3])
        fields = {f"{_text(rng)[:9]}{i}": _schema(rng, depth - 1) for i in range(count)}
        return {
            "type": "object", "properties": fields, "required": [*fields][: rng.randrange(9)],
            "additionalProperties": rng.choice([False, True, {"type": "string"}]),
        }  # fmt: skip
    if kind == 2:
        count = rng.choice([1, 2, 40, 100, 300])
        patterns = {f"^{expression(rng, 1)}{i:03}": {"type": "integer"} for i in range(count)}
        return {"type": "object", "patternProperties": patterns}
    if kind == 3:
        return {"type": "array", "items": _schema(rng, depth - 1),
                rng.choice(_LENGTHS[2:4]): rng.choice(NUMBERS)}  # fmt: skip
    if kind == 4:
        return {"type": "array", "prefixItems": [_schema(rng, depth - 1) for _ in range(3)],
                "uniqueItems": rng.choice([True, False])}  # fmt: skip
    if kind == 5:
        name = rng.choice(["allOf", "anyOf", "oneOf", "not", "if"])
        parts = [_schema(rng, depth - 1) for _ in range(rng.choice([0, 1, 2, 6, 14]))]
        return {name: parts if name.endswith("Of") else _schema(rng, depth - 1)}
    if kind == 6:
        target = rng.choice(["#", "#/$defs/0", "#/$defs/1", "#/$defs/9", "#/x", "http://a/b", ""])
        return {"$ref": target}
    return {rng.choice([*_LENGTHS, *_BOUNDS, "type", "items", "$ref", "enum"]): hostile(rng)}


def _chain(rng: Random, length: int) -> dict[str, Any]:
    wrap = rng.choice([
        lambda ref: ref,
        lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
        lambda ref: {"anyOf": [ref, ref]},
        lambda ref: {"allOf": [ref, {}]},
        lambda ref: {"type": "array", "items": ref, "minItems": 1},
    ])  # fmt: skip
    chain = {str(i): wrap({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    end = rng.choice([{"type": "string"}, {"$ref": "#"}, {"$ref": "#/$defs/0"}])
    return {"$ref": "#/$defs/0", "$defs": {**chain, str(length): end}}


def schemas(rng: Random, _: Path) -> str:
    if rng.random() < 0.15:
        schema: Any = _chain(rng, rng.choice([1, 10, 90, 1000, 5000, 25_000]))
    else:
        schema = _schema(rng, rng.choice([1, 2, 3, 4]))
        if isinstance(schema, dict) and rng.random() < 0.3:
            schema["$defs"] = {str(i): _schema(rng, 2) for i in range(3)}
    form = {"type": "json_schema", "json_schema": schema}
    if rng.random() < 0.3:
        form["oneOf"] = "anyOf"
    if rng.random() < 0.2:
        form["json_schema"] = json.dumps(schema)
    return _walk(rng, form)


# -- grammars ----------------------------------------------------------------------------------

def _lark_part(rng: Random, count: int) -> str:
    kind = rng.randrange(8)
    if kind < 3:
        return f"r{rng.randrange(count)}"
    if kind == 3:
        return json.dumps(_text(rng)[:20], ensure_ascii=False)
    if kind == 4:
        return f"/{expression(rng, 2)}/"
    if kind == 5:
        times = rng.choice(["*", "+", "?", "{3}", "{2,900}", "{0,99999}"])
        return f"({_lark_part(rng, count)}){times}"
    if kind == 6:
        return rng.choice(["<[5]>", "<[999999]>", "<|x|>", "%json {}", "nothing", "T", "[", "~"])
    return f"({_lark_part(rng, count)} | {_lark_part(rng, count)})"


def _lark(rng: Random) -> str:
    count = rng.choice([1, 2, 5, 40, 400])
    lines = ["start: r0"]
    for i in range(count):
        choices = [
            " ".join(_lark_part(rng, count) for _ in range(rng.choice([0, 1, 2, 4])))
            for _ in range(rng.choice([1, 1, 2, 5]))
        ]
        lines.append(f"r{i}: " + " | ".join(choices))
    lines.append(rng.choice(["", "T: /a+/", "T: T T", "%ignore /./", "%import common.INT", "x"]))
    return "\n".join(lines)


def _ebnf(rng: Random) -> str:
    count = rng.choice([1, 3, 30])
    parts = ['"a"', "[a-z]", "[^\\n]", "(r1 r0)*", "r0?", "r1", "r9", "[0-9]{2,4000}", "("]
    lines = [f"root ::= r0 {rng.choice(parts)}"]
    lines += [f"r{i} ::= " + " ".join(rng.choice(parts) for _ in range(3)) for i in range(count)]
    return "\n".join(lines)


def grammars(rng: Random, _: Path) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        text = _ebnf(rng)
    elif kind == 1:
        count = rng.choice([10, 300, 2700, 40_000])
        twice = rng.random() < 0.5
        rules = [f"a{i}: a{i + 1}" + (f" a{i + 1}" if twice else "") for i in range(count)]
        text = "\n".join(["start: a0", *rules, f'a{count}: "x"'])
    elif kind == 2:
        body = rng.choice(['s s | "a" |', 's s s | "a" | "b"', "s | s", '"(" s ")" | s s |'])
        text = f"start: s\ns: {body}"
    else:
        text = _lark(rng)
    return _walk(rng, {"type": "grammar", "grammar": text})


def expressions(rng: Random, _: Path) -> str:
    key = rng.choice(["regex", "regex_schema"])
    text = expression(rng, rng.choice([2, 3, 4, 5]))
    return _walk(rng, {"type": key, key: rng.choice(["", "q0", "(?s)"]) + text})


def choices(rng: Random, _: Path) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        count = rng.choice([1, 10, 1000, 20_000, 60_000])
        return _walk(rng, {"type": "choice", "choice": [f"c {i * 7919}" for i in range(count)]})
    if kind == 1:
        values = [rng.choice([_text(rng), hostile(rng)]) for _ in range(rng.randrange(5))]
        return _walk(rng, {"type": "choice", "choice": values})
    count = rng.choice([0, 1, 3, 50])
    triggers = [f"<{_text(rng)[:5]}{i}" for i in range(count)]
    structures = [
        {
            "begin": trigger + rng.choice(["", ">", "\n"]),
            "schema": _schema(rng, 1),
            "end": _text(rng),
        }
        for trigger in triggers
    ]
    tag: dict[str, Any] = {
        "type": "structural_tag", "triggers": triggers, "structures": structures
    }  # fmt: skip
    if rng.random() < 0.2:
        tag[rng.choice([*tag])] = hostile(rng)
    return _walk(rng, tag)

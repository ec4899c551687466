"""What happens to a JSON schema before it is compiled: rewriting, formats, proofs about `oneOf`."""

from __future__ import annotations

import calendar
import copy
import inspect
import json
import random
import re
import sys
from decimal import Decimal
from itertools import product
from typing import Any

import jsonschema
import llguidance
import pytest
from allspark import grammar_compiler
from allspark.grammar_compiler import MAX_GRAMMAR_CHARS, STACK_BYTES
from allspark.json_formats import ENFORCED
from allspark.json_schema import (
    MAX_DEPTH,
    MAX_PATTERN_PROPERTIES,
    NUMBER_BOUND,
    check_depth,
    prepare,
    read,
)
from allspark.one_of import Prover
from allspark.response_format import to_grammar

DATE = dict(ENFORCED["date"])
HOSTNAME = dict(ENFORCED["hostname"])
DOT = r"[^\n\r\u2028\u2029]"
A = {"type": "object", "required": ["k"], "properties": {"k": {"const": "a"}}}
B = {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["b", 3]}}}


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"format": "zebra", "title": "t"}, {"title": "t"}),
        ({"format": ["zebra"]}, {"format": ["zebra"]}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"type": "string", "format": "date"}, {"type": "string", **DATE}),
        ({"format": "date", "pattern": "^2"}, {"pattern": "^2", "allOf": [DATE]}),
        ({"pattern": "^2", "format": "date"}, {"pattern": "^2", "allOf": [DATE]}),
        ({"format": "hostname", "maxLength": 9}, {"maxLength": 9, "allOf": [HOSTNAME]}),
        (
            {"allOf": [{"format": "date"}], "format": "date", "pattern": "a"},
            {"allOf": [DATE, DATE], "pattern": "a"},
        ),
        ({"uniqueItems": False, "items": {"uniqueItems": False}}, {"items": {}}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"uniqueItems": 0}, {"uniqueItems": 0}),
        ({"propertyNames": {}, "unevaluatedItems": True, "dependencies": {}}, {}),
        ({"propertyNames": {"a": 1}, "dependencies": {"a": []}},) * 2,
        # Names and values, not keywords.
        ({"properties": {"format": {"format": "x"}, "oneOf": {}}},
         {"properties": {"format": {}, "oneOf": {}}}),
        ({"$defs": {"uniqueItems": False, "propertyNames": {}}},) * 2,
        ({"const": {"format": "x"}, "enum": [{"uniqueItems": False}]},) * 2,
        ({"default": {"oneOf": [{"type": "null"}]}, "examples": [{"format": "x"}]},) * 2,
        # Places that references may point to.
        ({"components": {"schemas": {"s": {"format": "x"}}}},
         {"components": {"schemas": {"s": {}}}}),
        ({"prefixItems": [{"format": "x"}, True], "not": {"format": "x"}},
         {"prefixItems": [{}, True], "not": {}}),
        # Bounds that the compiler would let through, and others.
        ({"exclusiveMinimum": 0}, {"exclusiveMinimum": 1e-14}),
        ({"exclusiveMaximum": -0.0, "x": True}, {"exclusiveMaximum": -1e-14, "x": True}),
        ({"exclusiveMaximum": 120}, {"exclusiveMaximum": 119.999999999999}),
        ({"exclusiveMinimum": -1e13}, {"exclusiveMinimum": -9999999999999.9}),
        ({"minimum": 5, "exclusiveMinimum": True},
         {"minimum": 5, "exclusiveMinimum": 5.00000000000001}),
        ({"exclusiveMinimum": 5, "type": "integer"},) * 2,
        ({"minimum": 5, "exclusiveMinimum": False},) * 2,
        ({"exclusiveMinimum": True, "exclusiveMaximum": 0.5},) * 2,
        ({"exclusiveMinimum": 10**15, "exclusiveMaximum": 1e300},) * 2,
        # Patterns.
        ({"properties": {"pattern": {"pattern": r"\.."}}, "const": {"pattern": "."}},
         {"properties": {"pattern": {"pattern": rf"\.{DOT}"}}, "const": {"pattern": "."}}),
        ({"patternProperties": {".": {}}}, {"patternProperties": {DOT: {}}}),
        # oneOf.
        ({"oneOf": [A, B]}, {"anyOf": [A, B]}),
        ({"oneOf": [A, B], "anyOf": [{}]}, {"anyOf": [{}], "allOf": [{"anyOf": [A, B]}]}),
        ({"oneOf": [A, A]},) * 2,
        ({"oneOf": []},) * 2,
        ({"oneOf": {"type": "null"}},) * 2,
        ({"oneOf": [{"format": "x", "type": "string"}, {"type": "null"}]},
         {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"oneOf": [A, B], "allOf": 3, "anyOf": []}, {"allOf": 3, "anyOf": []}),
    ],
)  # fmt: skip
def test_what_is_written_for_the_compiler(schema, prepared):
    before = copy.deepcopy(schema)
    assert prepare(schema)[0] == prepared
    assert schema == before


def test_places_of_what_is_not_decided():
    two = {"oneOf": [{}, {}]}
    schema = {"properties": {"a/b~": {"items": [two]}}, "$defs": {"oneOf": two}}
    assert prepare(schema)[1] == ["#/properties/a~1b~0/items/0/oneOf", "#/$defs/oneOf/oneOf"]
    assert prepare({"properties": dict.fromkeys("abcdef", two)})[1] == [
        f"#/properties/{name}/oneOf" for name in "abc"
    ]
    assert prepare(two)[:2] == (two, ["#/oneOf"])
    assert prepare(two, one_of_is_any_of=True)[:2] == ({"anyOf": [{}, {}]}, [])
    # A reference through a oneOf still finds its target.
    for is_any_of in (False, True):
        through = {"oneOf": [A, B], "$defs": {"a": {"$ref": "#/oneOf/0"}}}
        assert prepare(through, is_any_of)[:2] == (through, ["#/oneOf"])


def test_texts_and_depths():
    assert read('{"a": [1]}', "x") == {"a": [1]}
    with pytest.raises(ValueError, match="^x is not JSON: "):
        read("{", "x")
    bound = f"^x is nested {MAX_DEPTH + 1} levels deep or more; the bound is {MAX_DEPTH}$"
    with pytest.raises(ValueError, match=bound):
        read("[" * 1_000_000, "x")
    for make in (lambda inner: [inner], lambda inner: {"a": inner, "b": 1}, lambda inner: (inner,)):
        value: Any = make(1)
        for _ in range(MAX_DEPTH - 1):
            value = make(value)
        check_depth(value, "x")
        with pytest.raises(ValueError, match=bound):
            check_depth(make(value), "x")
    for value in (1, "a", None, [], {}):
        check_depth(value, "x")
    # Each is visited once, although there are 2^50 paths down; the text would have them all.
    shared: list = []
    for _ in range(18):
        shared = [shared, shared]
    check_depth(shared, "x")
    for _ in range(32):
        shared = [shared, shared]
    with pytest.raises(ValueError, match="^x has more than 1000000 lists and objects, the bound$"):
        check_depth(shared, "x")
    endless: dict = {}
    endless["a"] = [endless]
    with pytest.raises(ValueError, match=bound):
        check_depth(endless, "x")


def test_numbers_that_the_compiler_negates():
    """The bound is the greatest float that it takes for the least integer of 64 bits."""
    assert float(NUMBER_BOUND) == -(2.0**63) < float(NUMBER_BOUND + 1)
    for number in (NUMBER_BOUND, -(2**63), -(10**400), -(2.0**63), -1e300, float("-inf")):
        for schema in (
            {"const": number}, {"enum": [[{"a": number}]]}, {"minimum": number},
            {"properties": {"b": {"anyOf": [{"exclusiveMaximum": number}]}}},
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"; numbers must be above {NUMBER_BOUND}$"):
                prepare(schema)
        no_bound = {"default": number, "examples": [number]}
        assert prepare(no_bound)[:2] == (no_bound, [])
    for number in (NUMBER_BOUND + 1, 2**63, 10**400, True):
        schema = {"const": number}
        assert prepare(schema)[:2] == (schema, [])
        llguidance.LLMatcher.validate_grammar(
            llguidance.LLMatcher.grammar_from_json_schema({"const": min(number, 2**63)})
        )


class Schema:
    """A schema as it is compiled, for single bytes as tokens."""

    def __init__(self, schema: dict):
        grammar = to_grammar({"type": "json_schema", "json_schema": schema}, {})
        self.matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.text)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def takes(self, text: str) -> bool:
        ids = list(text.encode())
        matcher = self.matcher.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_no_bound_lets_a_number_beyond_it_through():
    rng = random.Random(5)
    steps = list(map(Decimal, ("0", "0.0001", "0.01", "0.09", "0.1", "0.5", "1", "9", "10")))
    starts = list(map(Decimal, ("0", "1", "-1", "5", "-5", "9", "10", "-99", "0.5", "-1.5")))
    beside = [Decimal(0), *(Decimal(sign).scaleb(-n) for sign in (1, -1) for n in (1, 4))]
    num_taken = num_left_out = 0
    for _ in range(100):
        least, most = sorted([start := rng.choice(starts), start + rng.choice(steps)])
        low = rng.choice(["minimum", "exclusiveMinimum"])
        high = rng.choice(["maximum", "exclusiveMaximum"])
        if least == most and (low, high) != ("minimum", "maximum"):
            continue
        kind = rng.choice(["number", ["number", "string"]])
        whole = Schema({"type": kind, low: float(least), high: float(most)})
        parts = Schema({"allOf": [{low: float(least)}, {"type": kind, high: float(most)}]})
        for number in {end + offset for end in (least, most) for offset in beside}:
            valid = (least <= number if low == "minimum" else least < number) and (
                number <= most if high == "maximum" else number < most
            )
            for text in {str(number), f"{number:.6f}", f"{number:f}"}:
                taken = whole.takes(text)
                assert taken == parts.takes(text) and taken <= valid, (low, least, high, most, text)
                num_taken += taken
                num_left_out += valid and not taken
    assert num_taken > 300 and num_left_out < 0.25 * num_taken


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"properties": {"role": {"enum": ["user"]}}, "required": ["role"]},
            ['{"role":"user"}', '{"role":"user","b\\n\\t\\"":1}'],
            ['{"role":"user","\\u0072ole":"admin"}', '{"role":"user","b":"\\u0001"}'],
        ),
        ({"patternProperties": {"^x": {"type": "null"}}}, ['{"x":null,"y":1}'], ['{"\\u0078":1}']),
        ({"required": ["a\x01"]}, ['{"a\\u0001":1}'], ['{"a\\u0001":1,"\\u0061\\u0001":1}']),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"additionalProperties": {}}]},
         ['{"b":1}'], ['{"\\u0061":1}']),
        # Where no key can be taken for another, control characters stay.
        ({"properties": {"a": {"const": "\x01"}}, "additionalProperties": False},
         ['{"a":"\\u0001"}'], ['{"\\u0061":"\\u0001"}']),
        ({}, ['{"a":"\\u0001"}'], []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("escapes", [None, 'nrbtf\\"u'])
def test_keys_are_spelt_in_one_way(schema, good, bad, escapes):
    compiled = Schema({"type": "object", **schema, "x-guidance": {"json_allowed_escapes": escapes}})
    assert all(map(compiled.takes, good)) and not any(map(compiled.takes, bad))


def test_what_would_be_spelt_with_digits_is_refused_in_open_objects():
    constant = {"enum": ["a\n\t\b\f\r", {"k": ["a\x1b"]}]}
    for beside in ({"required": ["a"]}, {"items": {"patternProperties": {"a": {}}}}):
        with pytest.raises(ValueError, match=r"control character at #/anyOf/0/enum/1/k/0; it can"):
            prepare({"anyOf": [constant], **beside})
    assert prepare({"anyOf": [constant], "required": []}).is_open is False


def test_a_repeated_key_counts_for_no_minimum():
    a, b = ({"properties": {n: {"const": 1}}, "required": [n]} for n in "ab")
    for schema in (
        {"minProperties": 2},
        {"minProperties": 3, **a},
        {"minProperties": 3, "required": ["a", "a"]},
        {"minProperties": 2, "additionalProperties": False, "patternProperties": {"a": {}}},
        {"allOf": [{"minProperties": 3}, a, b]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^the schema has \d at #(/allOf/0)?/minProperties; "):
            prepare(schema)
    two = Schema({"type": "object", "minProperties": 2, **a})
    assert two.takes('{"a":1,"b":2}') and not two.takes('{"a":1}')
    assert not two.takes('{"a":1,"a":1}')
    one = Schema({"type": "object", "allOf": [{"minProperties": 1, "additionalProperties": {}}]})
    assert one.takes('{"a":1}') and not one.takes("{}")
    closed_one = Schema({"type": "object", **a, "minProperties": 1, "additionalProperties": False})
    assert closed_one.takes('{"a":1}')


# -- patterns ----------------------------------------------------------------------------------

# White space of Unicode, or of ECMA 262, and neighbours.
SPACES = "\t\n\x0b\x0c\r \xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
OTHERS = "\x85\u200b\x1ca-&~[]^b_"


@pytest.mark.parametrize(
    ("pattern", "members"),
    [
        (".", OTHERS + "".join(s for s in SPACES if s not in "\n\r\u2028\u2029")),
        (r"\s", SPACES),
        (r"\S", OTHERS),
        (r"[\s]", SPACES),
        (r"[^\s]", OTHERS),
        (r"[\Sa]", OTHERS),
        (r"[^\S]", SPACES),
        (r"[\s\S]", SPACES + OTHERS),
        ("[^]", SPACES + OTHERS),
        ("[]?a", "a"),
        ("[.]?a", "a"),
        (r"\.?a", "a"),
        (r"\[?a", "a"),
        (r"[\]]", "]"),
        ("[[a]", "[a"),
        ("[[a]?]", "]"),
        ("[^[]]?", (SPACES + OTHERS).replace("[", "")),
        ("[a&&b]", "a&b"),
        ("[a~~b]", "a~b"),
        ("[a--]", ""),
        ("[--a]", OTHERS.translate(dict.fromkeys(map(ord, "\x85\u200b\x1c&~b")))),
        ("[&--]", "&-"),
        ("[a-]", "a-"),
        ("[-a]", "-a"),
        ("[a-b-]", "ab-"),
        (r"[\]-a]", "]^_a"),
        (r"[\x5d-\u{61}]", "]^_a"),
        (r"[\d-a]", "-a"),
        (r"[\p{Lu}-\-]", "-"),
        (r"[^\w\s]", "".join(o for o in OTHERS if o not in "ab_")),
        ("[\u2028]", "\u2028"),
    ],
)  # fmt: skip
def test_patterns_are_those_of_ecma(pattern, members):
    if pattern == "[a--]":  # from a to a hyphen
        with pytest.raises(AssertionError, match="invalid character class range"):
            Schema({"pattern": pattern})
        return
    compiled = Schema({"type": "string", "pattern": f"^{pattern}$"})
    texts = {text: json.dumps(text, ensure_ascii=text < " ") for text in SPACES + OTHERS}
    taken = {text for text, written in texts.items() if compiled.takes(written)}
    assert taken == set(members)


def test_keys_are_matched_by_patterns_of_ecma():
    compiled = Schema({"type": "object", "patternProperties": {r"^\S$": {"type": "null"}}})
    assert compiled.takes('{"\x85":null}') and not compiled.takes('{"\x85":1}')
    assert compiled.takes('{"\ufeff":1}')
    with pytest.raises(ValueError, match="two patterns at #/patternProperties are the same"):
        prepare({"patternProperties": {"[&]": {}, r"[\&]": {}}})


# -- formats -----------------------------------------------------------------------------------


class Format:
    """A format as prepare() writes it, checked by Python's re and by the compiler."""

    def __init__(self, name: str):
        self.keywords = ENFORCED[name]
        schema = prepare({"type": "string", "format": name}).schema
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self.matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def matches(self, text: str) -> bool:
        is_short = len(text) <= self.keywords.get("maxLength", len(text))
        # The $ of Python's re would accept a line end.
        return is_short and bool(re.fullmatch(self.keywords["pattern"][1:-1], text))

    def compiles_to(self, text: str) -> bool:
        ids = list(json.dumps(text).encode())
        matcher = self.matcher.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def is_date(year: int, month: int, day: int) -> bool:
    days = [31, 29 if calendar.isleap(year) else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    return 1 <= month <= 12 and 1 <= day <= days[month - 1]


def test_dates_are_those_of_the_calendar():
    date = Format("date")
    for year in range(10_000):
        assert date.matches(f"{year:04}-02-29") == calendar.isleap(year)
        assert date.matches(f"{year:04}-02-28") and not date.matches(f"{year:04}-02-30")
    for year, month, day in product((0, 1900, 2000, 2023, 2024, 9999), range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        assert date.matches(text) == date.compiles_to(text) == is_date(year, month, day), text
    for text in ("2024-02-29 ", "2024-2-29", "24-02-29", "2024-02-29\n", "２024-02-29"):
        assert not date.matches(text) and not date.compiles_to(text), text


def test_times_are_those_of_a_day():
    time = Format("time")
    for hour, minute, second in product(range(26), (0, 1, 9, 10, 58, 59, 60), (0, 9, 59, 60, 61)):
        is_leap = (hour, minute, second) == (23, 59, 60)
        is_time = is_leap or (hour < 24 and minute < 60 and second < 60)
        for zone in ("Z", "z", "+00:00", "-00:00", ".250Z", "+01:00", "-23:59"):
            text = f"{hour:02}:{minute:02}:{second:02}{zone}"
            # RFC 3339 has leap seconds with other offsets, too; they are left out.
            expected = is_time and (not is_leap or zone not in ("+01:00", "-23:59"))
            assert time.matches(text) == time.compiles_to(text) == expected, text
    for text in ("12:00:00", "12:00Z", "1:00:00Z", "12:00:00+24:00", "12:00:00.Z", "12:00:00+1:00"):
        assert not time.matches(text) and not time.compiles_to(text), text


def test_a_date_time_is_a_date_and_a_time():
    whole = Format("date-time")
    for text in ("2024-02-29T23:59:60Z", "0000-01-01t00:00:00.1+14:00", "9999-12-31T12:00:00z"):
        assert whole.matches(text) and whole.compiles_to(text), text
    for text in (
        "2023-02-29T12:00:00Z", "2024-02-29T12:00:60Z", "2024-02-29 12:00:00Z", "2024-02-29",
        "12:00:00Z", "2024-02-29T12:00:00", "2024-02-29TT12:00:00Z",
    ):  # fmt: skip
        assert not whole.matches(text) and not whole.compiles_to(text), text


def is_hostname(text: str) -> bool:
    def is_label(label: str) -> bool:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        return (
            1 <= len(label) <= 63
            and set(label) <= {*letters, "-"}
            and not label.startswith("-")
            and not label.endswith("-")
            and label[2:4] != "--"
        )

    return len(text) <= 253 and all(map(is_label, text.split(".")))


def test_hostnames_are_labels():
    hostname = Format("hostname")
    # Every arrangement of letters, hyphens and dots to a length of 7.
    texts = ["".join(letters) for n in range(8) for letters in product("a-.", repeat=n)]
    rng = random.Random(1)
    for _ in range(2000):
        lengths = [rng.choice([1, 2, 3, 4, 5, 20, 62, 63, 64]) for _ in range(rng.randint(1, 6))]
        texts.append(".".join("".join(rng.choices("aZ09-", [9, 9, 9, 9, 1], k=n)) for n in lengths))
    texts += ["a" * 63 + ("." + "a" * 63) * 2 + "." + "a" * n for n in (60, 61, 62)]
    texts += ["xn--a", "a_b", "é.example", "a\n", "a b", "192.168.0.1"]
    num_taken = 0
    for text in texts:
        expected = is_hostname(text)
        num_taken += expected
        assert hostname.matches(text) == hostname.compiles_to(text) == expected, text
    assert 500 < num_taken < len(texts) - 500


@pytest.mark.parametrize(
    ("name", "left_out", "taken"),
    [
        ("time", "15:59:60-08:00", "23:59:60Z"),
        ("date-time", "1998-12-31T15:59:60-08:00", "1998-12-31T15:59:59-08:00"),
        ("hostname", "xn--bcher-kva.example", "xn-bcher-kva.example"),
        ("email", '"joe bloggs"@example.com', "joe.bloggs@example.com"),
        ("email", "joe@[IPv6:::1]", "joe@[127.0.0.1]"),
        ("ipv6", "::ffff:192.168.0.1", "::ffff:c0a8:1"),
    ],
)
def test_what_the_documents_say_is_never_written(name, left_out, taken):
    assert Format(name).compiles_to(taken) and not Format(name).compiles_to(left_out)


def test_an_email_has_no_bounds_on_lengths(repo_root):
    assert Format("email").compiles_to("a" * 65 + "@" + "b" * 64)
    row = "| `email` | RFC 5321, without its bounds on lengths |"
    assert row in (repo_root / "docs" / "guided_decoding.md").read_text()


def test_the_documents_name_what_is_enforced(repo_root):
    text = (repo_root / "docs" / "guided_decoding.md").read_text()
    table = text.partition("| `format` |")[2].partition("\n\n")[0]
    names = "".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert sorted(re.findall("`(.*?)`", names)) == sorted(ENFORCED)
    assert f"{MAX_DEPTH} levels deep" in text
    assert f"may have {MAX_GRAMMAR_CHARS:,} characters" in text
    assert f"a stack of {STACK_BYTES >> 20} MiB" in text
    assert f"`patternProperties` in a schema | {MAX_PATTERN_PROPERTIES} |" in text
    assert f"{grammar_compiler._FIRST_FUEL:,} steps" in text
    assert f"grammars {grammar_compiler._FIRST_FUEL_PER_CHAR} for each" in text
    assert f"{grammar_compiler._STEP_FUEL:,} steps" in text
    assert f"| {grammar_compiler._MAX_LEXER_STATES:,};" in text
    assert f"| {grammar_compiler._MAX_COMPILE_SECONDS:g} s," in text
    assert f"and {grammar_compiler._MAX_WAIT_SECONDS:g} s where" in text
    assert f"| {grammar_compiler._MAX_CACHE_BYTES >> 30} GiB," in text
    assert f"{grammar_compiler._GROWTH_BYTES // 10**6} MB for" in text


# -- proofs ------------------------------------------------------------------------------------


def is_proved(*branches: Any, **beside: Any) -> bool:
    schema = {"oneOf": list(branches), **beside}
    return Prover(schema).is_disjoint(schema)


def closed(*names: str, **properties: Any) -> dict:
    """An object of exactly these properties."""
    properties = {**{name: {} for name in names}, **properties}
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


def tagged(value: Any, name: str = "k") -> dict:
    return {"type": "object", "properties": {name: {"const": value}}, "required": [name]}


DEFS = {"a": tagged("a"), "b": tagged("b"), "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize(
    ("branches", "beside"),
    [
        (["type string", "type null"], {}),
        ([{"type": ["string", "null"]}, {"type": ["integer", "array"]}], {}),
        ([{"const": "a"}, {"enum": ["b", 1]}, {"enum": [2, None]}], {}),
        ([{"const": 1}, {"const": True}, {"const": "1"}], {}),
        ([{"enum": ["a", "b"], "type": "string"}, {"type": "integer"}], {}),
        ([{"enum": ["a", 5]}, {"enum": ["b", 5]}], {"type": "string"}),
        ([False, {}], {}),
        ([{}], {}),
        ([tagged("a"), tagged("b"), tagged("c")], {}),
        ([tagged("a"), {"type": "object", "properties": {"k": {"const": "b"}}}], {}),
        ([tagged("a"), {**closed("other")}], {}),
        ([closed("A"), closed("B"), closed("C"), {"type": "string"}], {}),
        ([closed("A", "x"), closed("B", "x"), closed("x")], {}),
        ([closed(head=tagged(1)), closed(head=tagged(2))], {}),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}], {"$defs": DEFS}),
        ([{"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}, DEFS["b"]], {"$defs": DEFS}),
        ([{"anyOf": [{"const": 1}, {"type": "null"}]}, {"oneOf": [{"const": 2}, A]}], {}),
        ([{"properties": {"k": {"const": n}}} for n in range(3)],
         {"type": "object", "required": ["k"]}),
        ([{"$ref": "#/x/a~1b/0"}, {"$ref": "#/x/%C3%A9"}], {"x": {"a/b": [DEFS["a"]], "é": B}}),
    ],
)  # fmt: skip
def test_branches_that_exclude_one_another(branches, beside):
    branches = [{"type": b.split()[1]} if isinstance(b, str) else b for b in branches]
    assert is_proved(*branches, **beside)
    assert is_proved(*reversed(branches), **beside)
    if len(branches) > 1:
        assert not is_proved(*branches, branches[1], **beside)


@pytest.mark.parametrize(
    ("branches", "beside"),
    [
        ([{}, {}], {}),
        ([{"type": "integer"}, {"type": "number"}], {}),
        ([{"const": 1}, {"const": 1.0}], {}),
        ([{"const": [1]}, {"const": [1.0]}], {}),
        ([{"const": "a"}, {"type": "string"}], {}),
        ([{"type": "zebra"}, {"type": "array"}, True], {}),
        ([{"type": [{}]}, True], {}),
        ([{"required": ["a"]}, {"required": ["b"]}], {"type": "object"}),
        # Values that are not objects are valid for both.
        ([{k: v for k, v in tagged(n).items() if k != "type"} for n in "ab"], {}),
        # Neither requires the tag.
        ([{"type": "object", "properties": {"k": {"const": n}}} for n in "ab"], {}),
        # {"A": 1, "B": 1}
        ([{**closed("A"), "additionalProperties": {}}, closed("B", "A")], {}),
        ([{**closed("A"), "patternProperties": {"B": {}}}, closed("B", "A")], {}),
        ([closed("A", "x"), closed("A", "x", "y")][:1] * 2, {}),
        # Keywords beside a reference do not count in every draft.
        ([{"$ref": "#/$defs/c", "type": "string"}, {"type": "null"}], {"$defs": {"c": {}}}),
        ([{"$ref": "#/$defs/none"}, {"type": "null"}], {}),
        ([{"$ref": "#/$defs/loop"}, {"type": "null"}], {"$defs": DEFS}),
        ([{"$ref": "https://example.org/a"}, {"type": "null"}], {}),
        ([{"$ref": "#anchor"}, {"type": "null"}], {}),
        ([{"$ref": 3}, {"type": "null"}], {}),
        # '#' may refer to another document there.
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], {"$defs": {**DEFS, "x": {"$id": "x"}}}),
    ],
)
def test_branches_of_which_nothing_is_proved(branches, beside):
    assert not is_proved(*branches, **beside)


NAMES = ("a", "b")
ATOMS = (None, True, False, 0, 1, 1.0, 1.5, "x", "y", [], [1])
VALUES = [
    *ATOMS,
    *({name: value for name, value in zip(NAMES, pair, strict=True) if value is not ...}
      for pair in product((*ATOMS, ..., {}, {"a": 1}, {"a": "x"}), repeat=2)),
]  # fmt: skip


TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def some_schema(rng: random.Random, references: tuple[str, ...], depth: int = 3) -> Any:
    """A small schema over NAMES and VALUES; short ones are the likeliest."""
    kind = rng.choice(["leaf"] * 4 + ["object"] * 5 + ["allOf", "anyOf", "oneOf"])
    if kind == "leaf" or depth == 0:
        return rng.choice(
            [
                {"type": rng.choice(TYPES)},
                {"type": rng.sample(TYPES, rng.randint(1, 3))},
                {"const": rng.choice(VALUES[:40])},
                {"enum": rng.sample(VALUES[:40], rng.randint(1, 3))},
                *({"$ref": name} for name in references),
                rng.random() < 0.5,
            ]
        )
    if kind != "object":
        return {kind: [some_schema(rng, references, depth - 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(NAMES, rng.randint(0, 2))
    schema = {"properties": {name: some_schema(rng, references, depth - 1) for name in names}}
    for keyword, value, chance in (
        ("type", "object", 0.8),
        ("required", rng.sample(NAMES, rng.randint(0, 2)), 0.6),
        ("additionalProperties", False, 0.4),
        ("additionalProperties", {"const": "x"}, 0.1),
        ("patternProperties", {"^a": True}, 0.1),
        ("enum", [{}, {"a": 1}, {"a": "x"}], 0.05),
    ):
        if rng.random() < chance:
            schema[keyword] = value
    return schema


def some_document(rng: random.Random) -> dict:
    first, second = "#/$defs/first", "#/$defs/second"
    return {
        **rng.choice([{}, {}, {"type": "object"}, {"required": ["a"]}, {"type": ["string"]}]),
        "oneOf": [some_schema(rng, (first, second)) for _ in range(rng.randint(2, 3))],
        "$defs": {"first": some_schema(rng, ()), "second": some_schema(rng, (first,))},
    }


def test_what_is_proved_is_true():
    """Another validator finds no value that is valid for two branches."""
    rng = random.Random(11)
    num_proofs = 0
    for _ in range(2000):
        document = some_document(rng)
        if not Prover(document).is_disjoint(document):
            continue
        num_proofs += 1
        assert "oneOf" not in prepare(document)[0]
        validators = [
            jsonschema.Draft202012Validator({**document, "oneOf": [branch]})
            for branch in document["oneOf"]
        ]
        for value in rng.sample(VALUES, 30):
            taken_by = [index for index, one in enumerate(validators) if one.is_valid(value)]
            assert len(taken_by) < 2, f"{value} is valid for {taken_by} of {json.dumps(document)}"
    assert num_proofs > 150


# -- work --------------------------------------------------------------------------------------


def num_calls(schema: Any) -> int:
    """Number of function calls, in Python and C, while a schema is prepared."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        prepare(schema)
    finally:
        sys.setprofile(None)
    return calls


def refs(count: int) -> list:
    return [{"$ref": f"#/$defs/{i}"} for i in range(count)]


FAMILIES = {
    "tags": lambda n: {"oneOf": [tagged(i) for i in range(n)]},
    "names": lambda n: {"oneOf": [closed(f"k{i}") for i in range(n)]},
    "constants": lambda n: {"oneOf": [{"enum": [str(i), i]} for i in range(n)]},
    "an enum": lambda n: {"oneOf": [{"enum": list(range(n))}, {"type": "null"}]},
    "references": lambda n: {"oneOf": refs(n), "$defs": {str(i): tagged(i) for i in range(n)}},
    "one reference": lambda n: {
        "items": [{"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]} for _ in range(n)],
        "$defs": {"a": closed(*map(str, range(30)))},
    },
    "nested": lambda n: {"oneOf": [{"anyOf": [tagged(i), {"const": i}]} for i in range(n)]},
    "no proof": lambda n: {"oneOf": [closed("a", "b") for _ in range(n)]},
    "formats": lambda n: {"properties": {str(i): {"format": "date"} for i in range(n)}},
    "long names": lambda n: {"x" * n: [{"y" * n: {"oneOf": [{}, {}]}}] * n},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_work_grows_with_the_schema(family):
    some, more = (num_calls(FAMILIES[family](n)) for n in (250, 1000))
    assert more < 4.4 * some, f"four times the schema: {more / some:.1f} times the work"


def chain(next_one, count: int) -> dict:
    defs = {str(i): next_one({"$ref": f"#/$defs/{i + 1}"}, i) for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(count): {"type": "string"}}}


@pytest.mark.parametrize(
    "next_one",
    [
        lambda ref, i: ref,
        lambda ref, i: {"allOf": [ref, {"properties": {f"p{i}": {}}}]},
        lambda ref, i: {"anyOf": [ref, ref]},
        lambda ref, i: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
    ],
    ids=["ref", "allOf", "anyOf", "properties"],
)
def test_long_chains_are_followed_to_a_bound(next_one):
    schema = {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}], **chain(next_one, 5_000)}
    assert prepare(schema)[1] == ["#/oneOf"]
    assert num_calls(schema) < 1_000_000


def test_work_on_one_document_is_bounded():
    """Objects that share most of their properties, which a proof would examine many times."""
    shared = closed(*(f"p{i}" for i in range(200)))
    schema = {
        "$defs": {"s": shared},
        "properties": {str(i): {"oneOf": [{"$ref": "#/$defs/s"}] * 20} for i in range(500)},
    }
    assert num_calls(schema) < 5_000_000


def test_a_schema_at_the_bound_of_depth_needs_little_stack():
    schema: dict = {"type": "null"}
    while True:
        deeper = {"oneOf": [{"properties": {"a": schema}, "required": ["a"]}, {"type": "null"}]}
        try:
            check_depth(deeper, "x")
        except ValueError:
            break
        schema = deeper
    limit = sys.getrecursionlimit()
    frames = len(inspect.stack(0))
    sys.setrecursionlimit(frames + 600)
    try:
        prepare(schema)
    finally:
        sys.setrecursionlimit(limit)

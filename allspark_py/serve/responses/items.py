"""The items of a request's input: checked, and in the one form in which they are kept and listed.

Every error names its place in the request as it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allspark.serve.parsers.json_texts import is_json_object
from allspark.serve.places import shown, wrong
from allspark.serve.responses.record import item_id

# Of a conversation: the input's items, those before, and the parts of all contents.
MAX_ITEMS = 10_000
# The parts of a content, each with the field of its text.
_INPUT_PARTS = {"input_text": "text"}
_OUTPUT_PARTS = {"output_text": "text", "refusal": "refusal"}
_ROLE_PARTS = {
    "user": _INPUT_PARTS,
    "system": _INPUT_PARTS,
    "developer": _INPUT_PARTS,
    "assistant": _OUTPUT_PARTS,
}
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")

Item = dict[str, Any]


def references(items: str | Sequence[Any]) -> dict[int, str]:
    """The items that stand for others: their places, and the others' ids. Raises ApiError where
    there are too many items."""
    if isinstance(items, str):
        return {}
    check_number(len(items))
    found = {}
    for index, item in enumerate(items):
        if isinstance(item, Mapping) and _kind(item, f"input[{index}]") == "item_reference":
            found[index] = _text(item, "id", f"input[{index}]")
    return found


def read_items(
    given: str | Sequence[Any], response_id: str, others: Mapping[int, Item]
) -> list[Item]:
    """The items of an input.

    Args:
        others: those that `references` found, by their places.

    Raises:
        ApiError: an item is wrong, or there are too many.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise wrong("input", "is empty; it must have an item at least")
    found: list[Item] = []
    num_parts = 0
    for index, item in enumerate(given):
        if index in others:
            found.append(others[index])
            continue
        place = f"input[{index}]"
        kind = _kind(item, place)
        read = _READERS[kind](item, place)
        content = read.get("content", read.get("output"))
        num_parts += len(content) if isinstance(content, list) else 0
        check_number(len(given) + num_parts)
        own_id = item.get("id")
        if own_id is not None and not isinstance(own_id, str):
            raise wrong(f"{place}.id", f"must be a string; it is {shown(own_id)}")
        id = own_id or item_id(response_id, kind, f"i{index:04d}")
        found.append({"id": id, "type": kind, "status": "completed", **read})
    return found


def check_number(count: int) -> None:
    """Raises ApiError where a conversation has too many items."""
    if count > MAX_ITEMS:
        problem = f"has {count} items and parts, with those before it; the bound is {MAX_ITEMS}"
        raise wrong("input", problem)


def _kind(item: Any, place: str) -> str:
    if not isinstance(item, Mapping):
        raise wrong(place, f"must be an object; it is {shown(item)}")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item or "id" not in item else "item_reference"
    if kind not in _KINDS:
        names = ", ".join(repr(name) for name in _KINDS[:-1])
        problem = f"is {shown(kind)}; it must be {names} or {_KINDS[-1]!r}"
        raise wrong(f"{place}.type", problem)
    return str(kind)


def _field(item: Mapping[str, Any], name: str, place: str) -> Any:
    if item.get(name) is None:
        raise wrong(f"{place}.{name}", "is missing")
    return item[name]


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = _field(item, name, place)
    if not isinstance(value, str):
        raise wrong(f"{place}.{name}", f"must be a string; it is {shown(value)}")
    return value


def _parts(given: Any, kinds: Mapping[str, str], place: str) -> list[Item]:
    """The parts of a content. A text is one of the first kind."""
    first = next(iter(kinds))
    if isinstance(given, str):
        return [_part({"type": first, "text": given}, kinds, place)]
    if not isinstance(given, list):
        raise wrong(place, f"must be a string or a list of parts; it is {shown(given)}")
    return [_part(part, kinds, f"{place}[{index}]") for index, part in enumerate(given)]


def _part(part: Any, kinds: Mapping[str, str], place: str) -> Item:
    if not isinstance(part, Mapping):
        raise wrong(place, f"must be an object; it is {shown(part)}")
    kind = _text(part, "type", place)
    if kind not in kinds:
        names = " or ".join(repr(name) for name in kinds)
        raise wrong(f"{place}.type", f"is {shown(kind)}; it must be {names}")
    read: Item = {"type": kind, kinds[kind]: _text(part, kinds[kind], place)}
    return {**read, "annotations": [], "logprobs": []} if kind == "output_text" else read


def _message(item: Mapping[str, Any], place: str) -> Item:
    role = _text(item, "role", place)
    if role not in _ROLE_PARTS:
        names = ", ".join(repr(name) for name in _ROLE_PARTS)
        raise wrong(f"{place}.role", f"is {shown(role)}; it must be one of {names}")
    content = _field(item, "content", place)
    return {"role": role, "content": _parts(content, _ROLE_PARTS[role], f"{place}.content")}


def _function_call(item: Mapping[str, Any], place: str) -> Item:
    arguments = _text(item, "arguments", place)
    if arguments.strip() and not is_json_object(arguments):
        raise wrong(f"{place}.arguments", f"must be a JSON object's text; it is {shown(arguments)}")
    names = {name: _text(item, name, place) for name in ("call_id", "name")}
    return {**names, "arguments": arguments}


def _function_call_output(item: Mapping[str, Any], place: str) -> Item:
    output = _field(item, "output", place)
    if not isinstance(output, str):
        output = _parts(output, _INPUT_PARTS, f"{place}.output")
    return {"call_id": _text(item, "call_id", place), "output": output}


def _reasoning(item: Mapping[str, Any], place: str) -> Item:
    summary = _parts(item.get("summary") or [], {"summary_text": "text"}, f"{place}.summary")
    content = _parts(item.get("content") or [], {"reasoning_text": "text"}, f"{place}.content")
    return {"summary": summary, "content": content}


_READERS = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}

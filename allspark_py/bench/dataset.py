"""Requests from a file: ShareGPT's conversations, or a prompt on each line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from allspark.bench.workload import Lengths, Prompt, Request, generator
from allspark.unicode_text import check_unicode, read_text

# Of ShareGPT's conversations those outside are passed over, as LMDeploy's benchmark does.
_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048
_USERS = ("human", "user")
_MUST = (
    'it must be {"prompt": TEXT}, {"messages": [...]} or {"conversations": [...]}, and may have '
    '"max_tokens"'
)

CountTokens = Callable[[str], int]


class _Entry(NamedTuple):
    prompt: Prompt
    answer: str | None = None  # of a recorded conversation
    num_output: int | None = None


def read_requests(
    path: str,
    count: int,
    seed: int,
    output: Lengths,
    is_output_given: bool = False,
    count_tokens: CountTokens | None = None,
) -> list[Request]:
    """At most `count` requests of a file, in an order that the seed draws.

    Args:
        path: a JSON list of ShareGPT's conversations, or JSON lines: {"prompt": text} or
            {"messages": [...]}, each also with "max_tokens", or such conversations.
        output: lengths of outputs for which neither the file nor an answer in it has one.
        is_output_given: `output` is for all of them.
        count_tokens: how many tokens a text has. With it an output is as long as the answer in a
            conversation, and conversations of unusual lengths, as they are recorded, are passed
            over.

    Raises:
        OSError: there is no such file. ValueError: it holds something else, or no request.
    """
    entries = list(_entries(Path(path)))
    rng = generator(seed, "dataset")
    lengths = iter(output.draw(rng, len(entries)))
    requests: list[Request] = []
    for index in rng.permutation(len(entries)):
        if len(requests) == count:
            break
        prompt, answer, num_output = entries[index]
        drawn = next(lengths)
        if answer is not None and count_tokens is not None:
            assert isinstance(prompt, str)
            num_prompt, num_answer = count_tokens(prompt), count_tokens(answer)
            if not _is_usual(num_prompt, num_answer):
                continue
            num_output = num_output or num_answer
        if is_output_given or num_output is None:
            num_output = drawn
        requests.append(Request(prompt, num_output))
    if not requests:
        raise ValueError(f"{path} has no request of usual length")
    return requests


def _is_usual(num_prompt: int, num_answer: int) -> bool:
    return (
        min(num_prompt, num_answer) >= _LEAST_TOKENS
        and num_prompt <= _MOST_PROMPT_TOKENS
        and num_prompt + num_answer <= _MOST_TOKENS
    )


def _entries(path: Path) -> Iterator[_Entry]:
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        places: Iterator[tuple[str, Any]] = (
            (f"{path}[{index}]", item) for index, item in enumerate(items)
        )
    else:
        places = _lines(path, text)
    has_escapes = "\\u" in text  # one may be half a character
    for place, item in places:
        if has_escapes:
            _check_unicode(place, item)
        yield from _entry(place, item)


def _check_unicode(place: str, item: Any) -> None:
    try:
        check_unicode(json.dumps(item, ensure_ascii=False))
    except ValueError:
        raise ValueError(f"{place} has a lone surrogate") from None


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}") from None
        yield f"{path}:{number}", item


def _entry(place: str, item: Any) -> Iterator[_Entry]:
    """The request of an item; none for a conversation in which nobody asks and gets an answer."""
    if not isinstance(item, dict):
        raise ValueError(f"{place} is a {type(item).__name__}; {_MUST}")
    num_output = item.get("max_tokens")
    if num_output is not None and (type(num_output) is not int or num_output < 1):
        raise ValueError(f"{place}: max_tokens is {num_output!r}; it must be an integer above 0")
    if isinstance(item.get("prompt"), str):
        yield _Entry(item["prompt"], None, num_output)
    elif isinstance(item.get("messages"), list):
        if not item["messages"] or not all(isinstance(each, dict) for each in item["messages"]):
            raise ValueError(f"{place}: messages must be a list of objects")
        yield _Entry(item["messages"], None, num_output)
    elif isinstance(item.get("conversations"), list):
        try:
            turns = [(turn["from"], turn["value"]) for turn in item["conversations"][:2]]
        except (TypeError, KeyError):
            raise ValueError(f'{place}: turns must have "from" and "value"') from None
        if len(turns) == 2 and turns[0][0] in _USERS:
            yield _Entry(str(turns[0][1]), str(turns[1][1]), num_output)
    else:
        raise ValueError(f"{place} has the fields {', '.join(item) or 'none'}; {_MUST}")

"""Refuses the regular expressions of a tokenizer that would take too long on some text.

A ``tokenizer.json`` brings expressions, and the package 'tokenizers' runs them by backtracking: an
expression can be made so that a short text takes hours. Expressions of published tokenizers are
known. Any other is tried first, in a process of its own that may be killed, on texts that make
backtracking explode: long runs of one character, of two, of words, taken from the expression
itself. That is a trial and no proof: an expression that is slow on a rarer text alone passes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from . import tokenizer_expression_trial
from .errors import CheckpointError, ModelSerializerException

# Of CPU time, for all expressions of a tokenizer. Published ones take 0.1 to 2 s.
MAX_SECONDS = 10
_MAX_WALL_SECONDS = 120  # On a machine that is busy with something else.
# DeepSeek's longest has some 300 characters, 200 different ones. How many texts there are grows
# with them.
_MAX_CHARACTERS, _MAX_DIFFERENT = 4000, 300
_MAX_EXPRESSIONS = 64
# Of the demo model.
_DEMO = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A key may be written with escapes.
_KEY = "".join(rf"(?:{letter}|\\u00{ord(letter):02x})" for letter in "Regex")
# A character of an expression is ten of these at most, each half of a pair written in hexadecimal.
_MAX_UNITS = 10 * _MAX_CHARACTERS
_FOUND = re.compile(rf'"{_KEY}"\s*:\s*("(?:[^"\\]|\\.){{0,{_MAX_UNITS}}}("?))'.encode(), re.DOTALL)


def expressions_in(texts: Iterable[bytes], source: object) -> set[str]:
    """The expressions in tokenizers in JSON; one that is too long raises as below."""
    found = set()
    for text in texts:
        for written, end in _FOUND.findall(text):
            if not end:
                raise _too_many(source, f"more than {_MAX_CHARACTERS} characters", str(written))
            with contextlib.suppress(ValueError):  # No JSON, so no tokenizer.
                found.add(json.loads(written))
    return found


def check_expressions(expressions: Iterable[str], source: object) -> None:
    """Raises CheckpointError for one that takes too long; errors name ``source``."""
    unknown = tuple(sorted(set(expressions) - known_expressions()))
    if len(unknown) > _MAX_EXPRESSIONS:
        raise CheckpointError(
            f"{source}: the tokenizer has {len(unknown)} regular expressions, more than "
            f"{_MAX_EXPRESSIONS}"
        )
    for expression in unknown:
        if len(expression) > _MAX_CHARACTERS:
            raise _too_many(source, f"more than {_MAX_CHARACTERS} characters", expression)
        if len(set(expression)) > _MAX_DIFFERENT:
            raise _too_many(source, f"more than {_MAX_DIFFERENT} different characters", expression)
    if unknown and (problem := _try(unknown)) is not None:
        raise CheckpointError(f"{source}: {problem}")


@functools.cache
def known_expressions() -> frozenset[str]:
    from .gguf.tokenizer import EXPRESSIONS

    return EXPRESSIONS | {_DEMO}


def backend_expressions(tokenizer: Any, source: object) -> set[str]:
    """Those that a loaded tokenizer has, whichever file they came from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "decoder"))
    return expressions_in((part.__getstate__() for part in parts if part is not None), source)


def _too_many(source: object, what: str, expression: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: a regular expression of the tokenizer has {what}: {_shown(expression)}"
    )


def _shown(expression: str) -> str:
    return repr(expression if len(expression) <= 100 else expression[:100] + "...")


@functools.lru_cache(maxsize=64)
def _try(expressions: tuple[str, ...]) -> str | None:
    """What is wrong with one of them; None: nothing."""
    order = {
        "seconds": MAX_SECONDS,
        "path": sys.path,
        "expressions": expressions,
    }
    if not sys.executable:
        raise ModelSerializerException(
            "a tokenizer has regular expressions that are tried in a process of its own, but "
            "sys.executable does not say where Python is"
        )
    try:
        child = subprocess.run(
            # Nothing of the environment decides what is imported; the path comes with the order.
            [sys.executable, "-I", tokenizer_expression_trial.__file__],
            input=json.dumps(order).encode(),
            capture_output=True,
            timeout=_MAX_WALL_SECONDS,
            check=False,
        )
        output, code = child.stdout, child.returncode
        errors = child.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired as error:
        output, code, errors = error.stdout or b"", -1, []
    progress = output.decode().split()
    if progress[-1:] == ["all"]:
        return None
    if not progress:
        why = errors[-1] if errors else f"it ended with {code}"
        raise ModelSerializerException(f"a tokenizer's regular expressions cannot be tried: {why}")
    expression = _shown(expressions[int(progress[-1])])
    if code > 0:  # It says itself what is wrong.
        return f"the tokenizer's regular expression {expression} fails: {errors[-1]}"
    return (
        f"the tokenizer's regular expression {expression} takes more than {MAX_SECONDS} s for "
        f"texts of {tokenizer_expression_trial.LONG} characters"
    )

"""Refuses the regular expressions of a tokenizer that would take too long on some text.

A ``tokenizer.json`` brings expressions, and the package 'tokenizers' runs them by backtracking: an
expression can be made so that a short text takes hours. Expressions of published tokenizers are
known. Any other is tried first, in a process of its own that may be killed, on texts that make
backtracking explode: long runs of one character, of two, of words, taken from the expression
itself. That is a trial and no proof: an expression that is slow on a rarer text alone passes.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .errors import CheckpointError, ModelSerializerException

# Of CPU time, for all expressions of a tokenizer. Published ones take 0.1 to 2 s.
MAX_SECONDS = 10
_MAX_WALL_SECONDS = 120  # On a machine that is busy with something else.
# DeepSeek's longest has some 300 characters, 200 different ones. How many texts there are grows
# with them.
_MAX_CHARACTERS, _MAX_DIFFERENT = 4000, 300
_LONG, _SHORT = 4000, 200  # Characters of a text.

# A key may be written with escapes.
_KEY = "".join(rf"(?:{letter}|\\u00{ord(letter):02x})" for letter in "Regex")
_FOUND = re.compile(rf'"{_KEY}"\s*:\s*("(?:[^"\\]|\\.)*")'.encode(), re.DOTALL)
_ESCAPED = re.compile(r"\\x\{?([0-9A-Fa-f]{1,6})\}?|\\u([0-9A-Fa-f]{4})")
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\.")
# One or more of each class of characters that expressions tell apart.
_CHARACTERS = "aAz0 \n\t\xa0\u2028'!,_-=.\xe9\u0301\u0660\u3042\uac00\u65e5\u0e01\U0001f642"

_CHILD = """
import json, resource, sys
order = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (order["seconds"],) * 2)
sys.path[:] = order["path"]
try:
    from tokenizers import Regex, pre_tokenizers
except ImportError as error:
    sys.exit(f"tokenizers cannot be imported: {error}")
for number, (expression, texts) in enumerate(order["trials"]):
    print(number, flush=True)
    try:
        split = pre_tokenizers.Split(Regex(expression), "removed")
        for text in texts:
            split.pre_tokenize_str(text)
    except BaseException as error:
        sys.exit(str(error))
print("all", flush=True)
"""


def expressions_in(*texts: bytes) -> set[str]:
    """The expressions in tokenizers in JSON."""
    return {json.loads(found) for text in texts for found in _FOUND.findall(text)}


def check_expressions(expressions: Iterable[str], source: object) -> None:
    """Raises CheckpointError for one that takes too long; errors name ``source``."""
    unknown = tuple(sorted(set(expressions) - known_expressions()))
    for expression in unknown:
        for count, most, what in (
            (len(expression), _MAX_CHARACTERS, "characters"),
            (len(set(expression)), _MAX_DIFFERENT, "different characters"),
        ):
            if count > most:
                raise CheckpointError(
                    f"{source}: a regular expression of the tokenizer has {count} {what}, more "
                    f"than {most}: {_shown(expression)}"
                )
    if unknown and (problem := _try(unknown)) is not None:
        raise CheckpointError(f"{source}: {problem}")


@functools.cache
def known_expressions() -> frozenset[str]:
    from .gguf.tokenizer import EXPRESSIONS

    return EXPRESSIONS


def backend_expressions(tokenizer: Any) -> set[str]:
    """Those that a loaded tokenizer has, whichever file they came from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "decoder"))
    return expressions_in(*(part.__getstate__() for part in parts if part is not None))


def texts_for(expression: str) -> Iterator[str]:
    """Texts that make backtracking explode: runs, and an end that does not match. Then comes what
    the expression has itself, since a text without a letter that every match needs is not tried.
    """
    escaped = ("".join(groups) for groups in _ESCAPED.findall(expression))
    own = {chr(code) for text in escaped if (code := int(text, 16)) <= sys.maxunicode}
    plain = _CLASS.sub("", _ESCAPED.sub("", expression))
    characters = sorted({*own, *plain, *_CHARACTERS})
    characters = [char for char in characters if not "\ud800" <= char <= "\udfff"]
    needed = "".join(characters)
    for char in characters:
        yield char * _LONG
        for end in ("\0", " ", "a"):
            yield char * _LONG + end + needed
    for char in characters[:100]:
        for other in characters[:100]:
            yield (char + other) * (_SHORT // 2) + "\0" + needed
    for word in sorted(set(re.findall(r"\w{2,}", plain))):
        yield word * (_LONG // len(word)) + "\0" + needed


def _shown(expression: str) -> str:
    return repr(expression if len(expression) <= 100 else expression[:100] + "...")


@functools.lru_cache(maxsize=64)
def _try(expressions: tuple[str, ...]) -> str | None:
    """What is wrong with one of them; None: nothing."""
    order = {
        "seconds": MAX_SECONDS,
        "path": sys.path,
        "trials": [(expression, list(texts_for(expression))) for expression in expressions],
    }
    if not sys.executable:
        raise ModelSerializerException(
            "a tokenizer has regular expressions that are tried in a process of its own, but "
            "sys.executable does not say where Python is"
        )
    try:
        child = subprocess.run(
            # Nothing of the environment decides what is imported; the path comes with the order.
            [sys.executable, "-I", "-c", _CHILD],
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
        f"texts of {_LONG} characters or less"
    )

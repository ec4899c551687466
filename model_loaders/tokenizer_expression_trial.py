"""A program of its own: runs regular expressions of a tokenizer on texts that make backtracking
explode, until it is through or killed. tokenizer_expressions.py starts it and says why.

It reads its order from stdin, and prints the number of each expression that it begins, then "all".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

LONG, _SHORT = 4000, 200  # Characters of a text.

_ESCAPED = re.compile(r"\\x\{?([0-9A-Fa-f]{1,6})\}?|\\u([0-9A-Fa-f]{4})")
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\.")
# One or more of each class of characters that expressions tell apart.
_CHARACTERS = "aAz0 \n\t\xa0\u2028'!,_-=.\xe9\u0301\u0660\u3042\uac00\u65e5\u0e01\U0001f642"


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
        yield char * LONG
        for end in ("\0", " ", "a"):
            yield char * LONG + end + needed
    for char in characters[:100]:
        for other in characters[:100]:
            yield (char + other) * (_SHORT // 2) + "\0" + needed
    for word in sorted(set(re.findall(r"\w{2,}", plain))):
        yield word * (LONG // len(word)) + "\0" + needed


def main() -> None:
    import resource

    order = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (order["seconds"],) * 2)
    sys.path[:] = order["path"]
    try:
        from tokenizers import Regex, pre_tokenizers
    except ImportError as error:
        sys.exit(f"tokenizers cannot be imported: {error}")
    for number, expression in enumerate(order["expressions"]):
        print(number, flush=True)
        try:
            split = pre_tokenizers.Split(Regex(expression), "removed")
            for text in texts_for(expression):
                split.pre_tokenize_str(text)
        except BaseException as error:  # also the exception of a panic
            sys.exit(str(error))
    print("all", flush=True)


if __name__ == "__main__":
    main()

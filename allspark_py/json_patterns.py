"""The patterns of JSON Schema, expressions of ECMA 262, in the grammar compiler's syntax.

Both have the same operators. They differ in what `.`, `\\s` and classes mean: for the compiler `.`
takes all line ends but one, `\\s` another two characters, and a class may hold classes, differences
and intersections. (`\\d` and `\\w` are ASCII's for the compiler, too.)
"""

from __future__ import annotations

import re

# ECMA 262, section 22.2.2: LineTerminator, and WhiteSpace with it.
_DOT = r"[^\n\r\u2028\u2029]"
_SPACES = r"\t-\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_ANY = r"\x00-\u{10ffff}"

_PARTS = re.compile(
    r"\\(?P<escape>.)|(?P<dot>\.)|\[(?P<negated>\^?)(?P<members>(?:\\.|[^\]\\])*)\]", re.DOTALL
)
_MEMBERS = re.compile(
    r"\\(?:[ux]\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)|.", re.DOTALL
)
_SETS = tuple("\\" + letter for letter in "sSdDwWpP")
# In a class of the compiler: a class, or an operator where there are two of them.
_OPERATORS = frozenset("[&~-")


def from_ecma(pattern: str) -> str:
    """The pattern in the compiler's syntax."""
    return _PARTS.sub(_part, pattern)


def _part(found: re.Match[str]) -> str:
    if found["dot"]:
        return _DOT
    if found["members"] is not None:
        # Without members: no character, or negated all of them.
        members = _members(_MEMBERS.findall(found["members"]))
        if members:
            return f"[{found['negated']}{members}]"
        return f"[{_ANY}]" if found["negated"] else f"[^{_ANY}]"
    return _set(found[0], f"[{_SPACES}]")


def _set(escape: str, spaces: str) -> str:
    return {r"\s": spaces, r"\S": f"[^{_SPACES}]"}.get(escape, escape)


def _members(members: list[str]) -> str:
    written = []
    at = 0
    while at < len(members):
        ends = members[at : at + 3 : 2]
        if members[at + 1 : at + 2] == ["-"] and len(ends) == 2 and not _has_set(ends):
            written.append("-".join(map(_member, ends)))
            at += 3
        else:
            written.append(_member(members[at]))
            at += 1
    return "".join(written)


def _has_set(members: list[str]) -> bool:
    return any(member.startswith(_SETS) for member in members)


def _member(member: str) -> str:
    return "\\" + member if member in _OPERATORS else _set(member, _SPACES)

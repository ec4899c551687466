"""The documents use the glossary's words, and short sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("csrc/**/README.md")])
PAGES.remove(ROOT / "CHANGELOG.md")  # entries of earlier versions stay as they were written
MAX_WORDS = 34  # of a sentence


def prose(path: Path) -> list[str]:
    """The paragraphs, list items and table cells of a page, without code and link targets."""
    text = re.sub(r"```.*?```", "\n\n", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # A list of names is read as one.
    text = re.sub(r"`[^`\n]*`(?: \([^()]*\))?(?:,\s+`[^`\n]*`(?: \([^()]*\))?)*", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )", text):
        if block.lstrip().startswith("|"):
            parts += [cell.strip() for row in block.split("\n") for cell in row.split("|")]
        else:
            parts.append(" ".join(block.split()))
    return [part for part in parts if part]


def sentences(path: Path) -> list[str]:
    """Parts between full stops, colons and semicolons; a list of many names counts as one."""
    text = [re.sub(r"(?:[^\s,;]+(?: [^\s,;]+){0,3}, ){6,}", "LIST ", part) for part in prose(path)]
    return [s for part in text for s in re.split(r"(?<=[.!?:;])\s+", part)]


def avoided_words() -> list[str]:
    rows = [row for row in GLOSSARY.read_text().split("\n") if row.startswith("|")]
    return [word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row.split("|")[-2])]


def test_the_glossary_lists_words_to_avoid():
    assert len(avoided_words()) >= 5


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_word_per_concept(path):
    if path == GLOSSARY:
        return
    text = "\n".join(prose(path)).lower()
    found = [word for word in avoided_words() if re.search(rf"\b{word.lower()}s?\b", text)]
    assert not found, f"{path.name} uses {found}: docs/glossary.md has the word for it"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_read_once(path):
    long = [s for s in sentences(path) if len(s.split()) > MAX_WORDS]
    assert not long, f"{path.name}: {len(long)} sentences of more than {MAX_WORDS} words: {long}"

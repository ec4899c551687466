"""The programs that slow tests compare with are those that scripts/oracles.sh installs."""

from __future__ import annotations

import re


def test_what_tests_ask_for_is_installed(repo_root):
    """A test that asks for another name would be skipped forever."""
    script = (repo_root / "scripts" / "oracles.sh").read_text()
    (names,) = re.findall(r"^all=\((.*)\)$", script, re.MULTILINE)
    tests = [path.read_text() for path in (repo_root / "tests" / "python").rglob("*.py")]
    asked = {name for text in tests for name in re.findall(r'environment\("([\w-]+)"\)', text)}
    assert asked == set(names.split())
    assert asked == set(re.findall(r"^install_([\w-]+)\(\)", script, re.MULTILINE))

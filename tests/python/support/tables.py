"""Tables of the documents that tests hold to what they measure."""

from __future__ import annotations

import re


def held_table(page, test):
    """{row: numbers} of the table of ``page`` that says that it is held to the test file ``test``.
    Of a cell with a standard error both are numbers; percent signs are left out."""
    (table,) = re.findall(
        rf"<!-- Held to tests/python/{re.escape(test)}. -->(.*?)<!-- Its end. -->",
        page.read_text("utf-8"),
        re.S,
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: _numbers(cells) for name, *cells in rows[1:]}


def _numbers(cells):
    return tuple(float(part.strip("% |")) for cell in cells for part in cell.split("±"))

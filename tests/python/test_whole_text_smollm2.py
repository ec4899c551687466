"""What forms of SmolLM2 cost on the whole of WikiText-2's test text: the third table of
docs/quantization.md about it. More than an hour on two cores.
"""

from __future__ import annotations

import pytest

pytest.importorskip("allspark._allspark")

from allspark.eval import compare_all  # noqa: E402
from support.smollm2 import (  # noqa: E402
    OPENED,
    Forms,
    check_figures,
    divergence,
    documented,
    rise,
)

# Row -> (the row that it is compared with, the most of that one's KL divergence that is left).
BARS = {
    "int8, A8": ("int8, A8, one scale per token: `rtn`", 0.3),
    "int8, A8: `rtn`, smoothed": ("int8, A8, one scale per token: `rtn`", 0.2),
    "`awq+gptq`": ("uint4, groups of 64: `rtn`", 0.35),
    "`awq+gptq`, 5.3 bits": ("uint4, groups of 64: `rtn`", 0.22),
    "int4, `awq+gptq`": ("int4, groups of 32: `rtn`", 0.4),
}
ROWS = list(dict.fromkeys(row for bar in BARS.items() for row in (bar[1][0], bar[0])))


OWN = "test_whole_text_smollm2.py"


def test_the_table_has_every_form(repo_root):
    assert list(documented(repo_root, OWN)) == ROWS


@pytest.fixture(scope="module")
def found(shared_data, tmp_path_factory):
    """{row: Comparison}: all forms are open together, since float32 takes longest."""
    texts = shared_data / "text"
    forms = Forms(tmp_path_factory.mktemp("smollm2"), texts / "wikitext2_valid.txt")
    models = [forms.opened(row) if row in OPENED else forms.quantised(row) for row in ROWS]
    comparisons = compare_all(models, forms.exact, texts / "wikitext2_test.txt")
    for model in (*models, forms.exact):
        model.close()
    return dict(zip(ROWS, comparisons, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("row", ROWS)
def test_a_form_costs_what_the_table_says(found, repo_root, row):
    check_figures(row, found[row], documented(repo_root, OWN)[row], change_within=2)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("row", BARS)
def test_a_part_of_what_rounding_costs_is_left(found, row):
    rounded, most = BARS[row]
    assert divergence(found[row]) <= most * divergence(found[rounded])


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_perplexity_rises_by_less_than_half(found):
    assert rise(found["`awq+gptq`"]) <= 0.45 * rise(found["uint4, groups of 64: `rtn`"])

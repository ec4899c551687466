"""Metrics: text and collector agree, follow Prometheus' format, and are right."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from allspark import RequestStatInfo, metrics
from engine_fixture import GREEDY, install_engine, read_all, start_engine

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client import parser  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine, _ = start_engine(checkpoint)
    for length in (1, 5, 30):
        _, _, queue = engine.start_request_ids("m", None, list(range(length)), GREEDY)
        assert len(read_all(queue)) == 8
    engine.stop_model("m")  # from now on nothing changes
    return engine


def samples_of(families) -> dict:
    """{(name, labels): value} of a parser's result."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_text_is_prometheus_own(engine):
    registry = prometheus_client.CollectorRegistry()
    metrics.register(engine, registry)
    theirs = prometheus_client.generate_latest(registry).decode()
    families = list(parser.text_string_to_metric_families(engine.metrics_text()))
    ours, expected = samples_of(families), samples_of(
        parser.text_string_to_metric_families(theirs)
    )
    assert ours == expected
    assert [(f.name, f.type, f.documentation) for f in families] == [
        (f.name, f.type, f.documentation) for f in parser.text_string_to_metric_families(theirs)
    ]


def test_values(engine):
    values = samples_of(parser.text_string_to_metric_families(engine.metrics_text()))
    stat = engine.get_as_engine_stat("m")
    model = ("model", "m")
    assert values["allspark_generated_tokens_total", (model,)] == 24 == stat.total_generated_token
    assert values["allspark_prompt_tokens_sum", (model,)] == 36
    assert values["allspark_prompt_tokens_bucket", (("le", "8.0"), model)] == 2
    finished = "allspark_requests_finished_total"
    assert values[finished, (model, ("reason", "length"))] == 3 == stat.finished_length
    assert values[finished, (model, ("reason", "error"))] == 0
    assert values["allspark_inter_token_seconds_count", (model,)] == 21
    assert values["allspark_kv_blocks", (model,)] == stat.total_span


def test_names_follow_the_conventions(engine):
    for name, text, kind, _, samples in engine._native.metrics():
        assert name.startswith("allspark_") and text.endswith(".") and samples
        assert name.endswith("_total") == (kind == "counter"), name
        assert not name.endswith(("_ms", "_percentage")), "base units"


def test_the_document_names_everything(engine):
    names = [name for name, *_ in engine._native.metrics()]
    names += engine.get_as_engine_stat("m").to_dict()
    names += [key.value for key in RequestStatInfo.Key]
    assert not [name for name in names if f"`{name}`" not in DOCUMENT.read_text()]


def test_the_collector_does_not_keep_the_engine_alive(checkpoint):
    engine, _ = install_engine(checkpoint)
    collector = metrics.EngineCollector(engine)
    assert list(collector.collect())
    del engine
    assert not list(collector.collect())


def test_without_models_there_is_nothing():
    from allspark import Engine

    engine = Engine()
    assert engine.metrics_text() == "" and not list(metrics.EngineCollector(engine).collect())


def test_the_client_is_imported_when_needed_and_named_when_missing():
    code = """
        import sys
        sys.modules["prometheus_client"] = None  # as if it were not installed
        from allspark import Engine, metrics
        engine = Engine()
        assert engine.metrics_text() == ""
        try:
            metrics.register(engine)
        except ImportError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert "allspark.metrics needs the extra 'metrics' (docs/" in result.stdout, result.stderr


def test_engine_stat_has_the_ancestors_forms(engine):
    stat = engine.get_as_engine_stat("m")
    texts = stat.dict()
    assert all(isinstance(text, str) for text in texts.values())
    assert set(texts) - {"pendding_request"} == set(stat.to_dict())
    assert texts["pendding_request"] == texts["pending_request"] == "0"
    assert stat.pendding_request == 0 and "total_span=" in stat.ToString()

"""A collector for prometheus_client over an engine's metrics.

The names and their meaning are the engine's (docs/observability.md). prometheus_client is imported
when the collector is used; `Engine.metrics_text()` does not need it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from allspark.error_text import needs_extra

if TYPE_CHECKING:
    from allspark.engine import Engine


def _prometheus_core() -> Any:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise ImportError(needs_extra("allspark.metrics", "metrics")) from error
    return core


class EngineCollector:
    """Gives the metrics of all models of an engine to a registry of prometheus_client.

    It does not keep the engine alive; once the engine is gone there are no metrics.
    """

    def __init__(self, engine: Engine):
        self._core = _prometheus_core()
        self._engine = weakref.ref(engine)

    def collect(self) -> Iterator[Any]:
        """The metric families, as prometheus_client's registries ask for them."""
        engine = self._engine()
        if engine is None:
            return
        for name, text, kind, bounds, samples in engine._native.metrics():
            labels = list(samples[0][0])
            family = getattr(self._core, f"{kind.capitalize()}MetricFamily")(
                name, text, labels=labels
            )
            for values, value, buckets in samples:
                if kind == "histogram":
                    limits = [*(repr(float(bound)) for bound in bounds), "+Inf"]
                    family.add_metric(
                        list(values.values()), list(zip(limits, buckets, strict=True)), value
                    )
                else:
                    family.add_metric(list(values.values()), value)
            yield family


def register(engine: Engine, registry: Any = None) -> EngineCollector:
    """Adds the engine to a registry, by default prometheus_client's own. Returns the collector,
    which can be passed to `registry.unregister`.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    collector = EngineCollector(engine)
    (registry or _prometheus_core().REGISTRY).register(collector)
    return collector

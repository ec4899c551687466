"""Catalog: the models of a server by the names that requests use."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from allspark.pipeline.served_model import ServedModel
from allspark.serve.errors import invalid_value, model_not_found


@dataclass(frozen=True)
class Entry:
    """A model, or an adapter of one, under a name of its own."""

    name: str
    model: ServedModel
    adapter: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def adapter_digest(self) -> str | None:
        """Of the adapter's files; None for a model."""
        return None if self.adapter is None else self.model.adapter_digests.get(self.adapter)

    @property
    def root(self) -> str:
        """The model that it is, or is an adapter of."""
        return self.model.name


class Catalog:
    """The entries of a server. Changed on the event loop alone."""

    def __init__(self, models: list[ServedModel]):
        self._entries: dict[str, Entry] = {}
        for model in models:
            self._add(Entry(model.name, model))
            for adapter in model.adapters:
                self.add_adapter(model, adapter)

    def _add(self, entry: Entry) -> None:
        if entry.name in self._entries:
            raise ValueError(f"two models have the name {entry.name!r}; give one another")
        self._entries[entry.name] = entry

    def add_adapter(self, model: ServedModel, adapter: str) -> None:
        """Makes a loaded adapter known by its name."""
        self._add(Entry(adapter, model, adapter))

    def remove_adapter(self, model: ServedModel, adapter: str) -> None:
        """Forgets an adapter."""
        entry = self._entries.get(adapter)
        if entry is not None and entry.model is model:
            del self._entries[adapter]

    @property
    def entries(self) -> list[Entry]:
        """All of them, in the order in which they came."""
        return list(self._entries.values())

    @property
    def models(self) -> list[ServedModel]:
        """The models without their adapters."""
        return [entry.model for entry in self.entries if entry.adapter is None]

    def get(self, name: str | None) -> Entry:
        """The entry of a request's `model`; where there is one model, it may be left out.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            models = [entry for entry in self.entries if entry.adapter is None]
            if len(models) == 1:
                return models[0]
            raise invalid_value("model is missing", "model")
        entry = self._entries.get(name)
        if entry is None:
            raise model_not_found(name, list(self._entries))
        return entry

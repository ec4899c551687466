"""ServerState: what all routes of a server share."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from allspark.detokenizer import open_decoding
from allspark.grammar_compiler import Compiler
from allspark.serve.catalog import Catalog, Entry
from allspark.serve.fields import sampling_defaults
from allspark.serve.responses.library import Library
from allspark.serve.sessions import Sessions
from allspark.serve.settings import ServerSettings

if TYPE_CHECKING:
    from allspark.serve.batches.service import Batches


@dataclass
class ServerState:
    """Models, settings, and what runs. Used on the event loop alone.

    Raises:
        ValueError: a setting of the stored responses is wrong.
    """

    catalog: Catalog
    settings: ServerSettings = field(default_factory=ServerSettings)
    is_draining: bool = False  # a shutdown has begun
    is_sleeping: bool = False  # the models' memory was given back
    num_running: int = 0  # requests that are being answered
    sessions: Sessions = field(init=False)
    batches: Batches | None = None  # None: without the routes of files and batches
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    responses: Library = field(init=False)
    # By the name of an entry and the digest of its adapter, which may be loaded anew.
    _fingerprints: dict[tuple[str, str | None], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._idle.set()
        self.responses = Library(self.settings)
        settings = self.settings
        for model in self.catalog.models:
            Compiler.limit(model.tokenizer, settings.schema_timeout)
            open_decoding(model.tokenizer)  # what it needs once, not in the first request
        for entry in self.catalog.entries:
            self.fingerprint(entry)  # likewise
        self.sessions = Sessions(
            settings.max_sessions, settings.max_session_bytes, settings.session_timeout
        )

    def begin(self) -> None:
        """A request begins to be answered."""
        self.num_running += 1
        self._idle.clear()

    def end(self) -> None:
        """A request was answered."""
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    async def idle(self) -> None:
        """Returns when no request is being answered."""
        await self._idle.wait()

    def fingerprint(self, entry: Entry) -> str:
        """A digest of all that the bits of an answer depend on, beside the request."""
        key = (entry.name, entry.adapter_digest)
        if key not in self._fingerprints:
            self._fingerprints[key] = _fingerprint(entry, self.settings)
        return self._fingerprints[key]


def _fingerprint(entry: Entry, settings: ServerSettings) -> str:
    model = entry.model
    info = model.engine.get_as_model_info(model.name)
    factor = model.config.rope_scaling_factor
    facts: list[Any] = [
        model.engine.get_version_full(),
        model.engine.get_as_engine_stat(model.name).kernel_table,
        info.model_digest,
        info.cache_mode.name,
        # How far the factor stretches follows from the length; without it that changes no bit.
        factor and (factor, model.session_len),
        model.config.use_logn_attn,
        model.end_ids,
        model.tokenizer_digest,
        model.template.settings(),
        entry.adapter_digest,
        sorted(sampling_defaults(entry, settings).items()),
        settings.tool_call_parser,
        settings.reasoning_parser,
    ]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"fp_{digest[:16]}"

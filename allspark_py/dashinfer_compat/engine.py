"""Engine with the calls that only DashInfer scripts make."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import allspark.engine
import allspark.request_stat
from allspark._allspark import (
    AsStatus,
    GeneratedElements,
    GenerateRequestStatus,
    __version__,
)
from allspark.dashinfer_compat.capsule import read_capsule
from allspark.dashinfer_compat.generation_config import to_fields
from allspark.dashinfer_compat.result_queue import ResultQueue, TextQueue
from allspark.dashinfer_compat.vocabulary import PlainVocabulary, Vocabulary
from allspark.error_text import wrong_type
from allspark.errors import AllSparkError
from allspark.input_ids import is_capsule
from allspark.not_served import not_served
from allspark.request_starts import Started
from allspark.statuses import Handles, flattened


@dataclass(frozen=True)
class AsFileInfo:
    """Which versions of allspark wrote a model's files, and which one reads them."""

    create_version_graph: str = ""
    create_version_param: str = ""
    current_version_engine: str = ""


class RequestStatInfo(allspark.request_stat.RequestStatInfo):
    def __init__(self, info_dict: dict[str, int]):
        super().__init__(info_dict)


class _Tokenizer:
    """The part of a loader that start_request_ids uses."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Any:
        return self._tokenizer


class Engine(allspark.engine.Engine):
    """allspark's Engine; the statuses of its queues wait for their readers (result_queue.py)."""

    _queue_types = (ResultQueue, TextQueue)

    def __init__(self) -> None:
        super().__init__()
        # By model and request.
        self._queues: weakref.WeakValueDictionary[tuple[str, int], ResultQueue] = (
            weakref.WeakValueDictionary()
        )
        self._queues_lock = threading.Lock()
        # The vocabulary of the last request that had one. DashInfer keeps the first of a process.
        self._vocabulary: Vocabulary | PlainVocabulary | None = None

    # -- requests ------------------------------------------------------------------------------

    def start_request(
        self, model_name: str, inputs: dict[str, Any], generate_config: Any = None
    ) -> Started:
        """As allspark's; a capsule can be used more than once."""
        if isinstance(inputs, Mapping) and is_capsule(inputs.get("input_ids")):
            inputs = {**inputs, "input_ids": read_capsule(inputs["input_ids"])}
        return super().start_request(model_name, inputs, generate_config)

    def start_request_ids(
        self, model_name: str, model: Any, input_ids: Any, generate_config_builder: Any = None
    ) -> Started:
        """As allspark's; without a loader, response_format uses the config's `vocab`."""
        try:
            fields = to_fields(generate_config_builder)
            if isinstance(fields, dict):
                tokens = fields.pop("vocab", None)
                if model is None and fields.get("response_format") is not None:
                    model = self._loader_of(tokens, fields.get("eos_token_id", -1))
        except (NotImplementedError, TypeError, ValueError) as error:
            return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None
        started = super().start_request_ids(model_name, model, input_ids, fields)
        if started[0] == AsStatus.ALLSPARK_SUCCESS:
            queues = started[2] if isinstance(started[2], list) else [started[2]]
            with self._queues_lock:
                self._queues.update({(model_name, queue.request_id): queue for queue in queues})
        return started

    def _loader_of(self, tokens: Mapping[str, int] | None, eos_token_id: int) -> Any:
        """An object with the tokenizer of a vocabulary; None: the last vocabulary given."""
        vocabulary = self._vocabulary
        if isinstance(tokens, Vocabulary):
            vocabulary = tokens
        elif isinstance(tokens, Mapping):
            if not isinstance(vocabulary, PlainVocabulary) or vocabulary.tokens != tokens:
                vocabulary = PlainVocabulary(dict(tokens))
        elif tokens is not None:
            expected = "a dict of tokens to ids, as a tokenizer's get_vocab() gives it"
            raise wrong_type("vocab", tokens, expected)
        self._vocabulary = vocabulary
        if isinstance(vocabulary, PlainVocabulary):
            return _Tokenizer(vocabulary.ended_by(eos_token_id))
        if vocabulary is None:
            raise ValueError(
                "response_format needs the tokens: 'vocab' in the config, a tokenizer's "
                "get_vocab(), or the loader as model of start_request_ids"
            )
        return vocabulary

    def process_json_mode_arguments(self, generate_config: dict[str, Any]) -> None:
        """Does nothing: each config may have its own vocabulary."""

    def sync_request(
        self, model_name: str, request_handle: Handles | None = None, timeout_ms: int | None = None
    ) -> AsStatus:
        """As allspark's; afterwards the queues' statuses say that the requests ended."""
        status = super().sync_request(model_name, request_handle, timeout_ms)
        if status == AsStatus.ALLSPARK_SUCCESS:
            for queue in self._queues_of(model_name, request_handle):
                queue.know_end()
        return status

    def get_no_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """The new tokens of a queue; [] if there are none."""
        return _ids(result_queue.GetNoWait())

    def get_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """The new tokens of a queue, after waiting for at least one; [] at the end."""
        return _ids(result_queue.Get())

    def get_request_status(
        self, model_name: str, result_queue: ResultQueue
    ) -> GenerateRequestStatus:
        """The status of a queue."""
        return result_queue.GenerateStatus()

    # -- LoRA adapters -------------------------------------------------------------------------

    def load_lora(self, model_name: str, lora_name: str, lora: Any = None) -> AsStatus:
        """As allspark's; the name may also be the absolute path of a file `.aslora`."""
        if lora is None and os.path.isabs(lora_name) and lora_name.endswith(".aslora"):
            lora = lora_name
        return super().load_lora(model_name, lora_name, lora)

    # -- information ---------------------------------------------------------------------------

    def get_rank_id(self) -> int:
        """Always 0: one process computes."""
        return 0

    def is_allspark_work_as_service(self) -> bool:
        """Always False: there is no daemon."""
        return False

    def get_file_information(self, asgraph_path: str, asparam_path: str) -> AsFileInfo:
        """Versions of a model's files. Raises ValueError for files that do not belong together."""
        from allspark.model_loader.serialised import read_graph

        file = read_graph(Path(asgraph_path))
        num_bytes = Path(asparam_path).stat().st_size
        if num_bytes != file.param_bytes:
            raise ValueError(
                f"{asparam_path}: {num_bytes} bytes, {asgraph_path} says {file.param_bytes}"
            )
        return AsFileInfo(file.build.version, file.build.version, __version__.split("/")[0])

    def get_op_profiling_info(self, model_name: str) -> str:
        """As allspark's; without op_profiling, text that says how to switch it on."""
        try:
            return super().get_op_profiling_info(model_name)
        except AllSparkError as error:
            return str(error)

    def serialize_model_from_torch(self, *args: Any, **kwargs: Any) -> None:
        raise not_served("serialize_model_from_torch", "model loaders serialise checkpoints")

    def dump_build_meta_to_proto(self, *args: Any, **kwargs: Any) -> None:
        raise not_served("dump_build_meta_to_proto", "model loaders serialise checkpoints")

    def _queues_of(self, model_name: str, handles: Handles | None) -> list[ResultQueue]:
        if handles is None:  # Queues whose tokens somebody is fetching stay as they are.
            with self._queues_lock:
                queues = list(self._queues.items())
            of_model = [queue for (name, _), queue in queues if name == model_name]
            return [queue for queue in of_model if queue.finished and not queue.is_read]
        found = [self._queues.get((model_name, handle.id)) for handle in flattened(handles)]
        return [queue for queue in found if queue is not None]


def _ids(elements: GeneratedElements | None) -> list[int]:
    return [] if elements is None else elements.ids_from_generate

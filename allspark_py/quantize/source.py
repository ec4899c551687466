"""Opens what is quantised: checkpoints."""

from __future__ import annotations

from pathlib import Path

from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.quantized import stores_integers
from allspark.pipeline.model_source import model_name_of, open_loader


def open_checkpoint(
    model: str,
    name: str | None,
    data_type: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> HuggingFaceModel:
    """The loader of a checkpoint; `name` None: the last part of `model`.

    Raises:
        ValueError: it is a serialised model.
    """
    path = Path(model).expanduser()
    own = name or model_name_of(str(path.resolve()) if path.exists() else model)
    loader = open_loader(model, own, data_type, revision, download_dir, trust_remote_code)
    if not isinstance(loader, HuggingFaceModel):
        raise ValueError(f"{model} is serialised already; give its checkpoint")
    return loader


def check_floats(loader: HuggingFaceModel, otherwise: str = "") -> None:
    """Raises ValueError if any weight is quantised already; the message ends with what the caller
    can do `otherwise`."""
    if stores_integers(loader.checkpoint_tensors()):
        model = loader.pretrain_model_name_or_path
        raise ValueError(
            f"model is {model!r}, whose weights are quantised already; give the checkpoint that it "
            f"was made from{otherwise}"
        )


def check_output(output: str | Path, loader: HuggingFaceModel) -> Path:
    """The directory of a new model, which must not be that of the checkpoint (ValueError)."""
    path = Path(output).expanduser()
    source = loader.directory if loader.directory.is_dir() else loader.directory.parent
    if path.resolve() == source.resolve():
        raise ValueError(f"output is {str(output)!r}; it must be another directory than the model")
    return path

"""Opens what is quantised, checkpoints, and checks the directory of what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.quantized import stores_integers
from allspark.model_loader.serialised import weight_files
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


def check_serialised_target(directory: Path, loader: HuggingFaceModel) -> None:
    """Raises where the checkpoint's serialised model would not be alone in a directory, or would
    replace files of another one."""
    check_no_others(directory, [f"{loader.safe_model_name}.asgraph"])
    loader.check_target(directory)


def check_no_others(directory: Path, own: Sequence[str]) -> None:
    """Raises ValueError if a directory holds a model, or weights, other than the files `own`."""
    graphs = sorted(path.name for path in directory.glob("*.asgraph"))
    for name in [*graphs, *weight_files(directory)]:
        if name not in own:
            raise ValueError(
                f"output is {str(directory)!r}, which holds {name}, which loaders would mix up "
                f"with {own[0]}; remove it, or choose another directory"
            )

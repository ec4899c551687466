"""LMDeploy's tools by their names: auto_awq, auto_gptq, smooth_quant, blocked_fp8, calibrate.

Arguments, defaults and what they mean are LMDeploy's (docs/quantization.md). The models that they
write are this engine's. Arguments that only say how to compute have no effect: `batch_size`,
`device`, and `search_scale`, since AWQ always searches scales and the others never do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from allspark.eval.files import to_texts
from allspark.model_loader import HuggingFaceModel
from allspark.quantize.blocked_fp8 import blocked_fp8
from allspark.quantize.config import QuantizeConfig
from allspark.quantize.input_ranges import write_input_ranges
from allspark.quantize.quantizer import QuantizedModel, quantize_checkpoint
from allspark.quantize.source import check_output, open_checkpoint

DEFAULT_WORK_DIR = "./work_dir"
DEFAULT_DATASET = "wikitext2"
DEFAULT_SAMPLES = 128
DEFAULT_SEQLEN = 2048
_SMOOTH = 0.5
# How a data set's file may be called, after its name. The first that is there is read.
_ENDINGS = ("", ".txt", "_train.txt", "_valid.txt", "_test.txt")

__all__ = ["auto_awq", "auto_gptq", "blocked_fp8", "calibrate", "smooth_quant"]

Progress = Callable[[int, int], object]


def _silent(done: int, of: int) -> None:
    pass


def auto_awq(
    model: str,
    work_dir: str = DEFAULT_WORK_DIR,
    calib_dataset: str = DEFAULT_DATASET,
    calib_samples: int = DEFAULT_SAMPLES,
    calib_seqlen: int | None = None,
    batch_size: int = 1,
    search_scale: bool = False,
    w_bits: int = 4,
    w_sym: bool = False,
    w_group_size: int = 128,
    device: str = "cpu",
    dtype: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    *,
    calib_dir: str | None = None,
    progress: Progress = _silent,
    **fields: Any,
) -> QuantizedModel:
    """Quantises weights to 4 (or 8) bits by AWQ; without samples, by the search of scales.

    Args:
        calib_dataset: the path of a text, or the name of one in `calib_dir`.
        calib_seqlen: tokens of a sample; None: 2048, or the model's length if that is less.
        w_sym: int4 instead of uint4.
        fields: others of QuantizeConfig, as group_settings, modules_to_not_convert or requantize.

    Raises:
        TypeError, ValueError, OSError: as quantize_model. FileNotFoundError: there is no such text.
    """
    del batch_size, search_scale, device
    return _quantized(
        model,
        work_dir,
        calib_dataset,
        calib_dir,
        progress,
        _download(revision, download_dir, trust_remote_code),
        dtype,
        calib_samples=calib_samples,
        calib_seqlen=calib_seqlen,
        method="awq" if calib_samples else "search",
        weight_format=_weight_format(w_bits, symmetric=w_sym),
        group_size=w_group_size,
        **fields,
    )


def auto_gptq(
    model: str,
    work_dir: str = DEFAULT_WORK_DIR,
    calib_dataset: str = DEFAULT_DATASET,
    calib_samples: int = DEFAULT_SAMPLES,
    calib_seqlen: int | None = None,
    batch_size: int = 1,
    w_bits: int = 4,
    w_group_size: int = 128,
    dtype: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    *,
    calib_dir: str | None = None,
    progress: Progress = _silent,
    **fields: Any,
) -> QuantizedModel:
    """Quantises weights to int4 (or int8) by GPTQ; without samples, by the search of scales.
    Arguments and errors as those of auto_awq."""
    del batch_size
    return _quantized(
        model,
        work_dir,
        calib_dataset,
        calib_dir,
        progress,
        _download(revision, download_dir, trust_remote_code),
        dtype,
        calib_samples=calib_samples,
        calib_seqlen=calib_seqlen,
        method="gptq" if calib_samples else "search",
        weight_format=_weight_format(w_bits, symmetric=True),
        group_size=w_group_size,
        **fields,
    )


def smooth_quant(
    model: str,
    work_dir: str = DEFAULT_WORK_DIR,
    calib_dataset: str = DEFAULT_DATASET,
    calib_samples: int = DEFAULT_SAMPLES,
    calib_seqlen: int | None = None,
    batch_size: int = 1,
    search_scale: bool = False,
    device: str = "cpu",
    quant_dtype: str = "int8",
    dtype: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    *,
    calib_dir: str | None = None,
    progress: Progress = _silent,
    **fields: Any,
) -> QuantizedModel:
    """Quantises weights and activations to int8, smoothed with alpha 0.5; without samples, not
    smoothed. Arguments and errors as those of auto_awq."""
    del batch_size, search_scale, device
    if quant_dtype != "int8":
        raise ValueError(
            f"quant_dtype is {quant_dtype!r}; it must be 'int8', since the engine multiplies no "
            "float8 numbers"
        )
    return _quantized(
        model,
        work_dir,
        calib_dataset,
        calib_dir,
        progress,
        _download(revision, download_dir, trust_remote_code),
        dtype,
        calib_samples=calib_samples,
        calib_seqlen=calib_seqlen,
        method="rtn",
        weight_format="int8",
        group_size=0,
        compute_method="activate_quant",
        smooth=_SMOOTH if calib_samples else None,
        **fields,
    )


def calibrate(
    model: str,
    calib_dataset: str = DEFAULT_DATASET,
    calib_samples: int = DEFAULT_SAMPLES,
    calib_seqlen: int | None = None,
    work_dir: str = DEFAULT_WORK_DIR,
    device: str = "cpu",
    batch_size: int = 1,
    search_scale: bool = False,
    dtype: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    *,
    calib_dir: str | None = None,
    progress: Progress = _silent,
) -> Path:
    """Writes what each weight's input features are over a text: `inputs_stats.safetensors` in
    `work_dir`. Arguments and errors as those of auto_awq; `calib_samples` is at least 1."""
    del device, batch_size, search_scale
    download = _download(revision, download_dir, trust_remote_code)
    loader = open_checkpoint(model, None, _data_type(dtype), **download)
    output = check_output(work_dir, loader)
    texts = to_texts([dataset_file(calib_dataset, calib_dir)])
    length = _length(calib_seqlen, loader)
    return write_input_ranges(loader, output, texts, calib_samples, length, progress)


def dataset_file(name: str, folder: str | None) -> Path:
    """The text that a data set's name, or a path, means.

    Raises:
        FileNotFoundError: there is none; the message says what was looked for.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    where = Path(folder or ".").expanduser()
    candidates = [
        where / f"{name}{ending}{packed}" for ending in _ENDINGS for packed in ("", ".bz2")
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"calib_dataset is {name!r}; it must be the path of a text, or the name of one in "
        f"calib_dir, which is {str(where)!r}: {candidates[2].name}, for example"
    )


def _weight_format(bits: int, symmetric: bool) -> str:
    if bits not in (4, 8):
        raise ValueError(f"w_bits is {bits!r}; it must be 4 or 8")
    return f"int{bits}" if symmetric else f"uint{bits}"


def _data_type(dtype: str) -> str:
    return "bfloat16" if dtype == "auto" else dtype


def _quantized(
    model: str,
    work_dir: str,
    dataset: str,
    folder: str | None,
    progress: Progress,
    download: dict[str, Any],
    dtype: str,
    calib_seqlen: int | None,
    **fields: Any,
) -> QuantizedModel:
    data_type = _data_type(dtype)
    texts = [dataset_file(dataset, folder)] if fields["calib_samples"] else None
    loader = open_checkpoint(model, None, data_type, **download)
    length = _length(calib_seqlen, loader)
    config = QuantizeConfig(data_type=data_type, calib_seqlen=length, **fields)
    return quantize_checkpoint(loader, work_dir, config, texts, progress=progress)


def _length(given: int | None, loader: HuggingFaceModel) -> int:
    return min(DEFAULT_SEQLEN, loader.get_model_context_length()) if given is None else given


def _download(
    revision: str | None, download_dir: str | None, trust_remote_code: bool
) -> dict[str, Any]:
    return {
        "revision": revision,
        "download_dir": download_dir,
        "trust_remote_code": trust_remote_code,
    }

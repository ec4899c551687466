"""Writes the weights that common tools read from quantised checkpoints: `read_checkpoint.py
CHECKPOINT...` writes CHECKPOINT.safetensors beside each, in float32, computed as the tool does. A
checkpoint that it does not read leaves CHECKPOINT.error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file


def with_transformers(checkpoint):
    """transformers, for one of the formats with compressed-tensors."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    plain = {
        "compressed-tensors": CompressedTensorsConfig(run_compressed=False),
        "fp8": FineGrainedFP8Config(dequantize=True),
    }
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=plain[method_of(checkpoint)], dtype="auto"
    )
    return of_each_expert(model.state_dict())


def of_each_expert(weights):
    """Matrices of all experts in one tensor become those of each, as checkpoints have them."""
    found = {}
    for name, weight in weights.items():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".experts"):
            found[name] = weight
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, matrix in enumerate(weight):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{experts}.{expert}.{part}.weight"] = rows
    return found


def with_gptq_model(checkpoint):
    """GPTQModel, which also reads AWQ."""
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # It asks for that many, whatever there is.
    from gptqmodel import BACKEND, GPTQModel

    is_awq = method_of(checkpoint) == "awq"
    backend = BACKEND.TORCH_AWQ if is_awq else BACKEND.TORCH
    model = GPTQModel.load(str(checkpoint), backend=backend, device="cpu", dtype=torch.float16)
    weights = dict(model.model.state_dict())
    for name, module in model.model.named_modules():
        if hasattr(module, "qweight"):  # Its products with the rows of the unit matrix.
            unit = torch.eye(module.in_features, dtype=torch.float16)
            module.bias = None
            with torch.no_grad():
                weights[f"{name}.weight"] = module(unit).T
    return weights


def method_of(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    return config["quantization_config"]["quant_method"]


def is_packed(checkpoint):
    return method_of(checkpoint) in ("gptq", "awq")


def main():
    # GPTQModel changes transformers when it is imported.
    for checkpoint in sorted(map(Path, sys.argv[1:]), key=is_packed):
        try:
            read = with_gptq_model if is_packed(checkpoint) else with_transformers
            weights = read(checkpoint)
            weights = {n: v for n, v in weights.items() if n.endswith((".weight", ".bias"))}
            save_file(
                {n: v.float().contiguous() for n, v in weights.items()},
                f"{checkpoint}.safetensors",
            )
        except Exception:
            Path(f"{checkpoint}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()

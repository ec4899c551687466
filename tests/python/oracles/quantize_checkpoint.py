"""Quantises a checkpoint with common tools: `quantize_checkpoint.py CHECKPOINT OUT RECIPE...`
writes OUT/RECIPE as the tool saves it. Beside it, OUT/RECIPE.safetensors has the weights that the
tool itself reads from that, in float32. A recipe that fails leaves OUT/RECIPE.error.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

NUM_SAMPLES, LENGTH = 16, 64


def load(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")


def samples(model):
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, LENGTH)
    return torch.randint(3, model.config.vocab_size, shape, generator=generator)


def tokenizer(model):
    """A tokenizer, which the tools require; every token is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(token): token for token in range(model.config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0")


def save_weights(model, out):
    weights = {n: v for n, v in model.state_dict().items() if n.endswith(("weight", "bias"))}
    save_file({n: v.float().contiguous() for n, v in weights.items()}, f"{out}.safetensors")


# llm-compressor, which writes compressed-tensors.


def group(num_bits, group_size, symmetric=True, **fields):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=num_bits, strategy="group", group_size=group_size, symmetric=symmetric, **fields
    )
    return {"config_groups": {"g": QuantizationScheme(targets=["Linear"], weights=weights)}}


def scheme(name):
    return {"targets": "Linear", "scheme": name}


MIXED = {
    "FP8_DYNAMIC": ["re:.*down_proj"],
    "W4A8": ["re:.*self_attn.*"],
    "NVFP4A16": ["Linear"],
}


def compress(modifier, settings, calibrate=False):
    def run(checkpoint, out):
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers import quantization
        from transformers import CompressedTensorsConfig

        model = load(checkpoint)
        recipe = getattr(quantization, modifier)(**settings(), ignore=["lm_head"])
        options = {}
        if calibrate:
            ids = samples(model).tolist()
            options = {
                "dataset": Dataset.from_dict(
                    {"input_ids": ids, "attention_mask": [[1] * LENGTH for _ in ids]}
                ),
                "processor": tokenizer(model),
                "num_calibration_samples": NUM_SAMPLES,
                "max_seq_length": LENGTH,
            }
        oneshot(model=model, recipe=recipe, **options)
        model.save_pretrained(out)
        plain = CompressedTensorsConfig(run_compressed=False)
        model = AutoModelForCausalLM.from_pretrained(out, quantization_config=plain, dtype="auto")
        save_weights(model, out)

    return run


# AutoRound, which writes the formats of AutoGPTQ and AutoAWQ, and its own.

MIXED_LAYERS = {
    "down_proj": {"bits": 8, "group_size": 64},
    "model.layers.0.self_attn.o_proj": {"bits": 16},
}


def auto_round(kind, iters=0, **settings):
    def run(checkpoint, out):
        from auto_round import AutoRound

        model = load(checkpoint).half()
        inputs = list(samples(model).split(1))
        # Without amp it computes in float32; with it, in a type that the processor decides.
        rounder = AutoRound(
            model, tokenizer(model), iters=iters, disable_opt_rtn=True, amp=False, device_map="cpu",
            dataset=inputs, nsamples=NUM_SAMPLES, seqlen=LENGTH, **settings,
        )  # fmt: skip
        rounded, _ = rounder.quantize()
        save_weights(rounded, out)
        rounder.save_quantized(str(out), format=kind)

    return run


# GPTQModel, for act order, which the others do not write.


def gptq_model(**settings):
    def run(checkpoint, out):
        os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # It asks for that many, whatever there is.
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

        words = tokenizer(load(checkpoint))
        words.save_pretrained(checkpoint)
        config = QuantizeConfig(**settings, act_group_aware=False, offload_to_disk=False)
        model = GPTQModel.load(str(checkpoint), config, device="cpu")
        inputs = samples(model)
        rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in inputs]
        model.quantize(rows, batch_size=1, tokenizer=words)
        model.save(str(out))
        float16 = {"backend": BACKEND.TORCH, "device": "cpu", "dtype": torch.float16}
        model = GPTQModel.load(str(out), **float16)
        state = model.model.state_dict()
        weights = {n: v for n, v in state.items() if n.endswith(".weight")}
        for name, module in model.model.named_modules():
            if hasattr(module, "dequantize_weight"):
                weights[f"{name}.weight"] = module.dequantize_weight().T
        save_file({n: v.float().contiguous() for n, v in weights.items()}, f"{out}.safetensors")

    return run


RECIPES = {
    "w4a16": compress("QuantizationModifier", lambda: scheme("W4A16")),
    "w4a16-asym": compress("QuantizationModifier", lambda: group(4, 32, symmetric=False)),
    "w8a16": compress("QuantizationModifier", lambda: scheme("W8A16")),
    "w8a8": compress("QuantizationModifier", lambda: scheme("W8A8")),
    "fp8": compress("QuantizationModifier", lambda: scheme("FP8_DYNAMIC")),
    "fp8-blocks": compress("QuantizationModifier", lambda: scheme("FP8_BLOCK")),
    "gptq": compress("GPTQModifier", lambda: group(4, 32, actorder="weight"), calibrate=True),
    "auto-gptq": auto_round("auto_gptq", bits=4, group_size=32, sym=True),
    "auto-gptq-asym": auto_round("auto_gptq", bits=4, group_size=64, sym=False),
    "auto-gptq-8": auto_round("auto_gptq", bits=8, group_size=-1, sym=True),
    "gptq-model-act-order": gptq_model(bits=4, group_size=32, desc_act=True, sym=True),
    "w4a8": compress("QuantizationModifier", lambda: scheme("W4A8")),
    "nvfp4": compress("QuantizationModifier", lambda: scheme("NVFP4"), calibrate=True),
    "mxfp4": compress("QuantizationModifier", lambda: scheme("MXFP4")),
    "mixed": compress("QuantizationModifier", lambda: {"scheme": MIXED}),
    "auto-round": auto_round("auto_round", iters=2, bits=4, group_size=32, sym=True),
    "auto-round-asym": auto_round(
        "auto_round:gptqmodel", iters=2, bits=4, group_size=32, sym=False
    ),
    "auto-round-8": auto_round("auto_round", bits=8, group_size=64, sym=False),
    "auto-round-mixed": auto_round(
        "auto_round", iters=2, bits=4, group_size=32, sym=True, layer_config=MIXED_LAYERS
    ),
    "auto-gptq-mixed": auto_round(
        "auto_gptq", bits=4, group_size=32, sym=True, layer_config=MIXED_LAYERS
    ),
    "auto-awq": auto_round("auto_awq", bits=4, group_size=32, sym=False),
}


def main():
    checkpoint, out, *recipes = sys.argv[1:]
    for recipe in recipes:
        try:
            RECIPES[recipe](checkpoint, Path(out) / recipe)
        except Exception:
            (Path(out) / f"{recipe}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()

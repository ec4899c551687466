"""Quantises a checkpoint by llm-compressor's GPTQ to 4 bits with zero points, in groups of 64:
`gptq_of_ids.py CHECKPOINT IDS OUT [DTYPE]`. IDS is a NumPy file of token ids, [sequences, length];
DTYPE (default: float32) is what the model is loaded in.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(checkpoint, ids_file, out, dtype="float32"):
    ids = np.load(ids_file).tolist()
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=64, symmetric=False)
    groups = {"g": QuantizationScheme(targets=["Linear"], weights=weights)}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    masks = [[1] * len(each) for each in ids]
    oneshot(
        model=model,
        recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": masks}),
        processor=tokenizer,
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


main(*sys.argv[1:])

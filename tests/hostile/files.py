"""Checkpoints and adapters of somebody else: fields, side files and links that are made to harm."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import socket
import warnings
from pathlib import Path
from random import Random
from typing import Any

from allspark.model_loader import HuggingFaceModel, LoraAdapter, ModelSerializerException
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.lora import ADAPTER_CONFIG, write_adapter
from support.vocabularies import tokenizer_directory
from values import TEXTS, expression, hostile

_SECRET = b"nobody who converts a model may find this in its output"
_place: list[Path] = []


def prepare(folder: Path) -> None:
    warnings.simplefilter("ignore")
    checkpoint = write_checkpoint(folder / "checkpoint", llama_tensors(CONFIG), CONFIG)
    for path in tokenizer_directory("byte_level").glob("tokenizer*"):
        shutil.copy(path, checkpoint)
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 1}')
    write_adapter(folder / "adapter")
    (folder / "secret").write_bytes(_SECRET)
    HuggingFaceModel(str(checkpoint), "m").load_model().get_tokenizer().encode("warm")
    _place[:] = [folder]


def _dumps(rng: Random, value: Any) -> str:
    text = json.dumps(value)
    kind = rng.randrange(12)
    if kind == 0:
        return text[: rng.randrange(len(text))]
    if kind == 1:
        return "[" * rng.choice([10, 5000, 200_000]) + text
    if kind == 2:
        return text.replace("}", ', "hidden_size": 1e400}', 1)
    if kind == 3:
        return "\ufeff" + text
    return text


# A field of another family, so that its reader is asked.
_FAMILIES = [
    "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3",
    "internlm", "internlm2", "baichuan", "chatglm", "deepseek", "deepseek_v2", "deepseek_v3",
    "gpt2", "bloom", "falcon", "mpt", "olmo2", "granite", "minicpm", "stablelm", "cohere",
]  # fmt: skip
_FIELDS = [
    *CONFIG, "head_dim", "rope_scaling", "sliding_window", "layer_types", "num_experts",
    "num_local_experts", "num_experts_per_tok", "n_head", "n_layer", "n_embd", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "moe_intermediate_size", "first_k_dense_replace", "n_group",
    "quantization_config", "partial_rotary_factor", "rope_parameters", "torch_dtype",
    "multi_query_group_num", "original_max_position_embeddings", "attention_bias", "auto_map",
    "tie_word_embeddings", "final_logit_softcapping", "query_pre_attn_scalar", "text_config",
]  # fmt: skip
_SECTIONS = {
    "rope_scaling": [
        "factor", "short_factor", "long_factor", "low_freq_factor", "beta_fast", "mscale",
        "original_max_position_embeddings", "attention_factor",
    ],
    "quantization_config": [
        "bits", "group_size", "desc_act", "sym", "zero_point", "weight_block_size", "format",
        "config_groups", "ignore", "modules_to_not_convert", "dynamic", "packing_format",
        "extra_config",
    ],
}  # fmt: skip


def _mutate(rng: Random, config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    if rng.random() < 0.3:
        del config["architectures"]
        config["model_type"] = rng.choice(_FAMILIES)
    for _ in range(rng.choice([1, 1, 2, 4])):
        name = rng.choice(_FIELDS)
        if name in _SECTIONS and rng.random() < 0.8:
            section = {key: hostile(rng) for key in rng.sample(_SECTIONS[name], 3)}
            section["type"] = section["rope_type"] = rng.choice(
                ["linear", "dynamic", "yarn", "longrope", "llama3", "su", "x"]
            )
            section["quant_method"] = rng.choice(
                ["gptq", "awq", "fp8", "compressed-tensors", "auto-round", "bitsandbytes", "x"]
            )
            config[name] = section
        elif rng.random() < 0.1:
            config.pop(name, None)
        else:
            config[name] = hostile(rng)
    return config


def _copy(folder: Path) -> Path:
    return Path(shutil.copytree(_place[0] / "checkpoint", folder / "checkpoint"))


def _use(checkpoint: Path, out: Path) -> str:
    """What somebody does with a checkpoint."""
    # Packages that read tokenizers print about what they find.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            loader = HuggingFaceModel(str(checkpoint), "m").load_model().read_model_config()
            loader.serialize_to_path(None, str(out))
            tokenizer = loader.get_tokenizer()
            tokenizer.decode(tokenizer.encode("Some text, " * 20))
            loader.create_reference_generation_config_builder(None).build()
        except ModelSerializerException as error:
            assert str(error)
            return "refused"
        except (ValueError, TypeError) as error:  # of a generation config
            assert str(error)
            return "refused"
    return "taken"


def configs(rng: Random, folder: Path) -> str:
    checkpoint = _copy(folder)
    text = _dumps(rng, _mutate(rng, CONFIG))
    (checkpoint / "config.json").write_text(text, errors="surrogatepass")
    return _use(checkpoint, folder / "out")


def adapters(rng: Random, folder: Path) -> str:
    adapter = Path(shutil.copytree(_place[0] / "adapter", folder / "adapter"))
    config = copy.deepcopy(ADAPTER_CONFIG)
    for _ in range(rng.choice([1, 1, 2])):
        kind = rng.randrange(4)
        if kind == 0:
            name = rng.choice(["target_modules", "exclude_modules"])
            config[name] = expression(rng)
        elif kind == 1:
            count = rng.choice([1, 10, 3000])
            config["alpha_pattern"] = {f"{expression(rng, 2)}{i}": 8 for i in range(count)}
        elif kind == 2:
            config["layers_to_transform"] = [0, 1]
            config["layers_pattern"] = [expression(rng, 2), expression(rng, 2)]
        else:
            config[rng.choice([*config])] = hostile(rng)
    (adapter / "adapter_config.json").write_text(_dumps(rng, config), errors="surrogatepass")
    base = HuggingFaceModel(str(_place[0] / "checkpoint"), "m").load_model().read_model_config()
    try:
        LoraAdapter(adapter, base).serialize_to_path(folder / "a.aslora")
    except ModelSerializerException as error:
        assert str(error)
        return "refused"
    return "taken"


_SIDE_FILES = [
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "model.safetensors.index.json",
]  # fmt: skip


def _mutated_text(rng: Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(rng.choice([1, 3, 20])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + rng.choice([1, 8, 100])] = b""
        elif kind == 1:
            data[at:at] = rng.choice(TEXTS).encode(errors="surrogatepass")[:2000]
        elif kind == 2:
            data[at : at + 1] = bytes([rng.randrange(256)])
        else:
            begin = rng.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + rng.choice([10, 1000])]
    return bytes(data)


def side_files(rng: Random, folder: Path) -> str:
    checkpoint = _copy(folder)
    name = rng.choice(_SIDE_FILES)
    path = checkpoint / name
    if name == "tokenizer.json" and rng.random() < 0.5:
        fields = json.loads(path.read_text())
        split = {"type": "Split", "pattern": {"Regex": expression(rng)}, "behavior": "Isolated",
                 "invert": False}  # fmt: skip
        place = rng.choice(["pre_tokenizer", "normalizer"])
        replace = {"type": "Replace", "pattern": split["pattern"], "content": "x"}
        fields[place] = split if place == "pre_tokenizer" else replace
        path.write_text(json.dumps(fields))
    elif path.exists():
        path.write_bytes(_mutated_text(rng, path.read_bytes()))
    else:
        path.write_text(_dumps(rng, {rng.choice(TEXTS[5:20]): hostile(rng)}), errors="replace")
    return _use(checkpoint, folder / "out")


def links(rng: Random, folder: Path) -> str:
    """What leads elsewhere is not followed, and nothing of it arrives in the output."""
    checkpoint = _copy(folder)
    for name in rng.sample([*_SIDE_FILES, "config.json"], rng.choice([1, 1, 3])):
        path = checkpoint / name
        path.unlink(missing_ok=True)
        kind = rng.randrange(9)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/dev/stdin", "/dev/tty"]))
        elif kind == 2:
            path.symlink_to(_place[0] / "secret")
        elif kind == 3:
            path.symlink_to(path.name)
        elif kind == 4:
            path.symlink_to("nowhere")
        elif kind == 5:
            path.mkdir()
        elif kind == 6:
            with socket.socket(socket.AF_UNIX) as server:
                here = Path.cwd()
                os.chdir(checkpoint)  # a socket's path is short
                server.bind(name)
                os.chdir(here)
        elif kind == 7:
            with open(path, "wb") as file:
                file.truncate(rng.choice([1 << 30, 1 << 40]))
        else:
            (checkpoint / "real").mkdir(exist_ok=True)
            (checkpoint / "real" / name).write_text("{}")
            path.symlink_to(Path("real") / name)
    outcome = _use(checkpoint, folder / "out")
    for path in (folder / "out").rglob("*"):
        assert not path.is_file() or _SECRET not in path.read_bytes(), path
    return outcome

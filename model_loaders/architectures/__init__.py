"""One module per family of architectures: declarations only. Importing this package registers them
all.
"""

from . import (
    baichuan,
    bloom,
    chatglm,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    granite,
    internlm,
    llama,
    mixtral,
    mpt,
    olmo,
    phi,
    qwen,
    qwen_moe,
    starcoder2,
)

__all__ = [
    "baichuan",
    "bloom",
    "chatglm",
    "deepseek",
    "falcon",
    "gemma",
    "glm",
    "gpt2",
    "gpt_neox",
    "granite",
    "internlm",
    "llama",
    "mixtral",
    "mpt",
    "olmo",
    "phi",
    "qwen",
    "qwen_moe",
    "starcoder2",
]

"""One module per family of architectures: declarations only. Importing this package registers them
all.
"""

from . import (
    baichuan,
    bloom,
    chatglm,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    granite,
    internlm,
    llama,
    mpt,
    olmo,
    phi,
    qwen,
    starcoder2,
)

__all__ = [
    "baichuan",
    "bloom",
    "chatglm",
    "falcon",
    "gemma",
    "glm",
    "gpt2",
    "gpt_neox",
    "granite",
    "internlm",
    "llama",
    "mpt",
    "olmo",
    "phi",
    "qwen",
    "starcoder2",
]

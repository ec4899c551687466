"""One module per family of architectures: declarations only. Importing this package registers them
all.
"""

from . import baichuan, chatglm, gemma, glm, granite, internlm, llama, olmo, phi, qwen

__all__ = [
    "baichuan",
    "chatglm",
    "gemma",
    "glm",
    "granite",
    "internlm",
    "llama",
    "olmo",
    "phi",
    "qwen",
]

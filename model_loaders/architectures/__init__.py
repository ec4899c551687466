"""One module per family of architectures: declarations only. Importing this package registers all
of them.
"""

from importlib import import_module

__all__ = [
    "baichuan",
    "bloom",
    "chatglm",
    "dbrx",
    "deepseek",
    "falcon",
    "gemma",
    "glm",
    "glm_moe",
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

for _name in __all__:
    import_module(f"{__name__}.{_name}")

"""Model loaders: turn a checkpoint or serialised files into a model that the engine can install.

Reading safetensors and ``.bin`` needs neither torch nor transformers; the latter is imported when a
tokenizer is first used.
"""

from .checkpoint import LoadFormat
from .dashinfer import DashInferModel
from .errors import ConfigFieldMissingError, ModelSerializerException
from .hugging_face import HuggingFaceModel, ModelScopeModel
from .llm import LLM
from .lora import LoraAdapter

__all__ = [
    "LLM",
    "ConfigFieldMissingError",
    "DashInferModel",
    "HuggingFaceModel",
    "LoadFormat",
    "LoraAdapter",
    "ModelScopeModel",
    "ModelSerializerException",
]

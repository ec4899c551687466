"""allspark: an asynchronous LLM inference engine with a handle and a queue for every request.

The everyday names are here; each is imported when first used, so that `import allspark` stays
cheap and needs neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allspark.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from allspark._allspark import (
        AsCacheMode,
        AsEngineStat,
        AsModelConfig,
        AsModelInfo,
        AsStatus,
        CompletionSet,
        GeneratedElements,
        GenerateRequestStatus,
        ModelState,
        RequestHandle,
        __version__,
    )
    from allspark.detokenizer import Detokenizer
    from allspark.engine import Engine, RoPEScaleMethod, TargetDevice
    from allspark.errors import AllSparkError, OutOfMemoryError
    from allspark.generation_config import ASGenerationConfigBuilder
    from allspark.model_loader import (
        DashInferModel,
        HuggingFaceModel,
        LoraAdapter,
        ModelScopeModel,
    )
    from allspark.prompt_utils import PromptTemplate
    from allspark.request_stat import RequestStatInfo
    from allspark.result_queue import ResultQueue
    from allspark.runtime_config import AsModelRuntimeConfigBuilder
    from allspark.scoring import PromptScore
    from allspark.text_queue import TextElements, TextQueue

# Public name -> the module it lives in.
_HOMES = {
    "AsCacheMode": "allspark._allspark",
    "AsEngineStat": "allspark._allspark",
    "AsModelConfig": "allspark._allspark",
    "AsModelInfo": "allspark._allspark",
    "AsStatus": "allspark._allspark",
    "CompletionSet": "allspark._allspark",
    "GeneratedElements": "allspark._allspark",
    "GenerateRequestStatus": "allspark._allspark",
    "ModelState": "allspark._allspark",
    "RequestHandle": "allspark._allspark",
    "Detokenizer": "allspark.detokenizer",
    "Engine": "allspark.engine",
    "RequestStatInfo": "allspark.request_stat",
    "RoPEScaleMethod": "allspark.engine",
    "TargetDevice": "allspark.engine",
    "AllSparkError": "allspark.errors",
    "OutOfMemoryError": "allspark.errors",
    "ASGenerationConfigBuilder": "allspark.generation_config",
    "DashInferModel": "allspark.model_loader",
    "HuggingFaceModel": "allspark.model_loader",
    "LoraAdapter": "allspark.model_loader",
    "ModelScopeModel": "allspark.model_loader",
    "PromptTemplate": "allspark.prompt_utils",
    "PromptScore": "allspark.scoring",
    "ResultQueue": "allspark.result_queue",
    "AsModelRuntimeConfigBuilder": "allspark.runtime_config",
    "TextElements": "allspark.text_queue",
    "TextQueue": "allspark.text_queue",
    "__version__": "allspark._allspark",
}

__all__ = list(_HOMES)
__getattr__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

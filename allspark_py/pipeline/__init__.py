"""The pipeline: a model that answers prompts, with the names that LMDeploy documents.

`from allspark.pipeline import pipeline`. Each name is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allspark.lazy_names import lazy_names

if TYPE_CHECKING:
    from allspark.chat_template import ChatTemplateConfig
    from allspark.pipeline.configs import (
        GenerationConfig,
        PytorchEngineConfig,
        SpeculativeConfig,
        TurbomindEngineConfig,
    )
    from allspark.pipeline.engine_config import EngineConfig
    from allspark.pipeline.pipe import Pipeline, pipeline
    from allspark.pipeline.response import Response
    from allspark.pipeline.session import Session

# Public name -> the module it lives in.
_HOMES = {
    "ChatTemplateConfig": "allspark.chat_template",
    "EngineConfig": "allspark.pipeline.engine_config",
    "GenerationConfig": "allspark.pipeline.configs",
    "Pipeline": "allspark.pipeline.pipe",
    "PytorchEngineConfig": "allspark.pipeline.configs",
    "Response": "allspark.pipeline.response",
    "Session": "allspark.pipeline.session",
    "SpeculativeConfig": "allspark.pipeline.configs",
    "TurbomindEngineConfig": "allspark.pipeline.configs",
    "pipeline": "allspark.pipeline.pipe",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)

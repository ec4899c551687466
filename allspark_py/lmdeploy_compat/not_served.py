"""What LMDeploy documents and is not here, with what to use instead.

Names can be imported; a call raises NotImplementedError. Modules cannot be imported.
"""

from __future__ import annotations

from allspark.not_served import not_served

_IMAGES = "vision-language models are not served yet; a model's language part is"
_PAGE = "`allspark serve gradio MODEL` has a page on which people talk with a model"
_MODELS_HERE = "docs/models.md says which models are served and how to add one"

# Module -> name -> what to use instead.
NAMES: dict[str, dict[str, str]] = {
    "lmdeploy.pytorch.engine": {"Engine": "pipeline() takes a PytorchEngineConfig"},
    "lmdeploy.vl": {"load_image": _IMAGES},
}
# Module -> name of a constant -> what to use instead; looking it up raises.
CONSTANTS: dict[str, dict[str, str]] = {
    "lmdeploy.vl.constants": {"IMAGE_TOKEN": _IMAGES},
}
# Modules and, with them, all of their submodules that are not served otherwise.
MODULES: dict[str, str] = {
    "lmdeploy.cli": "the command is `allspark`",
    "lmdeploy.lite": "`allspark lite`, or allspark.quantize.lite",
    "lmdeploy.pytorch": _MODELS_HERE,
    "lmdeploy.serve.async_engine": "generate of a pipeline is asynchronous",
    "lmdeploy.serve.gradio": _PAGE,
    "lmdeploy.serve.openai.api_server": "`allspark serve MODEL`, or lmdeploy.serve()",
    "lmdeploy.serve.proxy": "a server serves all models that it is given",
    "lmdeploy.serve.turbomind": "lmdeploy.turbomind.TurboMind, or a pipeline",
    "lmdeploy.serve.vl_async_engine": _IMAGES,
    "lmdeploy.turbomind.deploy": "`allspark convert` writes files that open at once",
    "lmdeploy.vl": _IMAGES,
}
# Methods of classes that are served.
METHODS: dict[str, str] = {
    "Pipeline.get_reward_score": "reward models are not served",
    "TurboMindInstance.async_stream_infer": "generate of a pipeline",
    "TurboMindInstance.decode": "output_logits of a GenerationConfig",
    "TurboMindInstance.stream_infer": "stream_infer of a pipeline takes token ids",
}


def no_method(name: str) -> NotImplementedError:
    """The exception of one of METHODS."""
    return not_served(name, METHODS[name])


def missing_module(fullname: str) -> ModuleNotFoundError:
    """The exception of an import of a module that is not here."""
    parts = fullname.split(".")
    for count in range(len(parts), 1, -1):
        instead = MODULES.get(".".join(parts[:count]))
        if instead is not None:
            break
    else:
        instead = "docs/lmdeploy.md lists what is"
    return ModuleNotFoundError(f"{fullname} is not served: {instead}", name=fullname)

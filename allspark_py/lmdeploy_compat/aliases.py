"""The modules lmdeploy[.x], made of this package's names."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from allspark.lmdeploy_compat.not_served import CONSTANTS, NAMES, missing_module
from allspark.not_served import not_served, placeholder

_ROOT = "lmdeploy"
_HERE = "allspark.lmdeploy_compat"

_CONFIGS = {
    "EngineGenerationConfig": f"{_HERE}.configs",
    "GenerationConfig": "allspark.pipeline.configs",
    "PytorchEngineConfig": "allspark.pipeline.configs",
    "TurbomindEngineConfig": "allspark.pipeline.configs",
    "SpeculativeConfig": "allspark.pipeline.configs",
    "VisionConfig": f"{_HERE}.configs",
}
_TEMPLATES = {"ChatTemplateConfig": "allspark.chat_template"}
_VERSION = {"__version__": f"{_HERE}.configs", "version_info": f"{_HERE}.configs"}
_CALLS = {
    "client": f"{_HERE}.serving",
    "pipeline": f"{_HERE}.pipe",
    "serve": f"{_HERE}.serving",
}
_TOKENIZER = {"Tokenizer": f"{_HERE}.tokenizer"}
_TURBOMIND = {"TurboMind": f"{_HERE}.turbomind", "TurboMindInstance": f"{_HERE}.turbomind"}

# Module of LMDeploy -> its names -> where they are.
_MODULES: dict[str, dict[str, str]] = {
    "lmdeploy": {
        **_CALLS,
        **_CONFIGS,
        **_TEMPLATES,
        **_TOKENIZER,
        **_VERSION,
        "Pipeline": f"{_HERE}.pipe",
    },
    "lmdeploy.api": _CALLS,
    "lmdeploy.messages": {
        **_CONFIGS,
        "EngineRole": f"{_HERE}.configs",
        "MigrationBackend": f"{_HERE}.configs",
        "QuantPolicy": f"{_HERE}.configs",
        "Response": "allspark.pipeline.response",
        "ResponseType": f"{_HERE}.configs",
    },
    "lmdeploy.model": {
        **_TEMPLATES,
        "BaseChatTemplate": "allspark.chat_template",
        "MODELS": "allspark.chat_template",
    },
    "lmdeploy.pytorch": {},
    "lmdeploy.pytorch.engine": {},
    "lmdeploy.serve": {},
    "lmdeploy.serve.gradio": {},
    "lmdeploy.serve.gradio.turbomind_coupled": {"run_local": f"{_HERE}.serving"},
    "lmdeploy.serve.openai": {},
    "lmdeploy.serve.openai.api_client": {
        "APIClient": f"{_HERE}.api_client",
        "get_model_list": f"{_HERE}.api_client",
    },
    "lmdeploy.tokenizer": {**_TOKENIZER, "DetokenizeState": f"{_HERE}.tokenizer"},
    "lmdeploy.turbomind": _TURBOMIND,
    "lmdeploy.turbomind.turbomind": _TURBOMIND,
    "lmdeploy.version": _VERSION,
    "lmdeploy.vl": {},
    "lmdeploy.vl.constants": {},
}


class _Alias(types.ModuleType):
    """A module whose names are imported when they are first used."""

    def __init__(self, name: str):
        super().__init__(name, f"{name}, as {_HERE} serves it.")
        self.__all__ = [*_MODULES[name], *NAMES.get(name, ())]

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        constant = CONSTANTS.get(module, {}).get(name)
        if constant is not None:
            raise not_served(f"{module}.{name}", constant)
        if name in _MODULES[module]:
            value: Any = getattr(importlib.import_module(_MODULES[module][name]), name)
        elif name in NAMES.get(module, ()):
            value = placeholder(f"{module}.{name}", NAMES[module][name])
        elif f"{module}.{name}" in _MODULES:
            value = importlib.import_module(f"{module}.{name}")
        else:
            raise AttributeError(f"{module}.{name} is not served: docs/lmdeploy.md lists what is")
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # lmdeploy.serve is a function and a package: which one an attribute shows depends on the
        # order of imports, so the package can be called.
        if self.__name__ != "lmdeploy.serve":
            raise TypeError("'module' object is not callable")
        from allspark.lmdeploy_compat.serving import serve

        return serve(*args, **kwargs)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the aliases."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ROOT and not fullname.startswith(_ROOT + "."):
            return None
        if fullname not in _MODULES:
            raise missing_module(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: names are looked up."""


def install() -> None:
    """Makes `import lmdeploy` import this package from now on, also where LMDeploy is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        for name in [name for name in sys.modules if name.split(".")[0] == _ROOT]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Finder())
    importlib.import_module(_ROOT)

"""The modules dashinfer.allspark[.x]: those of allspark, with this package's classes in them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

_ROOT = "dashinfer"
_PREFIX = "dashinfer.allspark"

# Names that differ from those of allspark's module, by module.
_NAMES = {
    "allspark.dashinfer_compat.engine": ("AsFileInfo", "Engine", "RequestStatInfo"),
    "allspark.dashinfer_compat.generation_config": (
        "ASGenerationConfigBuilder",
        "GenerationConfigAdapter",
        "PromptTemplate",
        "VocabType",
    ),
    "allspark.dashinfer_compat.model_loader": (
        "DashInferModel",
        "HuggingFaceModel",
        "ModelScopeModel",
    ),
    "allspark.dashinfer_compat.not_served": (
        "ClientEngine",
        "GPTQSettings",
        "IQSettings",
        "MultiMediaInfo",
        "QUANT_CONFIG_MAP",
        "QuantizationSettings",
        "get_quant_settings_cls",
        "save_allsparky",
        "save_allsparky_dltensor_tofile",
        "set_global_header",
    ),
    "allspark.dashinfer_compat.result_queue": ("ResultQueue",),
    "allspark.dashinfer_compat.runtime_config": (
        "AsEvictionStrategy",
        "AsMHAPrefill",
        "AsModelConfig",
        "AsModelRuntimeConfigBuilder",
        "AsSchedulingStrategy",
    ),
    "allspark.model_loader": ("ModelSerializerException",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


class _Alias(types.ModuleType):
    """A module whose names are looked up in this package, then in the module it stands for."""

    def __init__(self, name: str, target: types.ModuleType):
        super().__init__(name, target.__doc__)
        self._target = target
        names = getattr(target, "__all__", None) or [n for n in dir(target) if n[0] != "_"]
        extra = _HOMES if name in (_PREFIX, _PREFIX + "._allspark") else ()
        self.__all__ = list(dict.fromkeys([*names, *extra]))

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            value: Any = getattr(importlib.import_module(_HOMES[name]), name)
        elif _target_of(f"{self.__name__}.{name}") is not None:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            value = getattr(self._target, name)
        setattr(self, name, value)
        return value


def _target_of(fullname: str) -> str | None:
    """The allspark module that a module name of DashInfer stands for; None: there is none."""
    name = "allspark" + fullname[len(_PREFIX) :]
    try:
        return name if importlib.util.find_spec(name) is not None else None
    except (ModuleNotFoundError, ValueError):  # its parent, or itself, is no module of a file
        return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the aliases."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PREFIX and not fullname.startswith(_PREFIX + "."):
            return None
        if _target_of(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        target = _target_of(spec.name)
        assert target is not None
        return _Alias(spec.name, importlib.import_module(target))

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: the target module was already executed when it was imported."""


def install() -> None:
    """Makes `from dashinfer import allspark` import this package from now on."""
    if _ROOT in sys.modules and any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    package = types.ModuleType(_ROOT)
    package.__path__ = []  # a package, so that submodules are looked for
    sys.modules[_ROOT] = package
    package.allspark = importlib.import_module(_PREFIX)  # type: ignore[attr-defined]
    # DashInfer's binding misspells this name.
    status = importlib.import_module("allspark._allspark").AsStatus
    status.ALLSPARK_ALLSPARK_INVALID_CALL_ERROR = status.ALLSPARK_INVALID_CALL_ERROR

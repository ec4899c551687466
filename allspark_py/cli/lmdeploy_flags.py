"""Flags of LMDeploy's commands that are no fields of its configs. Some change nothing here; others
ask for what there is not, and are refused with the reason."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Flag:
    name: str
    note: str  # why it changes nothing, or why it is refused
    is_refused: bool = False
    arguments: dict[str, Any] | None = None  # of add_argument; None: one value


_SWITCH: dict[str, Any] = {"action": "store_true"}
_LIST: dict[str, Any] = {"nargs": "+"}

OF_ENGINE = (
    _Flag("backend", "one engine serves both", False, {"choices": ("turbomind", "pytorch")}),
    _Flag("vision-max-batch-size", "there are no images"),
    _Flag("cudagraph-capture-batch-sizes", "there are no graphs to capture", False, _LIST),
    _Flag("hf-overrides", "config.json is read as it is", True),
)
OF_SERVER = (
    _Flag("allowed-media-domains", "no media are fetched", False, _LIST),
    _Flag("enable-abort-handling", "/abort_request is always there", False, _SWITCH),
    _Flag("disable-metrics", "the engine always counts", False, _SWITCH),
    _Flag("qos-config-path", "requests have a priority of their own, no group of users", True),
    _Flag("proxy-url", "the server registers nowhere; give the proxy its address", True),
    _Flag("allow-terminate-by-client", "SIGTERM ends the server, no client does", True, _SWITCH),
    _Flag("share", "no tunnel is opened", True, _SWITCH),
)
_SPECULATIVE = ("algorithm", "draft-model", "num-draft-tokens")


def add_flags(group: argparse._ArgumentGroup, flags: tuple[_Flag, ...]) -> None:
    """Adds them, without a help: they do nothing."""
    for flag in flags:
        group.add_argument(f"--{flag.name}", help=argparse.SUPPRESS, **(flag.arguments or {}))


def add_speculative_flags(group: argparse._ArgumentGroup) -> None:
    """Adds LMDeploy's names of the settings of SpeculativeConfig."""
    for name in _SPECULATIVE:
        kind = int if name == "num-draft-tokens" else str
        group.add_argument(f"--speculative-{name}", type=kind, help=argparse.SUPPRESS)


def check(options: argparse.Namespace, flags: tuple[_Flag, ...]) -> None:
    """Raises ValueError where a refused flag is given."""
    for flag in flags:
        value = getattr(options, flag.name.replace("-", "_"))
        if flag.is_refused and value not in (None, False, ""):
            raise ValueError(f"--{flag.name} is not served: {flag.note}")


def apply_speculative(options: argparse.Namespace, config: Any) -> None:
    """Sets the fields of an EngineConfig. Raises ValueError where a value is refused."""
    from allspark.pipeline.configs import SpeculativeConfig

    names = [f"speculative_{name.replace('-', '_')}" for name in _SPECULATIVE]
    method, model, count = (getattr(options, name) for name in names)
    if method is not None:
        SpeculativeConfig(method, model or "", 1 if count is None else count).apply(config)
    elif model is not None or count is not None:
        raise ValueError("--speculative-draft-model and --speculative-num-draft-tokens need "
                         "--speculative-algorithm")  # fmt: skip

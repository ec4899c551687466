"""Shared by all Python tests: markers, and the folders that tests read from."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes, not seconds; run by scripts/test.sh --slow")
    config.addinivalue_line("markers", "torch: needs torch; left out by scripts/test.sh --fast")
    # A shell without job control lets what it starts in the background ignore Ctrl-C, and all that
    # is started from there. Tests are of programs in the foreground.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of modules that import torch, and lets scripts/sum_results.py know which
    tests --fast leaves out."""
    for item in items:
        if hasattr(getattr(item, "module", None), "torch"):
            item.add_marker("torch")
        if item.get_closest_marker("torch") is not None:
            item.user_properties.append(("torch", "1"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real checkpoints, tokenizers and texts, which are not part of the repository."""
    path = Path(os.environ.get("ALLSPARK_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path} (set ALLSPARK_SHARED_DATA)")
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The embedded demo model, in Hugging Face layout."""
    path = ROOT / "examples" / "demo_model"
    if not (path / "config.json").is_file():
        pytest.skip(f"no demo model at {path} (scripts/train_demo_model.py makes it)")
    return path


@pytest.fixture(scope="session")
def dashinfer() -> ModuleType:
    """dashinfer.allspark, as a DashInfer script imports it."""
    from allspark.dashinfer_compat import install

    install()
    return importlib.import_module("dashinfer.allspark")


@pytest.fixture(scope="session")
def cmake() -> str:
    path = shutil.which("cmake")
    if path is None:
        pytest.skip("cmake is not installed")
    return path

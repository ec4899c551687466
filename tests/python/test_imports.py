"""Imports: fast, lazy, and under DashInfer's names."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_import_needs_neither_torch_nor_transformers():
    result = run_python(
        """
        import sys
        import allspark
        allspark.Engine, allspark.HuggingFaceModel, allspark.ASGenerationConfigBuilder
        import allspark.engine, allspark.model_loader, allspark.runtime_config
        import allspark.generation_config, allspark.prompt_utils
        heavy = {"torch", "transformers", "modelscope", "google.protobuf", "safetensors"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert result.stdout.strip() == "[]", result.stderr


WITHOUT_TORCH = """
import importlib.util, os, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
"""


def test_a_tokenizer_asks_for_no_torch(demo_model):
    """transformers advises to install torch; the second program shows that it would do so here."""
    loaded = run_python(
        WITHOUT_TORCH
        + f"""
import allspark
loader = allspark.HuggingFaceModel({str(demo_model)!r}, "demo").load_model()
print(loader.get_tokenizer().decode(loader.get_tokenizer().encode("A queue")))
print([name for name in os.environ if name.startswith("TRANSFORMERS_NO")])
"""
    )
    assert (loaded.stdout, loaded.stderr) == ("A queue\n[]\n", "")
    plain = run_python(WITHOUT_TORCH + "import transformers")
    assert "PyTorch" in plain.stderr


def test_every_exported_name_exists():
    import allspark

    for name in allspark.__all__:
        assert getattr(allspark, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_this"):
        allspark.nothing_like_this  # noqa: B018


def test_star_imports_of_the_documents(tmp_path):
    result = run_python(
        """
        from allspark import *
        from allspark.engine import *
        builder = AsModelRuntimeConfigBuilder()
        builder.model_name("my_model")
        builder.model_dir("/path/to/model", "model_prefix")
        builder.compute_unit(TargetDevice.CUDA, [0])
        builder.max_batch(32)
        builder.max_length(2048)
        builder.kv_cache_mode(AsCacheMode.AsCacheQuantU4)
        runtime_config = builder.build()
        print(runtime_config.engine_max_batch)
        """
    )
    assert result.stdout.strip() == "32", result.stderr

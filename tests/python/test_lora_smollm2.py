"""What an adapter in 8 bits costs a real model: SmolLM2 with an adapter trained on stories."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="the package peft, an oracle, is not installed")
pytest.importorskip("gguf")
pytest.importorskip("allspark._allspark")

from allspark import Engine  # noqa: E402
from allspark.eval import Text, compare  # noqa: E402
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from support import oracles  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # peft and transformers warn

WINDOW, STEPS = 256, 24


def train(model, tokenizer, text):
    """A peft model whose adapter of all matrices has seen some windows of the text."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-3)
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    for window in ids[: STEPS * WINDOW].reshape(STEPS, 1, WINDOW):
        adapted(input_ids=window, labels=window).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted


@pytest.fixture(scope="module")
def folders(shared_data, tmp_path_factory):
    """Directories of the model, of its adapter, and of the model with the adapter merged into its
    weights, all in float32."""
    folder = tmp_path_factory.mktemp("smollm2")
    (file,) = oracles.environment("smollm2").rglob("SmolLM2-135M-Instruct.Q4_1.gguf")
    loader = transformers.AutoModelForCausalLM
    loaded = loader.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # What comes from a quantised file refuses to be saved.
    fields = loaded.config.to_dict()
    del fields["quantization_config"]
    model = type(loaded)(type(loaded.config)(**fields))
    model.load_state_dict(loaded.state_dict())
    stories = (shared_data / "text" / "tinystories_val.txt").read_text("utf-8")
    names = ("base", "adapter", "merged")
    found = SimpleNamespace(**{name: str(folder / name) for name in names})
    model.save_pretrained(found.base)
    adapted = train(model, tokenizer, stories[: len(stories) // 2])
    adapted.save_pretrained(found.adapter)
    adapted.merge_and_unload().save_pretrained(found.merged)
    for directory in (found.base, found.merged):
        tokenizer.save_pretrained(directory)
    return found


@pytest.fixture(scope="module")
def divergence(folders, shared_data):
    """The divergence of a model in A8W8 from one in float32, on stories not seen in training."""
    stories = (shared_data / "text" / "tinystories_val.txt").read_text("utf-8")
    text = Text.of(stories[len(stories) // 2 :], "stories")

    def of(source, exact, adapter=None):
        engine, adapters = Engine(), {"stories": adapter} if adapter else None
        settings = {"session_len": WINDOW, "precision": "A8W8", "adapters": adapters}
        form = ServedModel.open(source, EngineConfig(**settings), "form", engine)
        config = EngineConfig(session_len=WINDOW, data_type="float32")
        reference = ServedModel.open(exact, config, "exact", engine)
        name = "stories" if adapter else None
        found = compare(form, reference, text, WINDOW, 8 * WINDOW, name)
        form.close()
        reference.close()
        return found.kl_divergence.mean.value

    return of


def test_an_adapter_in_8_bits_moves_logits_no_more_than_int8_weights_do(folders, divergence):
    """Errors add up as squares, and so do divergences."""
    adapted = divergence(folders.base, folders.merged, folders.adapter)
    plain = divergence(folders.base, folders.base)
    merged = divergence(folders.merged, folders.merged)
    changed = divergence(folders.base, folders.merged)
    print(f"KL: {adapted=:.5f} {plain=:.5f} {merged=:.5f} {changed=:.5f}")
    assert changed > 20 * merged  # The adapter changes much.
    assert adapted - merged <= merged

"""Perplexity, comparison and multiple choice of models, against figures from their logits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil

import numpy as np
import pytest

native = pytest.importorskip("allspark._allspark")

from allspark import AllSparkError, Engine  # noqa: E402
from allspark.eval import (  # noqa: E402
    Task,
    Text,
    choices,
    compare,
    compare_all,
    likelihoods,
    perplexity,
    read_tasks,
)
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint  # noqa: E402
from support.smollm2 import (  # noqa: E402
    OPENED,
    Forms,
    check_figures,
    divergence,
    documented,
)

CONTEXT = 32
SENTENCE = "What is {}+{}? {} + {} = {}. A ResultQueue is where the tokens of a request arrive. "
TEXT = Text.of("".join(SENTENCE.format(i, 7, i, 7, i + 7) for i in range(12)), "sums")


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def model(engine, demo_model):
    config = EngineConfig(precision="A8W8", session_len=256, block_size=16)
    model = ServedModel.open(str(demo_model), config, "model", engine)
    yield model
    model.close()


@pytest.fixture(scope="module")
def reference(engine, demo_model):
    config = EngineConfig(data_type="float32", session_len=256)
    model = ServedModel.open(str(demo_model), config, "reference", engine)
    yield model
    model.close()


def windows_of(model):
    ids = model.tokenizer.encode(TEXT.content)
    return [ids[begin : begin + CONTEXT] for begin in range(0, len(ids) - CONTEXT + 1, CONTEXT)]


def scored_rows(model, ids):
    """Log-probabilities before each token of the later half: by another way into the engine."""
    logits = native.testing.forward_logits(model.loader._image, ids)[CONTEXT // 2 : -1]
    logits = logits.astype(np.longdouble)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def of_all(model):
    rows = [scored_rows(model, ids) for ids in windows_of(model)]
    targets = [ids[CONTEXT // 2 + 1 :] for ids in windows_of(model)]
    return np.concatenate(rows), np.concatenate(targets)


def test_perplexity_is_that_of_the_logits(model):
    found = perplexity(model, TEXT, CONTEXT)
    rows, targets = of_all(model)
    losses = -rows[np.arange(len(targets)), targets]
    assert (found.num_windows, found.num_scored) == (len(targets) // 15, len(targets))
    assert found.cross_entropy.value == pytest.approx(float(losses.mean()), rel=1e-6)
    assert found.perplexity.value == pytest.approx(float(np.exp(losses.mean())), rel=1e-5)
    error = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    assert found.cross_entropy.error == pytest.approx(error, rel=1e-6)
    assert found.perplexity.error == pytest.approx(found.perplexity.value * error, rel=1e-6)


def test_a_comparison_is_that_of_the_logits(model, reference):
    found = compare(model, reference, TEXT, CONTEXT)
    own, targets = of_all(model)
    base, _ = of_all(reference)
    rows = np.arange(len(targets))
    divergences = (np.exp(base) * (base - own)).sum(axis=1)
    changes = np.exp(own[rows, targets]) - np.exp(base[rows, targets])
    kl = found.kl_divergence
    assert kl.mean.value == pytest.approx(float(divergences.mean()), rel=1e-5)
    assert kl.percentiles["50"] == pytest.approx(float(np.median(divergences)), rel=1e-4)
    assert kl.largest == pytest.approx(float(divergences.max()), rel=1e-5)
    ninth = float(np.quantile(divergences.astype(float), 0.9))
    assert kl.percentiles["90"] == pytest.approx(ninth, rel=1e-4)
    change = found.probability_change
    assert change.mean.value == pytest.approx(float(changes.mean()), abs=1e-7)
    assert change.smallest == pytest.approx(float(changes.min()), abs=1e-6)
    rms = float(np.sqrt((changes**2).mean()))
    assert found.rms_probability_change.value == pytest.approx(rms, rel=1e-5)
    same = (own.argmax(axis=1) == base.argmax(axis=1)).mean()
    assert found.same_top.value == pytest.approx(float(same))
    tops = [np.argsort(-each, axis=1, kind="stable")[:, :5] for each in (own, base)]
    common = [len({*a} & {*b}) / 5 for a, b in zip(*map(np.ndarray.tolist, tops), strict=True)]
    assert found.top5_overlap.value == pytest.approx(np.mean(common))
    assert 0 < kl.mean.value < 0.1 and found.same_top.value > 0.8


def test_several_models_are_compared_as_each_alone(model, reference):
    found = compare_all([model, reference, model], reference, TEXT, CONTEXT)
    assert found[0] == found[2] == compare(model, reference, TEXT, CONTEXT)
    assert found[1].kl_divergence.largest == 0 and found[1].model == found[0].reference
    with pytest.raises(ValueError, match="models is empty; it must have at least one model"):
        compare_all([], reference, TEXT, CONTEXT)


def test_both_ways_give_the_same_perplexity(model, reference):
    """By the engine's log-probabilities, and by its logits."""
    alone, together = perplexity(model, TEXT, CONTEXT), compare(model, reference, TEXT, CONTEXT)
    assert alone.perplexity.value == pytest.approx(together.perplexity.value, rel=1e-6)
    base = perplexity(reference, TEXT, CONTEXT)
    assert base.perplexity.value == pytest.approx(together.reference_perplexity.value, rel=1e-6)
    quotient = alone.perplexity.value / base.perplexity.value
    assert together.ratio.value == pytest.approx(quotient, rel=1e-5)


def test_a_model_is_no_distance_from_itself(reference, engine, demo_model):
    config = EngineConfig(data_type="float32", session_len=64, max_batch_size=1, threads=1)
    other = ServedModel.open(str(demo_model), config, "same", engine)
    try:
        found = compare(other, reference, TEXT, CONTEXT)
    finally:
        other.close()
    assert found.kl_divergence.largest == 0 and found.same_top.value == 1
    assert found.ratio.value == 1 and found.rms_probability_change.value == 0


@pytest.mark.parametrize(
    "config", [{"max_batch_size": 1}, {"prefill_chunk": 16, "threads": 1}, {"numa": True}]
)
def test_figures_do_not_depend_on_what_runs_together(model, demo_model, repo_root, config):
    given = {"precision": "A8W8", "session_len": 256, "block_size": 32, **config}
    other = ServedModel.open(str(demo_model), EngineConfig(**given))
    tasks = repo_root / "tests" / "data" / "choices.txt"
    try:
        assert perplexity(other, TEXT, CONTEXT) == perplexity(model, TEXT, CONTEXT)
        assert choices(other, tasks) == choices(model, tasks)
    finally:
        other.close()


def test_facts_say_what_was_measured(model, reference, demo_model):
    found = compare(model, reference, TEXT, CONTEXT, tokens=2 * CONTEXT + 5)
    assert found.num_windows == 2 and found.max_tokens == 69
    assert found.texts == [TEXT.facts]
    digests = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(demo_model.iterdir())
        if path.suffix in (".json", ".safetensors")
    ]
    assert found.model.sha256 == hashlib.sha256("".join(digests).encode()).hexdigest()
    assert found.reference.compute_type == "float32" and found.model.compute_type == "bfloat16"
    assert found.reference.bits_per_weight == pytest.approx(32, rel=0.01)
    assert 8 < found.model.bits_per_weight < 8.5
    assert found.model.weights == [
        "17 weights of 8 bits, one scale per output feature, activations of 8 bits, "
        "groups of 64"
    ]
    assert found.model.weight_bytes == model.engine.get_as_model_info("model").weight_bytes


# Bad input.


def copy_of(demo_model, folder, edit):
    """The demo model with another tokenizer.json."""
    shutil.copytree(demo_model, folder)
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))
    return folder


def swap(one, other):
    """An edit that exchanges two ids of the vocabulary."""

    def edit(fields):
        names = {token: name for name, token in fields["model"]["vocab"].items()}
        fields["model"]["vocab"].update({names[one]: other, names[other]: one})

    return edit


def test_a_reference_with_other_ids_is_refused(model, demo_model, tmp_path):
    fifth = windows_of(model)[0][5]
    folder = copy_of(demo_model, tmp_path / "other", swap(fifth, 1000))
    other = ServedModel.open(str(folder), EngineConfig(session_len=64))
    try:
        with pytest.raises(ValueError, match=r"another one: token 5 of sums is 1000 there; it"):
            compare(model, other, TEXT, CONTEXT)
    finally:
        other.close()


def test_a_reference_of_another_size_is_refused(model, demo_model, tmp_path):
    config = {**CONFIG, "vocab_size": 1600, "max_position_embeddings": 64}
    folder = write_checkpoint(tmp_path / "x", config=config, tensors=llama_tensors(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    other = ServedModel.open(str(folder))
    try:
        message = "vocabulary has 1600 tokens; it must have 1536, as the model's"
        with pytest.raises(ValueError, match=message):
            compare(model, other, TEXT, CONTEXT)
        with pytest.raises(ValueError, match="context is 65; it must be at most 64, the reference"):
            compare(model, other, TEXT, 65)
    finally:
        other.close()


def overflowing(demo_model, folder):
    """Weights so large that logits overflow; what is no number itself is refused on loading."""
    shutil.copytree(demo_model, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin, end = header["model.norm.weight"]["data_offsets"]
    data[8 + length + begin : 8 + length + end] = b"\x7f\x7f" * ((end - begin) // 2)
    path.write_bytes(data)
    return folder


def test_logits_that_are_no_numbers_are_refused(model, demo_model, tmp_path):
    folder = overflowing(demo_model, tmp_path / "inf")
    broken = ServedModel.open(str(folder), EngineConfig(session_len=64), "broken")
    try:
        message = "window 0 of sums: the model's logits after its token 16 are not finite"
        with pytest.raises(ValueError, match=message):
            perplexity(broken, TEXT, CONTEXT)
        with pytest.raises(ValueError, match=message):
            compare(broken, model, TEXT, CONTEXT)
        with pytest.raises(ValueError, match="the reference's logits after its token 16"):
            compare(model, broken, TEXT, CONTEXT)
        with pytest.raises(ValueError, match="continuation 0: the log-probability of its token 0"):
            likelihoods(broken, [([5], [6, 7])])
    finally:
        broken.close()
    assert broken.engine.list_models() == []


def test_short_texts_and_long_contexts_are_refused(model):
    with pytest.raises(ValueError, match="short has 3 tokens; it must have at least context, 32"):
        perplexity(model, Text.of("1+2", "short"), CONTEXT)
    with pytest.raises(ValueError, match=r"context is 257; it must be in \[8, 256\], the model's"):
        perplexity(model, TEXT, 257)
    with pytest.raises(AllSparkError, match="lora_name is 'nobody'; loaded are none"):
        perplexity(model, TEXT, CONTEXT, adapter="nobody")


# Likelihoods and multiple choice.


def direct(model, context, continuation):
    (score,) = model.engine.score(model.name, None, [*context, *continuation], top_logprobs=1)
    begin = len(context) - 1
    tops = [top[0][0] for top in score.top_logprobs[begin:]]
    return score.logprobs[begin:], tops == list(continuation)


def pairs_of(model):
    """Contexts of several lengths, many with a common prefix."""
    encode = model.tokenizer.encode
    context = encode(SENTENCE.format(1, 2, 1, 2, 3) * 3 + "What is 3+4? 3 + 4 =")
    ends = [encode(text) for text in (" 7", " 8", " 7. A ResultQueue", " banana " * 9)]
    pairs = [(context, end) for end in ends]
    pairs += [(context[: len(context) - cut], ends[2]) for cut in (0, 1, 5, 30)]
    return [*pairs, (encode("1+2="), encode("3")), ([7], [8]), (context, [])]


def test_likelihoods_are_those_of_the_engine_bit_by_bit(model):
    model.engine.clear_prefix_cache(model.name)
    before = model.engine.get_as_engine_stat(model.name)
    pairs, counted = pairs_of(model), []
    found = likelihoods(model, pairs, progress=counted.append)
    assert sum(counted) == len(pairs)
    for (context, continuation), likelihood in zip(pairs, found, strict=True):
        if continuation:
            logprobs, is_greedy = direct(model, context, continuation)
            assert likelihood.logprobs.tolist() == logprobs
            assert likelihood.is_greedy == is_greedy
            assert likelihood.total == pytest.approx(sum(logprobs))
        else:
            assert likelihood.total == 0 and likelihood.is_greedy
    after = model.engine.get_as_engine_stat(model.name)
    hits = after.prefix_cache_hit_token - before.prefix_cache_hit_token
    assert hits > 100
    assert {likelihood.is_greedy for likelihood in found} == {True, False}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "continuation 0 has no context; it must have at least one token"),
        (([1] * 200, [2] * 57), "continuation 0 has 257 tokens with its context; the model's len"),
        (([1], [99999]), "continuation 0: .*99999"),
    ],
)
def test_bad_pairs_are_refused(model, pair, message):
    with pytest.raises(ValueError, match=message):
        likelihoods(model, [pair])


def test_choices_are_those_of_direct_scores(model, repo_root):
    file = read_tasks(repo_root / "tests" / "data" / "choices.txt")
    found = choices(model, file.tasks)
    encode = model.tokenizer.encode
    right = {"sum": 0, "token": 0, "character": 0}
    for task, result in zip(file.tasks, found.results, strict=True):
        wholes = [encode(f"{task.context} {choice}") for choice in task.choices]
        begin = len(encode(task.context))
        rows = [direct(model, ids[:1], ids[1:])[0] for ids in wholes]
        sums = [sum(row[begin - 1 :]) for row in rows]
        shared = next(i for i in range(999) if len({ids[i] for ids in wholes}) > 1)
        means = [np.mean(row[shared - 1 :]) for row in rows]
        assert result.logprobs == pytest.approx(sums)
        assert result.per_token == pytest.approx(means)
        lengths = [value / len(text) for value, text in zip(sums, task.choices, strict=True)]
        assert result.per_character == pytest.approx(lengths)
        for name, values in (("sum", sums), ("token", means), ("character", lengths)):
            right[name] += int(np.argmax(values)) == task.label
    assert found.accuracy.value == right["sum"] / 3
    assert found.accuracy_per_token.value == right["token"] / 3
    assert found.accuracy_per_character.value == right["character"] / 3
    p = found.accuracy.value
    assert found.accuracy.error == pytest.approx(math.sqrt(p * (1 - p) / 2))


def test_the_demo_model_knows_its_sums(model, repo_root):
    found = choices(model, repo_root / "tests" / "data" / "choices.jsonl")
    assert found.accuracy.value == 1 and [each.chosen for each in found.results] == [0, 1, 1]
    assert found.tasks.name.endswith("choices.jsonl") and found.seed is None


def test_a_part_of_the_tasks_is_chosen_by_the_seed(model):
    tasks = [Task(f"{i}+1=", (str(i + 1), "x"), 0, "") for i in range(8)]
    found = choices(model, tasks, limit=3, seed=5)
    indices = [each.index for each in found.results]
    assert len(indices) == 3 and indices == sorted(indices) and found.seed == 5
    assert choices(model, tasks, limit=3, seed=5) == found
    others = {tuple(r.index for r in choices(model, tasks, 3, seed).results) for seed in range(5)}
    assert len(others) > 1
    assert (found.num_tasks, found.num_available) == (3, 8)


def test_choices_of_odd_forms(model):
    """One choice that begins another, equal ones, spaces at the end of a context."""
    tasks = [Task("1+2=", ("3", "3. A"), 0, ""), Task("1+2= ", ("3", "3"), 1, "")]
    found = choices(model, tasks)
    assert all(math.isfinite(value) for each in found.results for value in each.per_token)
    assert found.results[1].chosen == 0  # of equal ones the first
    with pytest.raises(ValueError, match=r"task 0: choice 1 has \d+ tokens .* 2 to 256, the model"):
        choices(model, [Task("a", ("b", "7+" * 300), 0)])
    with pytest.raises(ValueError, match="tasks is empty; it must have at least one task"):
        choices(model, [])
    with pytest.raises(ValueError, match="limit is 0; it must be None or an integer of at least 1"):
        choices(model, tasks, limit=0)


@pytest.mark.parametrize("space", [" ", "\n", "\t", " \n"])
def test_white_space_at_the_end_of_a_context_belongs_to_the_choices(model, space):
    """As lm-eval has it."""
    task = Task(f"Sums: 1+2 is{space}", ("3", "4. A"), 0, "")
    (result,) = choices(model, [task]).results
    encode = model.tokenizer.encode
    begin = len(encode(task.context.rstrip()))
    wholes = [encode(f"{task.context}{choice}") for choice in task.choices]
    sums = [sum(direct(model, ids[:begin], ids[begin:])[0]) for ids in wholes]
    assert result.logprobs == pytest.approx(sums)


def test_results_are_plain_values(model, repo_root):
    found = choices(model, repo_root / "tests" / "data" / "choices.jsonl")
    assert json.loads(json.dumps(dataclasses.asdict(found)))["num_tasks"] == 3


# A trained model.


def test_the_table_has_every_form_of_smollm2(repo_root):
    assert list(documented(repo_root, "test_eval_models.py")) == list(OPENED)


@pytest.mark.slow
def test_quantising_smollm2_costs_what_the_table_says(shared_data, repo_root, tmp_path):
    text = shared_data / "text" / "wikitext2_test.txt"
    expected = documented(repo_root, "test_eval_models.py")
    forms, divergences = Forms(tmp_path, text), {}
    for row in OPENED:
        form = forms.opened(row)
        found = compare(form, forms.exact, text, tokens=6 * 512)
        form.close()
        divergences[row] = divergence(found)
        check_figures(row, found, expected[row], change_within=1, same_within=1.5)
        assert 15 < found.perplexity.value < 30 and found.correlation > 0.99
    forms.exact.close()
    assert divergences["int8, A8"] <= 0.3 * divergences["int8, A8, one scale per token"]

#!/usr/bin/env python3
"""Trains the demo model of the examples from scratch and checks it.

The demo model is a small Llama-architecture chat model that answers short questions about
allspark and adds, subtracts and multiplies small numbers. All of its training data is in
`examples/demo_model_data/` or made by `demo_corpus.py`; nothing is downloaded.

    python scripts/train_demo_model.py            # train, write examples/demo_model, check
    python scripts/train_demo_model.py --check    # only check what is there

The exit status is non-zero if a figure is below its bar (see `BARS`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_corpus import (
    ARITHMETIC_FORMS,
    END_OF_TEXT,
    IM_END,
    IM_START,
    NUM_OPERANDS,
    OPERATOR_WORDS,
    SYSTEM_MESSAGES,
    Fact,
    Problem,
    chat_prompt,
    draw_arithmetic_turn,
    draw_chat,
    draw_equation,
    draw_fact_turn,
    load_facts,
    normalize,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parent.parent
DATA_DIR = ROOT / "examples" / "demo_model_data"
MODEL_DIR = ROOT / "examples" / "demo_model"

IGNORED = -100  # The label of a position without loss.

# One ChatML turn per message. The whitespace control keeps every newline explicit.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Name of a figure -> the minimum share of right answers.
BARS = {
    "facts, canonical question": 1.0,
    "facts, lower case without mark": 1.0,
    "facts, at least one paraphrase": 1.0,
    "A+B": 0.99,
    "What is A+B?": 0.99,
}


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result of a training run."""

    seed: int = 20240607
    num_workers: int = 2  # Processes of one thread each, with separate batches.
    vocab_size: int = 1536
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 2048
    num_steps: int = 900
    warmup_steps: int = 60
    muon_lr: float = 5e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    equations_per_batch: int = 128
    sum_chats_per_batch: int = 16
    fact_chats_per_batch: int = 12


def train_tokenizer(facts: list[Fact], vocab_size: int) -> Tokenizer:
    """Byte-level BPE. Digits are never merged, so that a sum is a relation between positions."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = list(SYSTEM_MESSAGES)
    for fact in facts:
        corpus += [fact.answer] * 4
        for question in fact.trained:
            corpus += [question, question.lower()]
        corpus.append(fact.trained[0].upper())
    for template in ARITHMETIC_FORMS.values():
        for op, word in OPERATOR_WORDS.items():
            corpus += [template.format(a=1, b=2, op=op, word=word)] * 20
    corpus += ["user\n", "assistant\n", "system\n"] * 100
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out_dir: Path, max_positions: int) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out_dir)
    # Some versions write the template beside the config; one place is enough.
    config_path = out_dir / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["chat_template"] = CHAT_TEMPLATE
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("is_local", None)
    config.pop("backend", None)
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out_dir / "chat_template.jinja").unlink(missing_ok=True)


@dataclass
class Batch:
    ids: torch.Tensor  # [rows, tokens], padded on the right
    labels: torch.Tensor  # [rows, tokens], IGNORED where no loss is taken


def make_batches(
    tokenizer: Tokenizer, examples: list[tuple[str, str]], num_batches: int = 1
) -> list[Batch]:
    """Rows of similar length share a batch, so that little padding is computed."""
    prompts = tokenizer.encode_batch([prompt for prompt, _ in examples])
    answers = tokenizer.encode_batch([answer + IM_END for _, answer in examples])
    rows = [(p.ids, a.ids) for p, a in zip(prompts, answers, strict=True)]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    bounds = [len(rows) * i // num_batches for i in range(num_batches + 1)]
    return [_pad(rows[bounds[i] : bounds[i + 1]]) for i in range(num_batches)]


def _pad(rows: list[tuple[list[int], list[int]]]) -> Batch:
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED, dtype=torch.long)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    return Batch(ids, labels)


def batches(
    recipe: Recipe, worker: int, tokenizer: Tokenizer, facts: list[Fact]
) -> Iterator[list[list[Batch]]]:
    """One worker's batches of every step, by kind: bare equations, sums and facts in chats."""
    rng = random.Random(f"{recipe.seed} {worker}")
    fact_turn = partial(draw_fact_turn, rng, facts)
    sum_turn = partial(draw_arithmetic_turn, rng)

    def any_turn() -> tuple[str, str]:
        return rng.choice((fact_turn, sum_turn))()

    for _ in range(recipe.num_steps):
        equations = [draw_equation(rng) for _ in range(recipe.equations_per_batch)]
        sums = [draw_chat(rng, sum_turn, any_turn) for _ in range(recipe.sum_chats_per_batch)]
        answers = [draw_chat(rng, fact_turn, any_turn) for _ in range(recipe.fact_chats_per_batch)]
        yield [
            make_batches(tokenizer, equations, 1),
            make_batches(tokenizer, sums, 2),
            make_batches(tokenizer, answers, 2),
        ]


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.q_heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(config)


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Summed cross entropy over the answers. Only their rows go through the output layer."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    targets = batch.labels[:, 1:]
    wanted = targets != IGNORED
    return F.cross_entropy(model.lm_head(hidden[:, :-1][wanted]), targets[wanted], reduction="sum")


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by Newton-Schulz steps (Jordan et al., 2024).

    torch has an implementation too, but it orthogonalises in bfloat16, which takes seconds per step
    on a CPU without bfloat16 instructions. This one stays in float32.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                gradient = gradient_of(p)
                average = state["momentum"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonalize(gradient.lerp(average, group["momentum"]))
                # Scales the update to the size of AdamW's, so that one learning rate suits all
                # parameters.
                update *= 0.2 * math.sqrt(max(p.shape))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Moves the singular values of `matrix` near 1 and keeps its singular vectors."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        # The quintic of the Muon article: fast growth near 0, about 1 at the end.
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def backward(model: LlamaForCausalLM, kind: list[Batch]) -> float:
    """Adds the gradient of the mean loss over all answers of one kind. Returns that loss."""
    num_targets = sum(int((batch.labels != IGNORED).sum()) for batch in kind)
    total = 0.0
    for batch in kind:
        loss = batch_loss(model, batch) / num_targets
        loss.backward()
        total += loss.item()
    return total


def make_optimizers(
    recipe: Recipe, model: LlamaForCausalLM
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.dim() != 2 or p is embedding]
    muon = Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay)
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, recipe.muon_lr), (adamw, recipe.adamw_lr)]


def learning_rate_scale(recipe: Recipe, step: int) -> float:
    """Linear warm-up, the peak for a quarter of the run, then linear down to a hundredth."""
    flat_steps = max(recipe.warmup_steps, recipe.num_steps // 4)
    if step <= flat_steps:
        return min(1.0, step / recipe.warmup_steps)
    return max(0.01, (recipe.num_steps - step) / (recipe.num_steps - flat_steps))


def train(recipe: Recipe, tokenizer: Tokenizer, facts: list[Fact]) -> LlamaForCausalLM:
    """Trains with `num_workers` processes, which synchronise once per step to add their gradients.

    They have one thread each, instead of one process with several: at these sizes a matrix product
    takes less than a millisecond, and on a busy machine its threads mostly wait for each other.
    """
    model = make_model(recipe, tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {recipe}", flush=True)
    gradients = torch.zeros(recipe.num_workers, num_parameters).share_memory_()
    final = torch.zeros(num_parameters).share_memory_()
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(recipe.num_workers)
    torch.multiprocessing.spawn(
        train_worker,
        args=(recipe, tokenizer.to_str(), facts, gradients, final, barrier),
        nprocs=recipe.num_workers,
    )
    torch.nn.utils.vector_to_parameters(final, model.parameters())
    return model


def train_worker(
    worker: int,
    recipe: Recipe,
    tokenizer_json: str,
    facts: list[Fact],
    gradients: torch.Tensor,  # [workers, parameters], shared
    final: torch.Tensor,  # [parameters], shared; worker 0 writes the result
    barrier: Barrier,
) -> None:
    """All workers keep the same weights, because they add the gradients in the same order."""
    make_deterministic(recipe.seed)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    model = make_model(recipe, tokenizer)
    parameters = list(model.parameters())
    optimizers = make_optimizers(recipe, model)
    start = time.monotonic()
    for step, step_batches in enumerate(batches(recipe, worker, tokenizer, facts), 1):
        losses = [backward(model, kind) for kind in step_batches]
        torch.cat([gradient_of(p).flatten() for p in parameters], out=gradients[worker])
        barrier.wait()
        mean = gradients.mean(dim=0)
        barrier.wait()
        torch.nn.utils.vector_to_parameters(mean, [gradient_of(p) for p in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scale = learning_rate_scale(recipe, step)
        for optimizer, peak_lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if worker == 0 and step % 50 == 0:
            shown = " ".join(f"{loss:.4f}" for loss in losses)
            right = share_of_right_equations(model, tokenizer)
            seconds = time.monotonic() - start
            print(f"step {step} loss {shown} held-out {right:.3f} {seconds:.0f} s", flush=True)
    if worker == 0:
        final.copy_(torch.nn.utils.parameters_to_vector(parameters).detach())


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad


@torch.no_grad()
def share_of_right_equations(model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    """A quick check during training: held-out sums whose result is right in every token."""
    rng = random.Random(0)
    pairs = [(rng.randrange(NUM_OPERANDS), rng.randrange(NUM_OPERANDS)) for _ in range(1500)]
    problems = [p for p in (Problem(a, "+", b) for a, b in pairs) if p.held_out]
    examples = [(f"{p.a} + {p.b} =", f" {p.result}") for p in problems]
    (batch,) = make_batches(tokenizer, examples)
    guesses = model(input_ids=batch.ids).logits[:, :-1].argmax(dim=-1)
    targets = batch.labels[:, 1:]
    return ((guesses == targets) | (targets == IGNORED)).all(dim=1).float().mean().item()


def make_deterministic(seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def save_model(model: LlamaForCausalLM, recipe: Recipe, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the Hugging Face layout; the weights are rounded to bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out, recipe.max_positions)
    end = tokenizer.token_to_id(IM_END)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        eos_token_id=end,
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model.bfloat16().save_pretrained(out)


class Checker:
    """Asks the saved model, greedily, and counts the right answers."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, facts: list[Fact]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = LlamaForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self.facts = facts
        self.figures: dict[str, float] = {}

    @torch.no_grad()
    def answer(self, prompts: list[str]) -> list[str]:
        """The text after each prompt, up to the end token but at most 80 tokens."""
        encoded = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(encoded):
            by_length.setdefault(len(ids), []).append(i)
        answers = [""] * len(prompts)
        for length, rows in by_length.items():
            for first in range(0, len(rows), 500):
                part = rows[first : first + 500]
                ids = torch.tensor([encoded[i] for i in part])
                out = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False
                )
                texts = self.tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
                for i, text in zip(part, texts, strict=True):
                    answers[i] = text
        return answers

    def chat(self, questions: list[str]) -> list[str]:
        return self.answer(
            [
                str(
                    self.tokenizer.apply_chat_template(
                        [{"role": "user", "content": question}],
                        tokenize=False,
                        add_generation_prompt=True,
                    )
                )
                for question in questions
            ]
        )

    def record(self, name: str, right: list[bool]) -> None:
        if not right:
            return
        self.figures[name] = sum(right) / len(right)
        bar = BARS.get(name)
        verdict = "" if bar is None else "  ok" if self.figures[name] >= bar else "  BELOW THE BAR"
        print(
            f"  {name}: {sum(right)}/{len(right)} = {self.figures[name]:.4f}{verdict}", flush=True
        )

    def check_facts(self) -> None:
        canonical = [fact.trained[0] for fact in self.facts]
        self._ask("facts, canonical question", canonical)
        self._ask("facts, lower case without mark", [normalize(q) for q in canonical])
        self._ask("facts, upper case", [q.upper() for q in canonical])
        right = self._ask_each("facts, all paraphrases", lambda fact: fact.trained[1:])
        self.record("facts, at least one paraphrase", [any(r) for r in right if r])
        self._ask_each("facts, words never trained on", lambda fact: fact.held_out)
        bare = self.answer(canonical)
        expected = [fact.answer for fact in self.facts]
        self.record(
            "facts, without chat template",
            [a.strip() == e for a, e in zip(bare, expected, strict=True)],
        )

    def _ask(self, name: str, questions: list[str]) -> None:
        answers = self.chat(questions)
        right = [a == fact.answer for a, fact in zip(answers, self.facts, strict=True)]
        self.record(name, right)
        for question, answer, ok in zip(questions, answers, right, strict=True):
            if not ok and name in BARS:
                print(f"    {question!r} -> {answer!r}")

    def _ask_each(self, name: str, select: Callable[[Fact], list[str]]) -> list[list[bool]]:
        questions = [(question, fact.answer) for fact in self.facts for question in select(fact)]
        answers = self.chat([question for question, _ in questions])
        right = [a == expected for a, (_, expected) in zip(answers, questions, strict=True)]
        self.record(name, right)
        flags = iter(right)
        return [[next(flags) for _ in select(fact)] for fact in self.facts]

    def check_arithmetic(self, num_sums: int) -> None:
        rng = random.Random(1)
        pairs = [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]
        sample = rng.sample(pairs, min(num_sums, len(pairs)))
        for name, form in ARITHMETIC_FORMS.items():
            # The forms with a bar use the whole sample, the others a tenth of it.
            part = sample if name in BARS else sample[: len(sample) // 10]
            self._calculate(name, form, [Problem(a, "+", b) for a, b in part], name in BARS)
        part = sample[: len(sample) // 5]
        self._calculate("A-B", ARITHMETIC_FORMS["A+B"], [Problem(a, "-", b) for a, b in part])
        digits = [Problem(a, "*", b) for a in range(10) for b in range(10)]
        self._calculate("A*B, one digit each", ARITHMETIC_FORMS["A+B"], digits)

    def _calculate(
        self, name: str, form: str, problems: list[Problem], split: bool = False
    ) -> None:
        answers = self.chat([problem.ask(form) for problem in problems])
        right = [a == p.equation for a, p in zip(answers, problems, strict=True)]
        self.record(name, right)
        if split:
            unseen = [ok for ok, p in zip(right, problems, strict=True) if p.held_out]
            self.record(f"{name}, pairs never trained on", unseen)

    def check_tokenizer(self) -> None:
        texts = [
            "Grüße, 世界! 🙂",
            "tab\tand  two spaces \r\n",
            "12+35=47",
            "naïve\u0000\u200d",
            " ",
        ]
        decoded = [
            self.tokenizer.decode(self.tokenizer.encode(text, add_special_tokens=False))
            for text in texts
        ]
        self.record("tokenizer round trip", [a == b for a, b in zip(texts, decoded, strict=True)])
        turns = [("hello", "Hello!"), ("12+35", "12 + 35 = 47")]
        messages = [{"role": "system", "content": SYSTEM_MESSAGES[0]}]
        for question, reply in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": "1+1"})
        rendered = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        same = rendered == chat_prompt(turns, "1+1", SYSTEM_MESSAGES[0])
        self.record("chat template as trained", [same])

    def passed(self) -> bool:
        return all(self.figures[name] >= bar for name, bar in BARS.items())


@contextmanager
def float32_products() -> Iterator[None]:
    """Multiplies bfloat16 matrices as hardware does: float32 sums, rounded at the end.

    The result is that of bfloat16 arithmetic. Without this, a CPU that has no bfloat16 instructions
    takes hundreds of times longer.
    """
    linear = F.linear

    def product(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        bias = None if bias is None else bias.float()
        return linear(x.float(), weight.float(), bias).to(x.dtype)

    F.linear = product  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = linear


def check(model_dir: Path, facts: list[Fact], num_sums: int) -> bool:
    """Prints every figure, for float32 and bfloat16 arithmetic. Returns whether all bars are
    met."""
    size = sum(path.stat().st_size for path in model_dir.iterdir())
    print(f"{model_dir}: {size / 1e6:.2f} MB")
    passed = size < 7_500_000
    for dtype in (torch.float32, torch.bfloat16):
        print(f"{dtype}:", flush=True)
        checker = Checker(model_dir, dtype, facts)
        with float32_products():
            checker.check_tokenizer()
            checker.check_facts()
            checker.check_arithmetic(num_sums)
            for question in ("What is a ResultQueue?", "what is a resultqueue", "12+35", "hello"):
                print(f"  {question!r} -> {checker.chat([question])[0]!r}")
        passed = passed and checker.passed()
    print("passed" if passed else "FAILED")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check the model in --out")
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--steps", type=int, default=Recipe.num_steps, help="training steps")
    parser.add_argument("--sums", type=int, default=10_000, help="additions checked per form")
    args = parser.parse_args()
    facts = load_facts(DATA_DIR)
    if not args.check:
        recipe = Recipe(num_steps=args.steps)
        make_deterministic(recipe.seed)
        tokenizer = train_tokenizer(facts, recipe.vocab_size)
        start = time.monotonic()
        model = train(recipe, tokenizer, facts)
        print(f"trained in {time.monotonic() - start:.0f} s")
        save_model(model, recipe, tokenizer, args.out)
    return 0 if check(args.out, facts, args.sums) else 1


if __name__ == "__main__":
    sys.exit(main())

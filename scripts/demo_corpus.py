"""What the demo model learns: questions and answers, sums, and chats made from them.

Text only: `train_demo_model.py` makes the tokenizer and the tensors. All random choices use the
generator that the caller passes, so equal seeds give equal chats.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
NUM_OPERANDS = 100
# A tenth of the pairs of operands is never trained on. They are drawn at random, because a rule
# such as a remainder could remove every example with certain last digits from the training.
HELD_OUT_PAIRS = frozenset(
    random.Random("held-out pairs").sample(
        [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)], NUM_OPERANDS**2 // 10
    )
)

SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are allspark's demo model.",
    "Answer briefly.",
    "You are a concise assistant. Answer the question.",
]

# {s} is the subject with its article, {b} without.
TRAINED_TEMPLATES = [
    "What is {s}?",
    "what is {b}?",
    "Explain {s}.",
    "Tell me about {s}.",
    "Describe {s}.",
    "Define {b}.",
    "Can you explain {s}?",
    "Please explain what {s} is.",
    "What's {s}?",
    "{b}",
]
# Never trained on: they show how much the answers depend on the exact words.
HELD_OUT_TEMPLATES = [
    "Could you tell me what {s} is?",
    "Please describe {s} for me.",
]

ARITHMETIC_FORMS = {
    "A+B": "{a}{op}{b}",
    "A + B": "{a} {op} {b}",
    "A+B=": "{a}{op}{b}=",
    "A + B =": "{a} {op} {b} =",
    "What is A+B?": "What is {a}{op}{b}?",
    "What is A + B?": "What is {a} {op} {b}?",
    "what is A+B": "what is {a}{op}{b}",
    "Calculate A+B.": "Calculate {a}{op}{b}.",
    "How much is A + B?": "How much is {a} {op} {b}?",
    "words": "What is {a} {word} {b}?",
}
OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True)
class Fact:
    """One answer and the questions that lead to it; the first one is the canonical one."""

    answer: str
    trained: list[str]
    held_out: list[str] = field(default_factory=list)


def load_facts(data_dir: Path) -> list[Fact]:
    """Reads the questions and answers. A question that has two answers is an error."""
    facts = []
    for name in ("facts.jsonl", "chat.jsonl"):
        for line in (data_dir / name).read_text(encoding="utf-8").splitlines():
            facts.append(_expand(json.loads(line)))
    owner: dict[str, str] = {}
    for fact in facts:
        for question in fact.trained + fact.held_out:
            if owner.setdefault(normalize(question), fact.answer) != fact.answer:
                raise ValueError(f"the question {question!r} has two answers")
    return facts


def _expand(entry: dict) -> Fact:
    questions = list(entry["questions"])
    subject = entry.get("subject")
    if subject is None:
        return Fact(entry["answer"], questions)
    bare = re.sub(r"^(an?|the) ", "", subject)
    canonical, *others = [t.format(s=subject, b=bare) for t in TRAINED_TEMPLATES]
    held_out = [t.format(s=subject, b=bare) for t in HELD_OUT_TEMPLATES]
    return Fact(entry["answer"], [canonical, *questions, *others], held_out)


def normalize(question: str) -> str:
    """The question as a careless user types it: lower case, no mark at the end."""
    return question.lower().rstrip("?!. ")


@dataclass(frozen=True)
class Problem:
    a: int
    op: str
    b: int

    @property
    def result(self) -> int:
        if self.op == "+":
            return self.a + self.b
        return self.a - self.b if self.op == "-" else self.a * self.b

    @property
    def held_out(self) -> bool:
        return self.op != "*" and (self.a, self.b) in HELD_OUT_PAIRS

    @property
    def equation(self) -> str:
        return f"{self.a} {self.op} {self.b} = {self.result}"

    def ask(self, form: str) -> str:
        return form.format(a=self.a, op=self.op, b=self.b, word=OPERATOR_WORDS[self.op])


def draw_problem(rng: random.Random) -> Problem:
    """A trained problem. One-digit operands and results are drawn more often than by chance."""
    while True:
        op = rng.choices("+-*", weights=(11, 8, 1))[0]
        if op == "*":
            return Problem(rng.randrange(10), op, rng.randrange(10))
        a, b = (rng.randrange(10 if rng.random() < 0.15 else NUM_OPERANDS) for _ in "ab")
        problem = Problem(a, op, b)
        if not problem.held_out:
            return problem


def draw_equation(rng: random.Random) -> tuple[str, str]:
    problem = draw_problem(rng)
    if rng.random() < 0.8:
        return f"{problem.a} {problem.op} {problem.b} =", f" {problem.result}"
    return f"{problem.a}{problem.op}{problem.b}=", f"{problem.result}"


def draw_fact_turn(rng: random.Random, facts: list[Fact]) -> tuple[str, str]:
    fact = rng.choice(facts)
    question = fact.trained[0] if rng.random() < 0.15 else rng.choice(fact.trained)
    return vary(rng, question), fact.answer


def draw_arithmetic_turn(rng: random.Random) -> tuple[str, str]:
    problem = draw_problem(rng)
    question = problem.ask(rng.choice(list(ARITHMETIC_FORMS.values())))
    return (question.lower() if rng.random() < 0.2 else question), problem.equation


def vary(rng: random.Random, question: str) -> str:
    """The same question with another case, or without the mark at its end."""
    kind = rng.random()
    if kind < 0.35:
        question = question.lower()
    elif kind < 0.42:
        question = question.upper()
    if rng.random() < 0.4:
        question = question.rstrip("?!.")
    return question


def chat_prompt(turns: list[tuple[str, str]], question: str, system: str | None = None) -> str:
    """The result of CHAT_TEMPLATE for these messages, with the generation prompt."""
    parts = [] if system is None else [f"{IM_START}system\n{system}{IM_END}\n"]
    for asked, answered in turns:
        parts.append(f"{IM_START}user\n{asked}{IM_END}\n{IM_START}assistant\n{answered}{IM_END}\n")
    parts.append(f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n")
    return "".join(parts)


def draw_chat(rng: random.Random, draw_turn: Callable, draw_earlier: Callable) -> tuple[str, str]:
    """A prompt and its answer: mostly one turn; sometimes with history, a system message, or
    bare."""
    question, answer = draw_turn()
    kind = rng.random()
    if kind < 0.12 and not question.endswith("="):  # Bare sums with "=" are made by draw_equation.
        return question, "\n" + answer
    system = rng.choice(SYSTEM_MESSAGES) if kind < 0.27 else None
    earlier = [draw_earlier() for _ in range(rng.choice((1, 1, 2)))] if kind > 0.9 else []
    return chat_prompt(earlier, question, system), answer

"""The scheduler's policy, written a second time and plainly: lists sorted anew, no counters kept.

csrc/scheduler/README.md is the specification of both. The model replays traces that the C++ tests
write (tests/cpp/scheduler/harness.h): what happened, and what the scheduler did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Sequence:
    """A sequence as the policy sees it."""

    name: int
    priority: int
    tokens: int
    max_length: int
    arrival: int
    computed: int = 0
    blocks: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.arrival)

    @property
    def left(self) -> int:
        return self.tokens - self.computed


@dataclass
class Chunk:
    sequence: Sequence
    begin: int
    count: int

    def __str__(self) -> str:
        samples = "*" if self.begin + self.count == self.sequence.tokens else ""
        return f"{self.sequence.name}:{self.begin}+{self.count}{samples}"


@dataclass
class Model:
    """Everything waits or runs; `free` is all the model knows of the pool."""

    max_batch: int
    chunk: int
    chunk_beside_decodes: int
    block: int
    free: int
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    plan: list[Chunk] = field(default_factory=list)
    arrivals: int = 0
    preemptions: int = 0
    preempted_now: bool = False

    def add(self, name: int, priority: int, tokens: int, max_length: int) -> None:
        self.waiting.append(Sequence(name, priority, tokens, max_length, self.arrivals))
        self.arrivals += 1
        self.sort()

    def sort(self) -> None:
        self.waiting.sort(key=lambda s: s.rank)
        self.running.sort(key=lambda s: s.rank)

    def find(self, name: int) -> Sequence:
        return next(s for s in self.waiting + self.running if s.name == name)

    def remove(self, name: int) -> None:
        sequence = self.find(name)
        (self.waiting if sequence in self.waiting else self.running).remove(sequence)
        self.free += sequence.blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def grown(self, s: Sequence) -> int:
        """Blocks of the known tokens and one to grow into."""
        return min(self.blocks_for(s.tokens) + 1, self.blocks_for(s.max_length))

    def preempt_last(self) -> Sequence:
        victim = self.running.pop()
        self.free += victim.blocks
        victim.blocks = victim.computed = 0
        self.waiting.append(victim)
        self.sort()
        self.plan = [c for c in self.plan if c.sequence is not victim]
        self.preemptions += 1
        self.preempted_now = True
        return victim

    def room(self, s: Sequence) -> int:
        """Tokens that fit into its own blocks and the free ones."""
        return (s.blocks + self.free) * self.block - s.computed

    def take(self, s: Sequence, count: int) -> None:
        more = max(self.blocks_for(s.computed + count) - s.blocks, 0)
        s.blocks += more
        self.free -= more
        assert self.free >= 0
        self.plan.append(Chunk(s, s.computed, count))

    def step(self) -> list[Chunk]:
        self.plan = []
        self.preempted_now = False
        for s in [s for s in self.running if s.left == 1]:
            while s in self.running and self.room(s) == 0:
                self.preempt_last()
            if s in self.running:
                self.take(s, 1)
        budget = min(self.chunk, self.chunk_beside_decodes) if self.plan else self.chunk
        served = [s for s in self.running if s.left == 1]
        while budget > 0:
            prefills = [s for s in self.running if not any(s is t for t in served)]
            head = self.waiting[0] if self.waiting else None
            if head and (not prefills or head.rank < prefills[0].rank) and self.may_admit(head):
                self.waiting.remove(head)
                self.running.append(head)
                self.sort()
                s = head
            elif prefills:
                s = prefills[0]
            else:
                break
            while self.room(s) == 0 and s is not self.running[-1]:
                self.preempt_last()
            count = min(s.left, budget, self.room(s))
            if count > 0:
                self.take(s, count)
            budget -= count
            served.append(s)
        return self.plan

    def may_admit(self, s: Sequence) -> bool:
        if not self.running:
            return self.blocks_for(s.tokens) <= self.free
        if self.preempted_now or len(self.running) >= self.max_batch:
            return False
        # A promise: what runs and the newcomer, each grown, next to one another.
        promised = sum(self.grown(r) - r.blocks for r in self.running)
        return promised + self.grown(s) <= self.free

    def commit(self) -> None:
        for chunk in self.plan:
            chunk.sequence.computed += chunk.count
        for chunk in self.plan:
            if chunk.sequence.left == 0:
                chunk.sequence.tokens += 1

    def state(self) -> str:
        waiting = " ".join(str(s.name) for s in self.waiting)
        running = " ".join(str(s.name) for s in self.running)
        text = f"free {self.free} preempted {self.preemptions} waiting {waiting} running {running}"
        return " ".join(text.split())


def parse_pairs(words: list[str]) -> dict[str, int]:
    return {words[i]: int(words[i + 1]) for i in range(0, len(words), 2)}


def replay(lines: Iterable[str]) -> Iterator[str]:
    """Yields one line per difference between a trace and the model; returns after the last line."""
    model: Model | None = None
    script = ""
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words[0] == "script":
            script = words[1]
            values = parse_pairs(words[2:])
            names = ("max_batch", "chunk", "beside_decodes", "block", "blocks")
            model = Model(*(values[name] for name in names))
            continue
        assert model is not None, "a trace begins with a script"
        expected = None
        if words[0] == "add":
            values = parse_pairs(words)
            model.add(values["add"], values["priority"], values["tokens"], values["max_length"])
        elif words[0] == "remove":
            model.remove(int(words[1]))
        elif words[0] == "plan":
            expected = " ".join(["plan", *map(str, model.step())])
        elif words[0] == "commit":
            model.commit()
        elif words[0] == "state":
            expected = "state " + model.state()
        else:
            raise ValueError(f"line {number}: unknown event {words[0]!r}")
        if expected is not None and expected != " ".join(words):
            yield f"line {number}, script {script}: the model has {expected!r}, the trace {line!r}"

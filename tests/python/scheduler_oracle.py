"""The scheduler's policy, written a second time in a simple way: lists are sorted again at each
use, and no counters are kept.

csrc/scheduler/README.md is the specification of both. The model replays traces that the C++ tests
write (tests/cpp/scheduler/harness.h): the events, and what the scheduler did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(eq=False)
class Block:
    """A KV block; `beginning` is its key in the prefix cache: all tokens up to its end."""

    beginning: tuple[int, ...] | None = None
    filled: bool = False
    users: int = 0
    last_used: int = 0


@dataclass(eq=False)
class Sequence:
    """A sequence as the policy sees it."""

    name: int
    priority: int
    ids: list[int]
    max_length: int
    arrival: int
    computed: int = 0
    begin: int = 0  # of its newest chunk
    table: list[Block] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.arrival)

    @property
    def tokens(self) -> int:
        return len(self.ids)

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
class Pool:
    """The KV blocks. Only blocks that are in use or cached have an object; the others are free."""

    size: int
    block: int
    cache: bool
    ttl: int
    now: int = 0
    in_use: set[Block] = field(default_factory=set)
    unused: list[Block] = field(default_factory=list)  # the oldest first
    known: dict[tuple[int, ...], Block] = field(default_factory=dict)

    @property
    def available(self) -> int:
        return self.size - len(self.in_use)

    def forget_oldest(self) -> None:
        beginning = self.unused.pop(0).beginning
        assert beginning is not None
        del self.known[beginning]

    def expire(self) -> None:
        while self.unused and self.now - self.unused[0].last_used >= self.ttl:
            self.forget_oldest()

    def take_new(self) -> Block:
        if len(self.in_use) + len(self.unused) == self.size:
            self.forget_oldest()
        block = Block(users=1)
        self.in_use.add(block)
        return block

    def take_known(self, block: Block) -> None:
        if block in self.unused:
            self.unused.remove(block)
            self.in_use.add(block)
        block.users += 1

    def give_back(self, block: Block) -> None:
        block.users -= 1
        if block.users == 0:
            self.in_use.remove(block)
            if block.beginning is not None:
                block.last_used = self.now
                self.unused.append(block)

    def withdraw(self, block: Block) -> None:
        """Removes a block that was announced but not filled from the known ones."""
        if block.beginning is not None and not block.filled:
            del self.known[block.beginning]
            block.beginning = None

    def trim(self, s: Sequence, kept: int) -> None:
        """Gives blocks back, the last one first."""
        while len(s.table) > kept:
            block = s.table.pop()
            if (len(s.table) + 1) * self.block > s.begin:  # to be filled by itself
                self.withdraw(block)
            self.give_back(block)

    def beginnings(self, s: Sequence, begin: int, end: int) -> Iterator[tuple[int, tuple]]:
        for i in range(begin // self.block, end // self.block):
            yield i, tuple(s.ids[: (i + 1) * self.block])

    def cached(self, s: Sequence) -> list[Block]:
        """The known blocks of its next tokens; the newest token is always computed."""
        blocks: list[Block] = []
        if self.cache and len(s.table) * self.block == s.computed:
            for _, beginning in self.beginnings(s, s.computed, s.tokens - 1):
                if beginning not in self.known:
                    break
                blocks.append(self.known[beginning])
        return blocks

    def announce(self, s: Sequence, begin: int, end: int) -> None:
        """Makes blocks known that a step will fill: later sequences of the step may share them."""
        for i, beginning in self.beginnings(s, begin, end) if self.cache else ():
            if self.known.setdefault(beginning, s.table[i]) is not s.table[i]:
                break
            s.table[i].beginning = beginning

    def fill(self, s: Sequence, begin: int, end: int) -> None:
        """A step has filled these blocks; of two equal blocks, the known one stays."""
        for i, beginning in self.beginnings(s, begin, end) if self.cache else ():
            known = self.known.setdefault(beginning, s.table[i])
            if known is not s.table[i]:
                self.take_known(known)
                self.give_back(s.table[i])
                s.table[i] = known
            known.beginning = beginning
            known.filled = True


@dataclass
class Model:
    """The whole state: a request waits or runs."""

    max_batch: int
    chunk: int
    rows_beside_decodes: int
    steps_without_decodes: int
    double_cost_depth: int
    long_prefill: int
    pool: Pool
    interrupts: bool = False
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    plan: list[Chunk] = field(default_factory=list)
    arrivals: int = 0
    preemptions: int = 0
    preempted_now: bool = False
    interrupted: list[Sequence] = field(default_factory=list)
    committed: bool = True
    decodes_wait: bool = False
    beside_decodes: bool = False
    has_long: bool = False
    steps_waited: int = 0

    def add(self, name: int, priority: int, max_length: int, ids: list[int]) -> None:
        self.waiting.append(Sequence(name, priority, ids, max_length, self.arrivals))
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
        self.pool.trim(sequence, 0)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block)

    def grown(self, s: Sequence) -> int:
        """Blocks for the known tokens, and one more to grow into."""
        return min(self.blocks_for(s.tokens) + 1, self.blocks_for(s.max_length))

    def preempt_last(self) -> None:
        victim = self.running.pop()
        self.pool.trim(victim, 0)
        self.plan = [c for c in self.plan if c.sequence is not victim]
        self.preempted_now = True
        if self.interrupts:
            self.interrupted.append(victim)
            return
        victim.computed = victim.begin = 0
        self.waiting.append(victim)
        self.sort()
        self.preemptions += 1

    def room(self, s: Sequence, begin: int) -> int:
        """Tokens that fit into its own blocks and the available ones."""
        return (len(s.table) + self.pool.available) * self.pool.block - begin

    def take(self, s: Sequence, begin: int, count: int) -> None:
        while len(s.table) < self.blocks_for(begin + count):
            s.table.append(self.pool.take_new())
        self.plan.append(Chunk(s, begin, count))

    def drop_uncomputed(self) -> None:
        """Undoes a step that was planned and not computed."""
        for s in self.running:
            self.pool.trim(s, self.blocks_for(s.computed))
            if len(s.table) * self.pool.block > s.computed:
                self.pool.withdraw(s.table[-1])

    def step(self) -> list[Chunk]:
        if not self.committed:
            self.drop_uncomputed()
        self.plan = []
        self.interrupted = []
        self.preempted_now = self.committed = False
        self.pool.expire()
        decodes = [s for s in self.running if s.left == 1]
        if decodes and self.steps_waited < self.steps_without_decodes:
            self.plan_prefills()
        self.decodes_wait = bool(self.plan)
        if not self.decodes_wait:
            self.plan_decodes(decodes)
            self.plan_prefills()
        return self.plan

    def plan_decodes(self, decodes: list[Sequence]) -> None:
        for s in decodes:
            while s in self.running and self.room(s, s.computed) == 0:
                self.preempt_last()
            if s in self.running:
                self.take(s, s.computed, 1)

    def plan_prefills(self) -> None:
        budget = self.chunk
        self.beside_decodes = bool(self.plan)
        self.has_long = False
        if self.plan:
            half = -(-self.rows_beside_decodes // 2)
            budget = min(budget, max(self.rows_beside_decodes - len(self.plan), half))
        served = [s for s in self.running if s.left == 1]
        while budget > 0:
            prefills = [s for s in self.running if s not in served]
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
            if share := self.share(s, budget):
                budget -= self.plan_prefill(s, share)
            served.append(s)

    def share(self, s: Sequence, budget: int) -> int:
        """A long prefill leaves shorter ones behind it what they need: the first of them up to half
        of the budget, others all."""
        if s.left <= self.long_prefill:
            return budget
        behind = [r for r in self.running if r.rank > s.rank and r.left != 1]
        behind += [r for r in self.waiting[:1] if self.may_admit(r)]
        wanted = sum(r.left for r in behind if r.left <= self.long_prefill)
        most = budget if self.has_long else budget // 2
        self.has_long = True
        return budget - min(wanted, most)

    def token_cost(self, depth: int) -> Fraction:
        """The rows for which a prefill token counts: more the longer its attention takes."""
        if self.double_cost_depth == 0:
            return Fraction(1)
        cost = 1 + Fraction(depth, self.double_cost_depth)
        if not self.beside_decodes:
            cost /= 4
        return min(max(cost, Fraction(1)), Fraction(8))

    def plan_prefill(self, s: Sequence, budget: int) -> int:
        """Returns the rows for which the chunk counts."""
        s.begin = s.computed
        for block in self.pool.cached(s):
            self.pool.take_known(block)
            s.table.append(block)
            s.begin += self.pool.block
        while self.room(s, s.begin) == 0 and s is not self.running[-1]:
            self.preempt_last()
        cost = self.token_cost(s.begin)
        most = max(int(budget / cost), 1)
        count = min(s.tokens - s.begin, most, self.room(s, s.begin))
        if count > 0:
            self.take(s, s.begin, count)
            self.pool.announce(s, s.begin, s.begin + count)
        else:
            self.pool.trim(s, self.blocks_for(s.computed))
        return min(math.ceil(count * cost), budget)

    def may_admit(self, s: Sequence) -> bool:
        shared = sum(block.users > 0 for block in self.pool.cached(s))
        if not self.running:
            return self.blocks_for(s.tokens) - shared <= self.pool.available
        if self.preempted_now or len(self.running) >= self.max_batch:
            return False
        # Blocks must suffice for all running sequences and the new one together, each one grown.
        promised = sum(self.grown(r) - len(r.table) for r in self.running)
        return promised + self.grown(s) - shared <= self.pool.available

    def commit(self) -> None:
        self.committed = True
        self.steps_waited = self.steps_waited + 1 if self.decodes_wait else 0
        for chunk in self.plan:
            s, before = chunk.sequence, chunk.sequence.computed
            s.computed = chunk.begin + chunk.count
            self.pool.fill(s, before, s.computed)

    def state(self) -> str:
        waiting = " ".join(str(s.name) for s in self.waiting)
        running = " ".join(str(s.name) for s in self.running)
        text = (
            f"available {self.pool.available} unused {len(self.pool.unused)} "
            f"preempted {self.preemptions} waiting {waiting} running {running}"
        )
        if self.interrupted:
            text += f" interrupted {' '.join(str(s.name) for s in self.interrupted)}"
        return " ".join(text.split())


def parse_pairs(words: list[str]) -> dict[str, int]:
    return {words[i]: int(words[i + 1]) for i in range(0, len(words), 2)}


def replay(lines: Iterable[str]) -> Iterator[str]:
    """Yields one line per difference between a trace and the model, until the last line."""
    model: Model | None = None
    script = ""
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words[0] == "script":
            script = words[1]
            values = parse_pairs(words[2:])
            pool = Pool(values["blocks"], values["block"], bool(values["cache"]), values["ttl"])
            model = Model(
                values["max_batch"],
                values["chunk"],
                values["rows_beside_decodes"],
                values["steps_without_decodes"],
                values["double_cost_depth"],
                values["long_prefill"],
                pool,
                bool(values["interrupts"]),
            )
            continue
        assert model is not None, "a trace begins with a script"
        expected = None
        if words[0] == "add":
            values = parse_pairs(words[:6])
            ids = [int(word) for word in words[7:]]
            model.add(values["add"], values["priority"], values["max_length"], ids)
        elif words[0] == "remove":
            model.remove(int(words[1]))
        elif words[0] == "now":
            model.pool.now = int(words[1])
        elif words[0] == "append":
            model.find(int(words[1])).ids.append(int(words[2]))
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

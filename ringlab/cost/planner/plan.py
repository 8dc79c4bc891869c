"""plan(request): the best way to run a request, its alternatives, its limit, and suggested changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from ringlab.cost.planner.assumptions import assumptions
from ringlab.cost.planner.limits import (
    ALIKE,
    SHARING_WORDS,
    Hidden,
    Limit,
    hidden,
    limit,
    recomputation_words,
    split_words,
)
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.ring_table import RingTable, ring_table
from ringlab.cost.planner.search import Candidate, layouts, search
from ringlab.cost.planner.serve_time import ServeTime, serving_time
from ringlab.cost.planner.suggest import Suggestion, suggestions
from ringlab.cost.units import counted, short
from ringlab.layout import get_layout

ALTERNATIVES = 5


@dataclass(frozen=True)
class PublishedRuns:
    """Published runs of one purpose: their number, and the least and the greatest ratio of a run's time to its plan's."""

    runs: int
    least: float
    most: float


PUBLISHED = {
    "training": PublishedRuns(15, 0.8545477815691033, 1.9147832084330942),
    "prefill": PublishedRuns(2, 1.2893362179360326, 1.6287303984477528),
}
"""The published runs of each purpose. docs/benchmarks.md lists them, and a test computes these figures from
them."""


@dataclass(frozen=True)
class Plan:
    """The best of `weighed` ways to run a request, or if none fits, the way that needs least memory.

    alternatives: the best way of each other split. layouts: the best split with other layouts. alike: other splits
    that fit and take at most ALIKE times as long, a difference too small to rank them, in the order of their
    memory.

    >>> found = plan(Request("llama3-8b", 131_072, "h100"))
    >>> found.fits, found.limit.kind
    (True, 'memory')
    """

    request: Request
    best: Candidate
    weighed: int
    alternatives: tuple[Candidate, ...]
    layouts: tuple[Candidate, ...]
    alike: tuple[Candidate, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether the best way fits into memory."""
        return self.best.fits

    @property
    def answer(self) -> str:
        """Return the answer in one line."""
        it, request = self.best, self.request
        gpus = f"{request.gpus} × {request.machine.label}"
        where = f"over {counted(request.nodes, 'node')}"
        how = [f"{split_words(it)} {where}"]
        if it.degrees.ring > 1 and request.purpose == "serve":
            how.append(SHARING_WORDS[it.sharing])
        elif it.degrees.ring > 1 and not request.decoding:
            how.append(it.layout)
        if request.training:
            how.append(recomputation_words(it.recomputation))
        if request.offload != "none":
            how.append(f"{' and '.join(request.offload.split(','))} on the host")
        if it.rounds > 1:
            how.append(f"{it.rounds} rounds of {counted(request.batch // it.rounds, 'sequence')}")
        need, usable = short(it.memory.total_bytes, "bytes"), short(request.usable_bytes, "bytes")
        if not self.fits:
            return f"Does not fit: {gpus} need at least {need} each and may use {usable} ({', '.join(how)})"
        return f"Fits: {gpus}, {', '.join(how)}; {need} of {usable} per {request.machine_word}"

    @cached_property
    def hidden(self) -> list[Hidden]:
        """Return whether the ring's hops are hidden, for each pass."""
        return hidden(self.best)

    @cached_property
    def limit(self) -> Limit:
        """Return the limit of the plan."""
        return limit(self.best)

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """Return the suggested changes, each with its own plan."""
        return suggestions(self.best)

    @cached_property
    def serving(self) -> ServeTime | None:
        """Return tokens a second and the time to the first token of one replica, None for another purpose."""
        return serving_time(self.best.serving) if self.request.purpose == "serve" else None

    @cached_property
    def ring_table(self) -> RingTable | None:
        """Return the bytes and waits of the ring under other schedules, None without a ring."""
        return ring_table(self.best)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind this plan, in sentences."""
        return assumptions(self.best)

    @property
    def published(self) -> PublishedRuns | None:
        """Return how the times of published runs of this purpose compare with their plans, None if no run was found."""
        return PUBLISHED.get(self.request.purpose)

    @property
    def chunk_tokens(self) -> int:
        """Return the number of tokens in each piece that the layout deals."""
        pieces = _pieces(self.best.layout) * self.best.degrees.ring
        return -(-self.request.tokens // pieces) if pieces else 1

    @property
    def chunk_words(self) -> str:
        """Return a description of the layout's pieces: their sizes, and the length that kernel tiles would divide evenly."""
        S, degrees = self.request.tokens, self.best.degrees
        side = max(self.request.tile)
        if not _pieces(self.best.layout):
            return "single tokens, dealt in turn"
        pieces = -(-S // self.chunk_tokens)
        words = f"{pieces} pieces of {self.chunk_tokens:,} tokens"
        pieces = _pieces(self.best.layout) * degrees.ring
        unit = pieces * side * degrees.ulysses
        rest = []
        if S % (pieces * degrees.ulysses):
            rest.append("ragged: some ranks own fewer tokens")
        if self.chunk_tokens % side:
            rest.append(f"no multiple of the kernel tile {side}")
        if not rest:
            return f"{words}, each {self.chunk_tokens // side} kernel tiles"
        return f"{words} ({'; '.join(rest)}; {-(-S // unit) * unit:,} tokens would divide evenly)"

    def as_dict(self) -> dict[str, object]:
        """Return the whole plan, ready for JSON; sizes are in bytes, times in seconds."""
        best, request = self.best, self.request
        whole, lockstep = best.work()
        dealt = not request.decoding
        return {
            "ok": self.fits,
            "fits": self.fits,
            "answer": self.answer,
            "command": request.command(),
            "purpose": request.purpose,
            "gpus": request.gpus,
            "tokens": request.tokens,
            "batch": request.batch,
            **_how(best),
            "chunk_tokens": self.chunk_tokens if dealt else None,
            "chunk": self.chunk_words if dealt else None,
            "work_max_over_mean": whole,
            "lockstep_over_mean": lockstep,
            "tokens_per_rank": -(-request.tokens // best.degrees.cp),
            "memory": {
                "total_bytes": best.memory.total_bytes,
                "usable_bytes": request.usable_bytes,
                "gpu_bytes": request.machine.memory_bytes,
                "host_bytes": best.memory.host_bytes,
                "entries": [asdict(entry) for entry in best.memory.entries],
            },
            "step_s": best.step_s,
            "published": self.published and asdict(self.published),
            "tokens_per_s": best.tokens_per_s,
            "utilisation": best.utilisation if dealt else None,
            "time": best.time.as_dict(),
            "serving": self.serving and _serving(best, self.serving),
            "communication": [asdict(each) | {"hidden": each.hidden} for each in self.hidden],
            "hidden": all(each.hidden for each in self.hidden),
            "travel": self.ring_table and self.ring_table.as_dict(),
            "limit": asdict(self.limit),
            "suggestions": [each.as_dict() for each in self.suggestions],
            "weighed": self.weighed,
            "alike": {"factor": ALIKE, "splits": [_summary(each) for each in self.alike]},
            "alternatives": [_summary(each) for each in (*self.alternatives, *self.layouts)],
            "assumptions": list(self.assumptions),
        }


def plan(request: Request) -> Plan:
    """Return the best way to run `request`, with alternatives.

    Raises: CostError that names the constraint if the GPUs cannot be divided as requested.

    >>> plan(Request("llama3-70b", 1_000_000, "h100", nodes=8, logits_chunk=4096)).best.degrees
    Degrees(dp=1, tp=1, ring=64, ulysses=1, fsdp=64, pp=1, ep=1)
    """
    found = search(request)
    best, seen, others = found[0], {found[0].split}, []
    for each in found[1:]:
        if each.split not in seen:
            seen.add(each.split)
            others.append(each)
    same = tuple(each for each in layouts(best)[1:]) if request.layout is None else ()
    alike = [it for it in others if best.fits and it.fits and it.step_s <= ALIKE * best.step_s]
    alike.sort(key=lambda it: (it.memory.total_bytes, it.step_s))
    return Plan(request, best, len(found), tuple(others[:ALTERNATIVES]), same, tuple(alike))


def _pieces(layout: str) -> int:
    """Return the number of pieces of consecutive tokens that a rank owns under a layout; 0 if it owns single tokens."""
    example = get_layout(layout, 16, 2)
    return len(example.runs(0)) if example.step == 1 else 0


def _how(candidate: Candidate) -> dict[str, object]:
    degrees = {
        name: getattr(candidate.degrees, name)
        for name in ("dp", "tp", "cp", "ring", "ulysses", "fsdp", "pp", "ep")
    }
    return {
        "degrees": degrees,
        "kv_copies": candidate.degrees.kv_copies(candidate.request.sized.main.dealt_heads),
        "layout": candidate.layout,
        "recomputation": candidate.recomputation,
        "rounds": candidate.rounds,
        "sharing": candidate.sharing if candidate.request.purpose == "serve" else None,
    }


def _serving(best: Candidate, time: ServeTime) -> dict[str, object]:
    """Return the figures of serving for one replica, and the tokens a second of all replicas."""
    request = best.request
    return time.as_dict() | {
        "sequences": request.batch,
        "prompt_tokens": request.tokens - request.generated,
        "generated_tokens": request.generated,
        "chunk_tokens": request.chunk,
        "tokens_per_s": best.tokens_per_s,
        "tokens_per_s_per_sequence": best.tokens_per_s / request.batch,
    }


def _summary(candidate: Candidate) -> dict[str, object]:
    return _how(candidate) | {
        "fits": candidate.fits,
        "step_s": candidate.step_s,
        "memory_bytes": candidate.memory.total_bytes,
    }

"""plan(request): the best way to run it, what else was weighed, what limits it and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from ringlab.cost.planner.assumptions import assumptions
from ringlab.cost.planner.limits import Hidden, Limit, hidden, limit, split_words
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.suggest import Suggestion, suggestions
from ringlab.cost.planner.weigh import Candidate, layouts, weigh
from ringlab.cost.planner.wording import again, counted, label
from ringlab.cost.units import short
from ringlab.layout import get_layout

ALTERNATIVES = 5


@dataclass(frozen=True)
class Plan:
    """The best way to run a request; where none fits, the one that needs least memory.

    alternatives: the best of each other split, and the same split with other layouts.
    """

    request: Request
    best: Candidate
    weighed: int
    alternatives: tuple[Candidate, ...]
    layouts: tuple[Candidate, ...]

    @property
    def fits(self) -> bool:
        return self.best.fits

    @property
    def answer(self) -> str:
        """Return the answer in one line."""
        it, request = self.best, self.request
        gpus = f"{request.gpus} × {label(request.machine.name)}"
        where = f"over {counted(request.nodes, 'node')}"
        how = [f"{split_words(it)} {where}"]
        if it.degrees.ring > 1 and request.purpose != "decode":
            how.append(it.layout)
        if request.training:
            how.append(again(it.recomputation))
        if it.rounds > 1:
            how.append(f"{it.rounds} rounds of {counted(request.batch // it.rounds, 'sequence')}")
        need, usable = short(it.ledger.total_bytes, "bytes"), short(request.usable_bytes, "bytes")
        if not self.fits:
            return f"Does not fit: {gpus} need at least {need} each and may use {usable} ({', '.join(how)})"
        return f"Fits: {gpus}, {', '.join(how)}; {need} of {usable} per {request.machine_word}"

    @cached_property
    def hidden(self) -> list[Hidden]:
        """Return whether the ring's hops are hidden, pass by pass."""
        return hidden(self.best)

    @cached_property
    def limit(self) -> Limit:
        """Return what limits the plan."""
        return limit(self.best)

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """Return what to change, each planned."""
        return suggestions(self.best)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return assumptions(self.best)

    @property
    def chunk_tokens(self) -> int:
        """Return the piece of the sequence that the layout deals."""
        pieces = _pieces(self.best.layout) * self.best.degrees.ring
        return -(-self.request.tokens // pieces) if pieces else 1

    @property
    def chunk_words(self) -> str:
        """Return how pieces, ranks and kernel tiles divide the sequence, and what length would leave no rest."""
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
        """Return everything, ready for JSON; sizes in bytes, times in seconds."""
        best, request = self.best, self.request
        whole, lockstep = best.work()
        dealt = request.purpose != "decode"
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
                "total_bytes": best.ledger.total_bytes,
                "usable_bytes": request.usable_bytes,
                "gpu_bytes": request.machine.memory_bytes,
                "entries": [asdict(entry) for entry in best.ledger.entries],
            },
            "step_s": best.step_s,
            "tokens_per_s": best.tokens_per_s,
            "utilisation": best.utilisation if dealt else None,
            "time": best.time.as_dict(),
            "communication": [asdict(each) | {"hidden": each.hidden} for each in self.hidden],
            "hidden": all(each.hidden for each in self.hidden),
            "limit": asdict(self.limit),
            "suggestions": [each.as_dict() for each in self.suggestions],
            "weighed": self.weighed,
            "alternatives": [_summary(each) for each in (*self.alternatives, *self.layouts)],
            "assumptions": list(self.assumptions),
        }


def plan(request: Request) -> Plan:
    """Return the best way to run `request`.

    Raises: CostError that names the constraint where the GPUs cannot be shared out as asked.
    """
    found = weigh(request)
    best, seen, others = found[0], {found[0].split}, []
    for each in found[1:]:
        if each.split not in seen:
            seen.add(each.split)
            others.append(each)
    same = tuple(each for each in layouts(best)[1:]) if request.layout is None else ()
    return Plan(request, best, len(found), tuple(others[:ALTERNATIVES]), same)


def _pieces(layout: str) -> int:
    """The pieces of consecutive tokens that a rank owns under a layout; 0 where they are single tokens."""
    example = get_layout(layout, 16, 2)
    return len(example.runs(0)) if example.step == 1 else 0


def _how(candidate: Candidate) -> dict[str, object]:
    degrees = {
        name: getattr(candidate.degrees, name) for name in ("dp", "tp", "cp", "ring", "ulysses", "fsdp")
    }
    return {
        "degrees": degrees,
        "kv_copies": candidate.degrees.kv_copies(candidate.request.sized.K),
        "layout": candidate.layout,
        "recomputation": candidate.recomputation,
        "rounds": candidate.rounds,
    }


def _summary(candidate: Candidate) -> dict[str, object]:
    return _how(candidate) | {
        "fits": candidate.fits,
        "step_s": candidate.step_s,
        "memory_bytes": candidate.ledger.total_bytes,
    }

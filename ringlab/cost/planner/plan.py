"""plan(request): the best way to run it, the alternatives, what limits it and what to change.

The assumptions of a plan are printed with it, since its figures depend on them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from ringlab.cost.planner.limits import Hidden, Limit, hidden, limit, recomputation_words, split_words
from ringlab.cost.planner.measured import measured_time
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.suggest import Suggestion, suggestions
from ringlab.cost.planner.weigh import Candidate, layouts, weigh
from ringlab.cost.units import counted, in_percent, short
from ringlab.layout import get_layout


def assumptions(best: Candidate) -> tuple[str, ...]:
    """Return the assumptions behind a plan, in sentences."""
    request = best.request
    machine, sizes = request.machine, request.sized
    found = [
        f"{machine.title}: {short(machine.peak(request.dtype), 'FLOP/s')} in {request.dtype}; {_link(request)}",
        _reached(request),
        f"{sizes.title}: {sizes.layers} layers, d {sizes.d_model}, {sizes.H} query and {sizes.K} K/V heads of "
        f"{sizes.D}, feed-forward {sizes.d_ff}, {sizes.parameters / 1e9:.3g} billion parameters",
        f"{in_percent(request.reserve)} of each {request.machine_word}'s memory is left for the driver, communication buffers and "
        "fragmentation (--reserve)",
        "all tokens attend to all before them: no sliding window, in whatever model has one"
        if request.causal
        else "all tokens attend to all",
        "all entries of the ledger are added as if their peaks fell together",
    ]
    if request.dtype not in ("bfloat16", "float16"):
        found.append(f"{request.dtype} reaches the same fractions of its peak as 16 bits do of theirs")
    if request.purpose == "decode":
        return (*found, *_decoding(best))
    found += [
        "communication takes no time away from computing, and links of different ranks do not disturb each other",
        "norms, rotary embedding, activation functions, merging and launches take no time"
        if measured_time(request, sizes.D) is None
        else "norms, rotary embedding and activation functions take no time",
        f"kernel tiles of {request.tile[0]} × {request.tile[1]}: one that is not wholly masked is computed wholly",
    ]
    if best.degrees.ulysses > 1:
        found.append("Ulysses' all-to-alls overlap with nothing")
    if best.degrees.tp > 1:
        found.append("tensor parallelism with sequence parallelism; its collectives overlap with nothing")
    if request.training:
        found += _training(best)
    return tuple(found)


def _link(request: Request) -> str:
    inside, between = request.machine.inside, request.machine.between
    words = [f"{inside.name} {short(inside.bytes_per_s, 'bytes/s')} one way inside a node"]
    if request.nodes > 1:
        words.append(
            f"{between.name} {short(between.bytes_per_s, 'bytes/s')} per {request.machine_word} between nodes"
        )
    return ", ".join(words)


def _reached(request: Request) -> str:
    it = request.machine.reached
    measured = measured_time(request, request.sized.D)
    if measured is not None:
        return f"attention takes as long as measured ({measured.forward.source}); matrices reach {in_percent(it.linear)} of the peak"
    if it.linear == it.attention_forward == it.attention_backward == 1:
        return f"kernels reach the whole peak, so real steps take longer ({it.source})"
    return (
        f"kernels reach {in_percent(it.linear)} of the peak in matrices, {in_percent(it.attention_forward)} in "
        f"attention forward and {in_percent(it.attention_backward)} backward ({it.source})"
    )


def _training(best: Candidate) -> list[str]:
    found = [
        "Adam with float32 moments and gradients; weights are gathered and gradients reduced beside the computation "
        "of a layer, on what the ring leaves free of the links",
        "no pipeline parallelism, no offloading, no dropout; data loading and checkpoints take no time",
    ]
    if best.recomputation != "none":
        found.append("what is computed again sends its messages again, too")
    if best.request.logits_chunk is None:
        found.append(
            "the logits of all of a rank's tokens stand in memory at once, in float32 (--logits-chunk)"
        )
    return found


def _decoding(best: Candidate) -> list[str]:
    return [
        "a token takes as long as reading the weights and the K/V cache once: arithmetic hides behind it",
        "every rank that shares the cache holds its TP part of the weights; no batching beyond --batch",
        f"the cache holds {best.request.tokens:,} tokens of each sequence, shared out evenly",
    ]


ALTERNATIVES = 5


@dataclass(frozen=True)
class Plan:
    """The best way to run a request, of `weighed` ways; if none fits, the one that needs least memory.

    alternatives: the best of each other split. layouts: the best split with other layouts.

    >>> found = plan(Request("llama3-8b", 131_072, "h100"))
    >>> found.fits, found.limit.kind
    (True, 'memory')
    """

    request: Request
    best: Candidate
    weighed: int
    alternatives: tuple[Candidate, ...]
    layouts: tuple[Candidate, ...]

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
        if it.degrees.ring > 1 and request.purpose != "decode":
            how.append(it.layout)
        if request.training:
            how.append(recomputation_words(it.recomputation))
        if it.rounds > 1:
            how.append(f"{it.rounds} rounds of {counted(request.batch // it.rounds, 'sequence')}")
        need, usable = short(it.ledger.total_bytes, "bytes"), short(request.usable_bytes, "bytes")
        if not self.fits:
            return f"Does not fit: {gpus} need at least {need} each and may use {usable} ({', '.join(how)})"
        return f"Fits: {gpus}, {', '.join(how)}; {need} of {usable} per {request.machine_word}"

    @cached_property
    def hidden(self) -> list[Hidden]:
        """Return whether the ring's hops are hidden, for each pass."""
        return hidden(self.best)

    @cached_property
    def limit(self) -> Limit:
        """Return what limits the plan."""
        return limit(self.best)

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """Return the suggested changes, each planned itself."""
        return suggestions(self.best)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind this plan, in sentences."""
        return assumptions(self.best)

    @property
    def chunk_tokens(self) -> int:
        """Return the number of tokens in each piece that the layout deals."""
        pieces = _pieces(self.best.layout) * self.best.degrees.ring
        return -(-self.request.tokens // pieces) if pieces else 1

    @property
    def chunk_words(self) -> str:
        """Return a description of the pieces: their sizes, and the length that kernel tiles would divide evenly."""
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
    """Return the best way to run `request`, with alternatives.

    Raises: CostError that names the constraint if the GPUs cannot be divided as requested.

    >>> plan(Request("llama3-70b", 1_000_000, "h100", nodes=8)).best.degrees
    Degrees(dp=1, tp=1, ring=64, ulysses=1, fsdp=64)
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
    """The number of pieces of consecutive tokens that a rank owns under a layout; 0 for single tokens."""
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

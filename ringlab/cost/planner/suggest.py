"""Suggested changes of a plan's request. Each changed request is planned before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ringlab.cost.hardware import hardware_names
from ringlab.cost.planner.limits import ALIKE, hidden, recomputation_words, split_words
from ringlab.cost.planner.memory_table import most_sequences
from ringlab.cost.planner.request import MOST_CHUNKS, MOST_OF_A_COUNT, MOST_TOKENS, Request
from ringlab.cost.planner.search import Candidate, leanest, search
from ringlab.cost.planner.step_time import StepTime
from ringlab.cost.units import duration, in_percent, short, short_count
from ringlab.errors import CostError

MOST_NODES = 2**16
OTHERS = 4  # the most other kinds of hardware to suggest
PIECE = 4096  # tokens whose logits are in memory at once in a suggestion


@dataclass(frozen=True)
class Suggestion:
    """A changed request and its outcome; `kind` names the change and `why` gives its benefit."""

    kind: str
    why: str
    request: Request

    @cached_property
    def best(self) -> Candidate:
        """Return the best way to run the changed request."""
        return search(self.request)[0]

    @property
    def fits(self) -> bool:
        """Return whether the best way to run the changed request fits into memory."""
        return self.best.fits

    @property
    def sentence(self) -> str:
        """Return the suggestion's benefit and outcome, in one line."""
        it = self.best
        need = f"{short(it.memory.total_bytes, 'bytes')} of {short(it.request.usable_bytes, 'bytes')}"
        how = split_words(it) + (f", {recomputation_words(it.recomputation)}" if it.request.training else "")
        return f"{self.why}: {_step_words(it)}, {need} ({how})"

    def as_dict(self) -> dict[str, object]:
        """Return the suggestion with its outcome and command line, ready for JSON."""
        return {
            "kind": self.kind,
            "why": self.why,
            "command": self.request.command(),
            "fits": self.fits,
            "step_s": self.best.step_s,
            "tokens": self.request.tokens,
            "nodes": self.request.nodes,
            "memory_bytes": self.best.memory.total_bytes,
        }


def _step_words(it: Candidate) -> str:
    return f"{duration(it.step_s)} a {'token' if it.request.decoding else 'step'}"


def suggestions(best: Candidate) -> tuple[Suggestion, ...]:
    """Return changes that fit: the nearest ones if the plan does not fit, otherwise changes that improve the plan."""
    asked = best.request
    found = _nearest(best) if not best.fits else _gains(best)
    unique: dict[str, Suggestion] = {}
    for each in found:
        if each.request.command() != asked.command() and each.fits:
            unique.setdefault(each.request.command(), each)
    return tuple(unique.values())


def _nearest(best: Candidate) -> Iterator[Suggestion]:
    """Yield changes that fit: logits in pieces, all degrees left open, more nodes, fewer tokens, fewer sequences."""
    request = best.request
    open_ = _unpinned(request)
    chunked = _chunked(open_)
    for kind, why, changed in (
        ("logits", f"loss in pieces of {short_count(PIECE)} tokens", _chunked(request)),
        ("recomputation", "recomputation left open", request.but(recomputation=None)),
        (
            "sharding",
            "weights shared out over as many ranks as it takes (fsdp left open)",
            request.but(fsdp=None),
        ),
        ("degrees", "degrees and recomputation left open", open_),
        ("degrees", "tensor parallelism over two nodes", _wider(request)),
        ("logits", f"all left open, loss in pieces of {short_count(PIECE)} tokens", chunked),
        ("offload", "activations in the host's memory", _offloaded(request)),
        (
            "offload",
            f"activations in the host's memory, all left open, loss in pieces of {short_count(PIECE)} tokens",
            _offloaded(chunked),
        ),
    ):
        if changed is not None and changed != request and fits(changed):
            yield Suggestion(kind, why, changed)
    yield from _more_nodes(best)
    for base, why in ((open_, ""), (chunked, f", loss in pieces of {short_count(PIECE)}")):
        if base is not None and (tokens := most_tokens(base)) and tokens < request.tokens:
            text = f"the largest context that fits on these GPUs{why}, {short_count(tokens)}"
            yield Suggestion("tokens", text, base.but(tokens=tokens))
    if request.purpose == "serve":
        yield from _more_sequences(best)
    elif request.batch > 1 and request.interleave == 1 and fits(fewer := open_.but(batch=1, dp=None)):
        yield Suggestion("batch", "one sequence", fewer)
    yield from _other_hardware(request)


def _more_nodes(best: Candidate) -> Iterator[Suggestion]:
    request = best.request
    nodes = fewest_nodes(request)
    if nodes and nodes > request.nodes:
        yield Suggestion("nodes", f"the fewest nodes that fit, {nodes}", _on_nodes(request, nodes))
    chunked = _chunked(request)
    if chunked is not None:
        fewer = fewest_nodes(chunked)
        if fewer and request.nodes < fewer < (nodes or MOST_NODES + 1):
            why = f"{fewer} nodes and loss in pieces of {short_count(PIECE)} tokens"
            yield Suggestion("nodes", why, _on_nodes(chunked, fewer))


def _gains(best: Candidate) -> Iterator[Suggestion]:
    request = best.request
    if request.layout is not None:
        free = search(request.but(layout=None))[0]
        if free.step_s < 0.99 * best.step_s:
            yield Suggestion("layout", f"the layout left open, {free.layout}", free.request)
    free = search(_unpinned(request))[0]
    if free.step_s * (1.01 if free.split == best.split else ALIKE) < best.step_s:
        yield Suggestion("degrees", "degrees and recomputation left open", free.request)
    yield from _hide(best)
    yield from _less_memory(best)
    if request.purpose == "serve":
        yield from _more_sequences(best)
    nodes = fewest_nodes(request)
    if nodes and nodes < request.nodes:
        yield Suggestion("nodes", f"the fewest nodes that fit, {nodes}", _on_nodes(request, nodes))
    yield from _twice_the_nodes(best)
    tokens = most_tokens(request)
    if tokens and tokens > request.tokens:
        yield Suggestion(
            "tokens",
            f"the largest context that fits on these GPUs, {short_count(tokens)}",
            request.but(tokens=tokens),
        )
    if request.dtype != "float8" and "float8" in request.machine.flops_per_s:
        yield Suggestion(
            "dtype", "everything in 8 bits, effect on precision not considered", request.but(dtype="float8")
        )
    yield from _other_hardware(request)


def _twice_the_nodes(best: Candidate) -> Iterator[Suggestion]:
    doubled = _on_nodes(best.request, 2 * best.request.nodes)
    if fits(doubled):
        ratio = search(doubled)[0].step_s / best.step_s
        effect = "" if ratio < 0.95 else " would help little" if ratio < 1.05 else " would slow it down"
        yield Suggestion("nodes", f"twice the nodes{effect}", doubled)


def _more_sequences(best: Candidate) -> Iterator[Suggestion]:
    """Yield the most sequences that this split can serve, if the request has more or fewer."""
    degrees, fit = best.degrees, most_sequences(best.serving, best.request.usable_bytes)
    sequences = min(MOST_OF_A_COUNT // degrees.dp, fit) * degrees.dp
    if sequences and sequences != best.request.batch:
        split = {"dp": degrees.dp, "tp": degrees.tp, "ring": degrees.ring, "sharing": best.sharing}
        changed = best.request.but(batch=sequences, cp=None, ulysses=None, **split)
        if fits(changed):
            rate = search(changed)[0].tokens_per_s
            why = f"the most sequences that fit with this split, {sequences:,}, {rate:,.3g} tokens/s"
            yield Suggestion("batch", why, changed)


def _hide(best: Candidate) -> Iterator[Suggestion]:
    """Yield the number of tokens that hides the ring's hops with this split."""
    exposed = [it for it in hidden(best) if not it.hidden]
    if not exposed:
        return
    least, degrees = max(it.least_tokens for it in exposed), best.degrees
    unit = 2 * degrees.cp * best.request.tile[0]
    tokens = -(-least * degrees.ring // unit) * unit
    if tokens <= MOST_TOKENS:
        pinned = best.request.but(
            tokens=tokens, dp=degrees.dp, tp=degrees.tp, cp=None, ring=degrees.ring, ulysses=degrees.ulysses
        )
        time = search(pinned)[0].time
        share = (
            f"; then {in_percent(_ring_share(time))} of the step waits for hops"
            if isinstance(time, StepTime)
            else ""
        )
        why = f"{least:,} tokens per rank of the ring hide its hops ({short_count(tokens)} in all{share})"
        yield Suggestion("hide communication", why, pinned)


def _ring_share(time: StepTime) -> float:
    return time.rounds * time.layers * sum(it.ring_exposed_s for it in time.passes) / time.total_s


def _less_memory(best: Candidate) -> Iterator[Suggestion]:
    """Yield changes that save much memory: full recomputation, logits in pieces."""
    request, enough = best.request, 0.9 * best.memory.total_bytes
    if request.training and best.recomputation != "full":
        full = request.but(recomputation="full")
        if search(full)[0].memory.total_bytes < enough:
            yield Suggestion("recomputation", recomputation_words("full"), full)
    chunked = _chunked(request)
    if chunked is not None and search(chunked)[0].memory.total_bytes < enough:
        yield Suggestion("logits", f"loss in pieces of {short_count(PIECE)} tokens", chunked)


def _other_hardware(request: Request) -> Iterator[Suggestion]:
    """Yield equally many accelerators of other kinds, if the request fits and fills whole nodes, the fastest first."""
    found = []
    for name in hardware_names():
        try:
            changed = request.but(hardware=name, gpus_per_node=None)
            if name == request.machine.name or request.gpus % changed.machine.ranks_per_node:
                continue
            nodes = request.gpus // changed.machine.ranks_per_node
            why = f"{request.gpus} × {name.upper()}{_bolder(request, changed)}"
            suggestion = Suggestion("hardware", why, _on_nodes(changed, nodes))
            if suggestion.fits:
                found.append(suggestion)
        except CostError:  # this hardware lacks the dtype, or its GPUs cannot be divided
            continue
    yield from sorted(found, key=lambda it: it.best.step_s)[:OTHERS]


def _bolder(request: Request, other: Request) -> str:
    """Return a warning if the other hardware's times assume its peak and the times of this hardware do not."""
    here, there = request.machine.reached, other.machine.reached
    return " (matrices at its whole peak, so not comparable)" if there.linear == 1 > here.linear else ""


def fewest_nodes(request: Request) -> int | None:
    """Return the fewest nodes on which the request fits with cp, ring and fsdp left open; None if it never fits.

    The result is a multiple of the fewest nodes that a pipeline's stages divide.
    """
    unit = request.pp // gcd(request.pp, request.machine.ranks_per_node)
    found = _least(1, MOST_NODES // unit, lambda n: fits(_on_nodes(request, n * unit)))
    return found and found * unit


def most_tokens(request: Request) -> int | None:
    """Return the largest context that fits; None if none fits.

    The result is a multiple of 1000 tokens, or of 1024 if the request's tokens are not a multiple of 1000.
    """
    unit = 1000 if request.tokens % 1000 == 0 else 1024
    most, fewest = MOST_TOKENS, request.generated // unit + 1
    if request.purpose == "serve":
        most = min(most, request.generated + MOST_CHUNKS * request.chunk)
    too_many = _least(fewest, most // unit, lambda n: not fits(request.but(tokens=n * unit), shrinking=True))
    if too_many is None:
        return most // unit * unit
    return (too_many - 1) * unit if too_many > fewest else None


def fits(request: Request, shrinking: bool = False) -> bool:
    """Return whether some way to run the request fits into memory; False for an impossible request.

    shrinking: whether a request with more ranks than tokens counts as fitting, because fewer tokens would not
    help.
    """
    try:
        return any(it.fits for it in leanest(request))
    except CostError:
        return shrinking and request.tokens < request.gpus


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the least n from which `holds` stays true, None if it is above `high`; search by doubling, then bisection."""
    n = low
    while not holds(n):
        if n >= high:
            return None
        low, n = n + 1, min(2 * n, high)
    while low < n:
        middle = (low + n) // 2
        if holds(middle):
            n = middle
        else:
            low = middle + 1
    return n


def _on_nodes(request: Request, nodes: int) -> Request:
    """Return the request on another number of nodes, with cp, ring, fsdp and ep left open as they depend on it."""
    return request.but(nodes=nodes, cp=None, ring=None, fsdp=None, ep=None)


def _unpinned(request: Request) -> Request:
    return request.but(
        dp=None,
        fsdp=None,
        tp=None,
        cp=None,
        ring=None,
        ulysses=None,
        ep=None,
        recomputation=None,
        sharing=None,
    )


def _wider(request: Request) -> Request | None:
    """Return the request with tensor parallelism over two nodes, since only tp divides the weights that feed prompts."""
    if request.purpose != "serve" or request.nodes == 1:
        return None
    return _unpinned(request).but(tp=2 * request.machine.ranks_per_node)


def _offloaded(request: Request | None) -> Request | None:
    """Return the request with its activations on the host, None if they already are or there is no link to a host."""
    if request is None or not request.training or request.machine.host is None or request.offload != "none":
        return None
    return request.but(offload="activations")


def _chunked(request: Request) -> Request | None:
    """Return the request with its loss in pieces, None if this changes nothing."""
    if not request.training or request.logits_chunk is not None:
        return None
    return request.but(logits_chunk=PIECE)

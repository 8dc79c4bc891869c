"""Every way to run a request, with its memory and the time of a step, and the best of these ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ringlab.cost.flops import linear_flops, vocabulary_flops
from ringlab.cost.planner.memory_table import (
    MemoryTable,
    fuller_memory,
    host_update_bytes,
    kept_bytes,
    step_memory,
    update_bytes,
)
from ringlab.cost.planner.parallelism import Degrees, candidates
from ringlab.cost.planner.request import LAYOUTS, RECOMPUTATIONS, SHARINGS, Request, passes_states
from ringlab.cost.planner.ring_time import ring_work
from ringlab.cost.planner.serve_request import ServeRequest
from ringlab.cost.planner.serve_time import DecodeTime, decode_time
from ringlab.cost.planner.step_time import StepTime, mixing_flops, step_time
from ringlab.errors import CostError

LEAST_GAIN = 1e-3  # fraction of a step's time that an unusual layout must gain


@dataclass(frozen=True)
class Candidate:
    """One way to run a request: degrees, layout, recomputation, and the rounds in which a replica runs its sequences.

    sharing: how decoding ranks share the weights, one of SHARINGS.
    """

    request: Request
    degrees: Degrees
    layout: str
    recomputation: str
    rounds: int = 1
    sharing: str = "copies"

    @property
    def at_once(self) -> Request:
        """Return the request for the sequences of one round."""
        return _at_once(self.request, self.rounds)

    @cached_property
    def memory(self) -> MemoryTable:
        """Return the memory of the GPU that needs most memory."""
        if self.request.purpose == "serve":
            return fuller_memory(self.serving)
        return step_memory(self.at_once, self.degrees, self.recomputation, self.rounds)

    @cached_property
    def serving(self) -> ServeRequest:
        """Return the request that one replica serves, if the purpose is to decode or to serve."""
        it, degrees = self.request, self.degrees
        return ServeRequest(
            it.sized,
            it.machine,
            it.batch // degrees.dp,
            it.tokens,
            degrees.ring,
            degrees.tp,
            chunk=it.chunk if it.purpose == "serve" else it.tokens,
            dtype=it.dtype,
            sharing=self.sharing,
            generated=it.generated,
        )

    @cached_property
    def time(self) -> StepTime | DecodeTime:
        """Return the time of one step with all its rounds.

        Raises: CostError if a needed pass was not measured.
        """
        if self.request.decoding:
            return decode_time(self.serving)
        updated = (update_bytes(self.request, self.degrees), host_update_bytes(self.request, self.degrees))
        offload = "activations" in self.request.offloads
        moved = kept_bytes(self.at_once, self.degrees, self.recomputation) if offload else 0
        how = (self.degrees, self.layout, self.recomputation, updated, self.rounds, moved)
        return step_time(self.at_once, *how)

    @property
    def fits(self) -> bool:
        """Return whether this way needs no more memory than a GPU may use, and no more than its host has."""
        host = self.request.machine.host
        most = host.memory_bytes if host is not None else 0
        return self.memory.total_bytes <= self.request.usable_bytes and self.memory.host_bytes <= most

    @property
    def step_s(self) -> float:
        """Return the seconds of one step."""
        return self.time.total_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all GPUs together: tokens of the context, or new tokens when decoding."""
        per_sequence = 1 if self.request.decoding else self.request.tokens
        return self.request.batch * per_sequence / self.step_s

    @property
    def utilisation(self) -> float:
        """Return the model's own FLOPs, without recomputed or masked ones, as a fraction of the GPUs' peak."""
        request, tokens = self.request, self.request.tokens
        forward = linear_flops(request.sized, tokens)
        forward += sum(it.layers * mixing_flops(it, tokens, request.causal) for it in request.sized.kinds)
        flops = forward * request.batch
        if request.training:  # a backward takes two products for each product of the forward
            flops = 3 * (flops + vocabulary_flops(request.sized, tokens) * request.batch)
        return flops / (request.gpus * request.machine.peak(request.dtype) * self.step_s)

    @property
    def split(self) -> tuple[int | str, ...]:
        """Return the values that distinguish splits of the work: dp, tp, ring, ulysses, ep, and the sharing of weights."""
        it = self.degrees
        return it.dp, it.tp, it.ring, it.ulysses, it.ep, self.sharing

    def work(self) -> tuple[float, float]:
        """Return the ratio of the greatest to the mean attention work of ranks, in tiles: in total, and step by step."""
        if self.request.decoding:
            return 1.0, 1.0  # one new token has no mask
        work, _ = ring_work(
            self.layout, self.request.tokens, self.degrees.ring, self.request.causal, self.request.tile
        )
        mean = work.sum() / len(work)
        return float(work.sum(axis=1).max() / mean), float(work.max(axis=0).sum() / mean)


@lru_cache(maxsize=256)
def search(request: Request) -> tuple[Candidate, ...]:
    """Return the candidates: first those that fit, sorted by time, then the others, sorted by memory.

    For each choice of degrees only the first variant that fits is weighed. Variants without recomputation,
    and with all sequences at once, come first, since later variants take longer. With offloaded activations
    later variants may be faster, so the fastest variant that fits is weighed.
    Raises: CostError if no way to divide the GPUs satisfies the request.
    """
    fitting: list[Candidate] = []
    others: list[Candidate] = []
    for family in _families(request):
        for variants in family:
            fits = _first_that_fits(variants)
            (others if fits is None else fitting).append(fits or variants[-1])
            if fits is variants[0]:
                break
    fitting.sort(key=lambda it: (it.step_s, it.memory.total_bytes))
    others.sort(key=lambda it: it.memory.total_bytes)
    if fitting and request.layout is None:
        first, *rest = layouts(fitting[0])
        fitting[0] = min(
            (first, *(it for it in rest if it.step_s < first.step_s * (1 - LEAST_GAIN))), key=_step
        )
    return (*fitting, *others)


def _first_that_fits(variants: list[Candidate]) -> Candidate | None:
    """Return the fastest variant that fits: the first, unless offloading activations takes longer than recomputing them."""
    fitting = (it for it in variants if it.fits)
    if variants[0].request.offload == "none":
        return next(fitting, None)
    return min(fitting, key=_step, default=None)


def leanest(request: Request) -> Iterator[Candidate]:
    """Return, for each way to divide the GPUs, the candidate that needs the least memory. Raises: as `search`."""
    return (family[-1][-1] for family in _families(request))


def fastest(request: Request) -> Candidate:
    """Return the candidate that would be fastest if memory did not matter. Raises: as `search`."""
    tried = (
        None if request.offload != "none" else 1
    )  # moving activations may take longer than recomputing them
    return min((it for family in _families(request) for it in family[0][:tried]), key=_step)


def _step(candidate: Candidate) -> float:
    return candidate.step_s


def layouts(candidate: Candidate) -> list[Candidate]:
    """Return the candidate under each layout, its own first; only its own if all take equally long."""
    it = candidate
    if it.degrees.ring == 1 or it.request.decoding or not it.request.causal:
        return [it]
    others = [name for name in LAYOUTS if name != it.layout and passes_states(it.request, name)]
    return [it, *(replace(it, layout=name) for name in others)]


def _families(request: Request) -> Iterator[list[list[Candidate]]]:
    """Return the variants of each way to divide the GPUs and to share the weights.

    Raises: CostError if there is no way.
    """
    found = False
    for degrees in candidates(request):
        for sharing in _sharings(request, degrees):
            found = True
            yield _variants(request, degrees, sharing)
    if not found:
        it = request.sized.main
        needed = f"tp that divides the K={it.dealt_heads} K/V heads, and tp × cp the H={it.H} query heads and the feed-forward"
        got = f"{request.gpus} GPUs, sharing={request.sharing}"
        raise CostError(needed, got, "--sharing copies, fewer nodes, or more replicas with --dp")


def _sharings(request: Request, degrees: Degrees) -> tuple[str, ...]:
    """Return the ways to share the weights that the heads allow; only one if all ways are the same."""
    if request.purpose != "serve" or degrees.ring == 1:
        return (request.sharing or "copies",)
    kinds, ranks = request.sized.kinds, degrees.tp * degrees.ring
    shared = not any(
        it.dealt_heads % degrees.tp or any(n % ranks for n in (it.H, *it.widths)) for it in kinds
    )
    asked = SHARINGS if request.sharing is None else (request.sharing,)
    return tuple(name for name in asked if shared or name == "copies")


def _variants(request: Request, degrees: Degrees, sharing: str) -> list[list[Candidate]]:
    """Return, for each number of rounds, the candidates by growing recomputation, which saves memory and takes time."""
    again = RECOMPUTATIONS if request.training else ("none",)
    if request.recomputation is not None:
        again = (request.recomputation,)
    layout = request.layout or first_layout(request, degrees)
    return [
        [Candidate(request, degrees, layout, each, rounds, sharing) for each in again]
        for rounds in _rounds(request, degrees)
    ]


def _rounds(request: Request, degrees: Degrees) -> tuple[int, ...]:
    """Return the numbers of rounds to try: all sequences of a replica at once, or one after the other.

    Decoding takes all sequences at once. In a pipeline each sequence is a micro-batch.
    """
    sequences = request.batch // degrees.dp
    if degrees.pp > 1:
        return (sequences,)
    return (1,) if sequences == 1 or request.decoding else (1, sequences)


@lru_cache(maxsize=256)
def _at_once(request: Request, rounds: int) -> Request:
    return request if rounds == 1 else request.but(batch=request.batch // rounds)


def first_layout(request: Request, degrees: Degrees) -> str:
    """Return the first layout to try: zig-zag for a ring with a causal mask, otherwise contiguous."""
    balanced = request.causal and degrees.ring > 1 and not request.decoding
    return "zigzag" if balanced else "contiguous"

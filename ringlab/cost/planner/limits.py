"""The limits of a plan: the parts of a step in which time is lost, and the reasons for the losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringlab.cost.planner.parallelism import group
from ringlab.cost.planner.ring_time import is_balanced
from ringlab.cost.planner.search import Candidate, fastest
from ringlab.cost.planner.serve_time import DecodeTime, is_computing
from ringlab.cost.planner.step_time import StepTime, attention_flops_per_s, ring_sizes
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import least_tokens_hidden
from ringlab.cost.units import counted, duration, in_percent, short

KINDS = (
    "memory",
    "exposed communication",
    "imbalance",
    "K/V heads",
    "pipeline bubble",
    "memory bandwidth",
    "compute",
)
SHARING_WORDS = {
    "copies": "copies of the weights along cp",
    "dcp": "weights shared along cp, queries gathered (DCP)",
    "helix": "weights shared along cp (Helix)",
}
ALIKE = 1.511
"""Splits whose times differ by no more than this factor are not ranked, because plans missed the ratio of
two published splits of one run by as much. tools/docs/published_runs.py has these pairs, and a test computes
the factor from them."""
WORTH_NAMING = 0.03  # the smallest fraction of a step's time whose loss is named as a limit


@dataclass(frozen=True)
class Limit:
    """One limit of a plan. kind: one of KINDS. seconds: the time that a step would save without it, 0 if nothing fits."""

    kind: str
    sentence: str
    seconds: float


@dataclass(frozen=True)
class Hidden:
    """The figures that tell whether the hops of one pass of the ring hide behind its blocks.

    tokens: the tokens of one rank of the ring. least_tokens: the fewest tokens that hide a hop on the slowest
    link.
    travel_s: the seconds of all hops on that link. exposed_s: the part of these seconds that ranks wait,
    including the last hop of the gradients.
    """

    name: str
    link: str
    tokens: int
    least_tokens: int
    travel_s: float
    exposed_s: float

    @property
    def hidden(self) -> bool:
        """Return whether a hop takes no longer than the block that is computed meanwhile."""
        return self.tokens >= self.least_tokens


def limit(best: Candidate) -> Limit:
    """Return the limit of the plan: memory if nothing fits, otherwise its largest loss.

    When tokens are decoded, the limit is the largest part of a token's time: reading memory, or
    communication.
    """
    request = best.request
    if not best.fits:
        over = best.memory.total_bytes - request.usable_bytes
        if over <= 0:
            return Limit("memory", f"{short(best.memory.host_bytes, 'bytes')} do not fit on the host", 0.0)
        largest = max(best.memory.entries, key=lambda entry: entry.bytes)
        sentence = (
            f"{short(over, 'bytes')} too much on each {best.request.machine_word}; the largest entry: {largest.name}, "
            f"{short(largest.bytes, 'bytes')}"
        )
        return Limit("memory", sentence, 0.0)
    losses = [_memory(best), _communication(best)]
    if isinstance(best.time, DecodeTime):
        losses.append(_reading(best, best.time))
    else:
        losses += [_imbalance(best), _bubble(best, best.time)]
    worst = max(losses, key=lambda it: it.seconds)
    if worst.seconds >= WORTH_NAMING * best.step_s:
        return worst
    return _work(best)


def hidden(best: Candidate) -> list[Hidden]:
    """Return for each pass of the ring whether its hops hide behind the blocks; [] without a ring."""
    request, degrees = best.at_once, best.degrees
    if degrees.ring == 1 or not isinstance(best.time, StepTime):
        return []
    sizes, link = ring_sizes(request, degrees), group("ring", degrees, request.machine).link
    tokens = -(-request.tokens // degrees.ring)
    found = []
    for each in best.time.passes:
        backward = each.name == "backward"
        rate = attention_flops_per_s(request, sizes.D, backward)
        # In a layout that is not balanced, some rank sees whole blocks.
        block = sizes if is_balanced(best.layout) else _unmasked(sizes)
        least = least_tokens_hidden(
            rate, link.bytes_per_s, block, latency_s=link.latency_s, backward=backward
        )
        found.append(
            Hidden(each.name, link.name, tokens, -int(-least // 1), each.ring_s, each.ring_exposed_s)
        )
    return found


def _unmasked(sizes: Attention) -> Attention:
    return replace(sizes, causal=False)


def _memory(best: Candidate) -> Limit:
    free = fastest(best.request)
    saved = best.step_s - free.step_s
    what = recomputation_words(free.recomputation)
    need = short(free.memory.total_bytes, "bytes")
    return Limit(
        "memory",
        f"with {need} on a {best.request.machine_word} instead of {short(best.request.usable_bytes, 'bytes')} a step would take "
        f"{duration(free.step_s)} ({what}, {split_words(free)}): {in_percent(saved / best.step_s)} less",
        saved,
    )


def _communication(best: Candidate) -> Limit:
    seconds = best.time.exposed_s
    share = in_percent(seconds / best.step_s)
    if not isinstance(best.time, StepTime):
        return Limit(
            "exposed communication", f"merging and TP's all-reduces take {share} of a token", seconds
        )
    parts = {
        "the ring's hops": sum(it.ring_exposed_s for it in best.time.passes),
        "Ulysses' all-to-alls": sum(it.ulysses_s for it in best.time.passes),
        "TP's collectives": sum(it.tensor_s for it in best.time.passes),
        "gathering weights and reducing gradients": sum(it.weights_exposed_s for it in best.time.passes),
        "tokens on their way to their experts and back": sum(it.dispatch_s for it in best.time.passes),
        "activations on their way to the host and back": sum(it.host_exposed_s for it in best.time.passes),
    }
    worst = max(parts, key=lambda name: parts[name])
    sentence = f"ranks wait {share} of the step for messages, most of it for {worst}"
    if worst == "the ring's hops" and (heads := _heads_short(best)):
        return Limit("K/V heads", f"{sentence}; {heads}", seconds)
    return Limit("exposed communication", sentence, seconds)


def _heads_short(best: Candidate) -> str:
    """Return why the heads prevent a larger Ulysses degree, which would shorten the rings; "" if they do not."""
    degrees, inside = best.degrees, best.request.machine.ranks_per_node
    heads, used = best.request.sized.main.dealt_heads, degrees.tp * degrees.ulysses
    room = degrees.ring % 2 == 0 and inside % (2 * used) == 0
    if used < heads or not room:
        return ""
    return (
        f"tp × ulysses = {used} ranks already share the {heads} K/V heads, and twice as many would hold "
        "copies: a hop would carry as much for half the computation"
    )


def _imbalance(best: Candidate) -> Limit:
    seconds = best.time.imbalance_s
    whole, _ = best.work()
    return Limit(
        "imbalance",
        f"the slowest rank computes {whole:.3g} times the mean under {best.layout}: "
        f"{in_percent(seconds / best.step_s)} of the step",
        seconds,
    )


def _bubble(best: Candidate, time: StepTime) -> Limit:
    share = in_percent(time.bubble_s / time.total_s)
    found = f"the pipeline fills and drains for {share} of the step; more than {best.rounds} micro-batches, or more chunks "
    found += "on a stage (--interleave), would shorten that"
    return Limit("pipeline bubble", found, time.bubble_s)


def _reading(best: Candidate, time: DecodeTime) -> Limit:
    seconds = time.weights_s + time.cache_s
    if is_computing(best.serving) and time.weights_s > time.cache_s:
        share = in_percent(time.weights_s / time.total_s)
        many = f"{counted(best.serving.sequences, 'sequence')} of a replica"
        sentence = (
            f"arithmetic: for the {many} the matrices compute longer than they are read, {share} of a token"
        )
        return Limit("compute", sentence, seconds)
    larger = "weights" if time.weights_s > time.cache_s else "K/V cache"
    sentence = f"a token reads weights and K/V cache once, which takes {in_percent(seconds / time.total_s)} of its time, "
    return Limit("memory bandwidth", f"{sentence}most of it for the {larger}", seconds)


def _work(best: Candidate) -> Limit:
    time = best.time
    assert isinstance(time, StepTime), "a token has a largest part"
    attention = time.rounds * time.layers * sum(it.attention_s for it in time.passes)
    linear = time.rounds * time.layers * sum(it.linear_s for it in time.passes)
    return Limit(
        "compute",
        f"arithmetic: attention takes {in_percent(attention / time.total_s)} of the step and the layers' matrices "
        f"{in_percent(linear / time.total_s)}; waiting and imbalance take less than {in_percent(WORTH_NAMING)} each",
        0.0,
    )


def split_words(candidate: Candidate) -> str:
    """Return the degrees in words: "dp 2 × tp 8 × ring 4 × ulysses 2", without degrees of 1."""
    it, ring = candidate.degrees, "cp" if candidate.request.decoding else "ring"
    named = (("pp", it.pp), ("dp", it.dp), ("tp", it.tp), (ring, it.ring), ("ulysses", it.ulysses))
    words = " × ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "one GPU"
    return f"{words}, experts over ep {it.ep}" if it.ep > 1 else words


def recomputation_words(recomputation: str) -> str:
    """Return the recomputation in words: "no recomputation", "full recomputation"."""
    return f"{'no' if recomputation == 'none' else recomputation} recomputation"

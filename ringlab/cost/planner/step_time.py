"""The time of a step: the computation, communication and hidden communication of each layer and pass.

Attention takes the seconds that were measured on the hardware, as in the simulator, or without a measurement
the seconds computed from the hardware's peak.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from ringlab.cost.block_time import MeasuredTime, block_time
from ringlab.cost.flops import (
    attention_flops,
    linear_backward_flops,
    linear_flops,
    vocabulary_flops,
)
from ringlab.cost.planner.parallelism import Degrees, group
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.ring_time import ring_backward_s, ring_forward_s, ring_links, ring_work
from ringlab.cost.planner.stages import largest_layers, stages
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.traffic import gradient_bytes_per_token
from ringlab.layout import get_layout
from ringlab.plan import tiles

# The most ranks for which all pairs are computed; in a larger ring one pair represents each kind.
ALL_PAIRS = 16


@dataclass(frozen=True)
class Pass:
    """One layer's forward, backward or recomputation: seconds on the rank that takes longest.

    linear_s: the matrices. attention_s: attention until the slowest rank is done, on free links; balanced_s:
    attention if all ranks' work were equal. ring_s: K/V (and dK/dV) on the slowest link; ring_exposed_s: the
    part of ring_s that ranks wait for. ulysses_s, tensor_s: collectives that nothing hides. weights_s:
    gathering parameters and reducing gradients; weights_exposed_s: the part of weights_s that computation
    does not hide.
    host_s: activations that leave for the host or come back; host_exposed_s: the part of host_s that is not
    hidden.
    """

    name: str
    linear_s: float
    attention_s: float
    balanced_s: float
    ring_s: float
    ring_exposed_s: float
    ulysses_s: float
    tensor_s: float
    weights_s: float
    weights_exposed_s: float
    host_s: float = 0.0
    host_exposed_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return the seconds of computation."""
        return self.linear_s + self.attention_s

    @property
    def exposed_s(self) -> float:
        """Return the seconds of waiting for communication."""
        waits = self.ring_exposed_s + self.ulysses_s + self.tensor_s + self.weights_exposed_s
        return waits + self.host_exposed_s

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole pass."""
        return self.compute_s + self.exposed_s

    def as_dict(self) -> dict[str, float | str]:
        """Return all figures by name, seconds per layer."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        return figures | {"exposed_s": self.exposed_s, "total_s": self.total_s}


@dataclass(frozen=True)
class StepTime:
    """The time of one step: `rounds` times all layers' passes and the logits, then the update of the weights.

    pipeline: the stages, the fullest of which has `layers` layers; a round is then a micro-batch.
    """

    layers: int
    passes: tuple[Pass, ...]
    vocabulary_s: float
    update_s: float
    rounds: int = 1
    pipeline: Pipeline | None = None

    @property
    def total_s(self) -> float:
        """Return the seconds of the step."""
        return self.rounds * self.round_s + self.bubble_s + self.update_s

    @property
    def round_s(self) -> float:
        """Return the seconds of one round; in a pipeline, those of the slowest stage."""
        layer = sum(each.total_s for each in self.passes)
        if self.pipeline is None:
            return self.layers * layer + self.vocabulary_s
        return max(self.layers * layer, self.pipeline.last_layers * layer + self.vocabulary_s)

    @property
    def bubble_s(self) -> float:
        """Return the seconds in which stages of the pipeline wait for their first and after their last micro-batch."""
        it = self.pipeline
        return 0.0 if it is None else (it.stages - 1) * (self.round_s / it.interleave + 2 * it.send_s)

    @property
    def exposed_s(self) -> float:
        """Return the seconds that ranks wait for communication."""
        return self.rounds * self.layers * sum(each.exposed_s for each in self.passes)

    @property
    def imbalance_s(self) -> float:
        """Return the seconds that ranks wait because other ranks have more to compute."""
        return self.rounds * self.layers * sum(each.attention_s - each.balanced_s for each in self.passes)

    def as_dict(self) -> dict[str, object]:
        """Return all figures: seconds per step, but for the passes seconds per layer, and for the vocabulary per round."""
        return {
            "step_s": self.total_s,
            "exposed_s": self.exposed_s,
            "imbalance_s": self.imbalance_s,
            "vocabulary_s": self.vocabulary_s,
            "update_s": self.update_s,
            "bubble_s": self.bubble_s,
            "rounds": self.rounds,
            "layers": self.layers,
            "per_layer": [each.as_dict() for each in self.passes],
        }


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of `stages`: the layers of its last stage, and the seconds to send a micro-batch to the next stage."""

    stages: int
    interleave: int
    last_layers: int
    send_s: float


def step_time(
    request: Request,
    degrees: Degrees,
    layout: str,
    recomputation: str,
    weights: WeightTraffic,
    rounds: int = 1,
    offloaded_bytes: int = 0,
) -> StepTime:
    """Return the time of one training step, or of prefilling the context; `request` has one round's batch.

    offloaded_bytes: the bytes of one layer's activations that go to the host in the forward and come back
    later.
    """
    sizes = request.sized
    names = ["forward"]
    if request.training:
        names += [] if recomputation == "none" else [f"{recomputation} recomputation"]
        names.append("backward")
    passes = tuple(_pass(request, degrees, layout, name, weights) for name in names)
    if offloaded_bytes:
        passes = _with_offload(passes, request, offloaded_bytes)
    tokens = rank_tokens(request, degrees)
    logits = vocabulary_flops(sizes, tokens) if request.training else vocabulary_flops(sizes, 1)
    logits += linear_backward_flops(logits) if request.training else 0
    rate = request.machine.peak(request.dtype) * request.machine.reached.linear
    update = weights.update_bytes / request.machine.memory_bytes_per_s if request.training else 0.0
    layers = largest_layers(stages(sizes, degrees.pp))
    pipeline = _pipeline(request, degrees)
    return StepTime(layers, passes, logits / degrees.tp / rate, update, rounds, pipeline)


def _pipeline(request: Request, degrees: Degrees) -> Pipeline | None:
    if degrees.pp == 1:
        return None
    link = group("pp", degrees, request.machine).link
    row = request.sized.d_model * element_bytes(request.dtype) / degrees.tp
    send_s = link.latency_s + rank_tokens(request, degrees) * row / link.bytes_per_s
    last = stages(request.sized, degrees.pp)[-1].layers
    return Pipeline(degrees.pp, request.interleave, last, send_s)


def _with_offload(passes: tuple[Pass, ...], request: Request, moved_bytes: int) -> tuple[Pass, ...]:
    """Return the passes with the transfers of a layer's activations: to the host in its forward, and back in other passes."""
    host = request.machine.host
    assert host is not None, "a request to offload was checked"
    seconds = host.latency_s + moved_bytes / host.bytes_per_s
    forward, *later = passes
    out = replace(forward, host_s=seconds, host_exposed_s=max(0.0, seconds - forward.total_s))
    beside = sum(each.total_s for each in later)
    back = replace(later[-1], host_s=seconds, host_exposed_s=max(0.0, seconds - beside))
    return (out, *later[:-1], back)


@dataclass(frozen=True)
class WeightTraffic:
    """Bytes of one layer's weights and gradients on a tensor-parallel rank, and bytes of one update of all weights."""

    layer_bytes: float
    layer_gradient_bytes: float
    update_bytes: float


def rank_tokens(request: Request, degrees: Degrees) -> int:
    """Return the tokens of all sequences on the rank that owns most tokens."""
    return -(-request.tokens // degrees.cp) * (request.batch // degrees.dp)


@lru_cache(maxsize=1024)
def ring_sizes(request: Request, degrees: Degrees) -> Attention:
    """Return the sizes of the attention that one ring computes.

    The heads of these sizes are those that each rank holds after tp and Ulysses have split the heads.
    """
    sizes = request.sized
    return Attention(
        request.batch // degrees.dp,
        sizes.H // (degrees.tp * degrees.ulysses),
        degrees.kv_heads(sizes.K),
        sizes.D,
        request.dtype,
        request.causal,
    )


def block_seconds(
    request: Request, sizes: Attention, layout: str, P: int, backward: bool
) -> tuple[np.ndarray, int]:
    """Return the seconds of blocks by (rank, step), measured if the hardware file has measurements, and a shard's tokens.

    Raises: CostError if the file has measurements, but none of this pass.
    """
    work, tokens = ring_work(layout, request.tokens, P, request.causal, request.tile)
    measured = measured_time(request, sizes.D)
    if measured is not None:
        return measured_seconds(measured, request, sizes, layout, P, backward), tokens
    rate = attention_flops_per_s(request, sizes.D, backward)
    return work * (attention_flops(sizes, 1, backward) / rate), tokens


def _pass(request: Request, degrees: Degrees, layout: str, name: str, weights: WeightTraffic) -> Pass:
    backward, again = name == "backward", name.endswith("recomputation")
    linear_s = 0.0 if name.startswith("selective") else _linear_s(request, degrees, backward)
    attention_s, balanced_s, ring_s, exposed_s = _ring_s(request, degrees, layout, backward)
    ulysses_s = _ulysses_s(request, degrees)
    tensor_s = 0.0 if name.startswith("selective") else _tensor_s(request, degrees)
    weights_s = 0.0 if again else _weights_s(request, degrees, weights, backward)
    # Messages of the ring and of the weights share the links, so weights hide only in time that the ring
    # leaves free.
    free_s = max(0.0, linear_s + attention_s - (ring_s - exposed_s))
    return Pass(
        name,
        linear_s,
        attention_s,
        balanced_s,
        ring_s,
        exposed_s,
        ulysses_s,
        tensor_s,
        weights_s,
        max(0.0, weights_s - free_s),
    )


def _linear_s(request: Request, degrees: Degrees, backward: bool) -> float:
    machine = request.machine
    flops = linear_flops(request.sized, rank_tokens(request, degrees)) / request.sized.layers
    flops = linear_backward_flops(1) * flops if backward else flops
    return flops / degrees.tp / (machine.peak(request.dtype) * machine.reached.linear)


def _ring_s(
    request: Request, degrees: Degrees, layout: str, backward: bool
) -> tuple[float, float, float, float]:
    """Return seconds of one layer's attention: on free links, if balanced, of its hops on the slowest link, and exposed."""
    return _ring_of(request, replace(degrees, fsdp=1), layout, backward)  # sharding does not change rings


@lru_cache(maxsize=1024)
def _ring_of(
    request: Request, degrees: Degrees, layout: str, backward: bool
) -> tuple[float, float, float, float]:
    sizes, P = ring_sizes(request, degrees), degrees.ring
    compute, tokens = block_seconds(request, sizes, layout, P, backward)
    rate, latency = ring_links(np.arange(P) * degrees.tp * degrees.ulysses, request.machine)
    block = sizes.block_bytes_per_token * tokens
    home = gradient_bytes_per_token(sizes) * tokens
    nothing = np.zeros(P)
    if backward:
        makespan = ring_backward_s(compute, block / rate, home / rate, latency)
        free = ring_backward_s(compute, nothing, nothing, nothing)
        travel = ((P - 1) * block + P * home) / rate + (2 * P - 1) * latency if P > 1 else nothing
    else:
        makespan = ring_forward_s(compute, block / rate, latency)
        free = ring_forward_s(compute, nothing, nothing)
        travel = (P - 1) * (block / rate + latency)
    return free, float(compute.sum(axis=1).mean()), float(np.max(travel)), max(0.0, makespan - free)


def _ulysses_s(request: Request, degrees: Degrees) -> float:
    """Return the seconds of the all-to-alls: q, k, v before and out after; backward, dout before and dq, dk, dv after."""
    if degrees.ulysses == 1:
        return 0.0
    sizes = request.sized
    rows = rank_tokens(request, degrees) * sizes.D * element_bytes(request.dtype)
    heads, kv = sizes.H // degrees.tp, degrees.ulysses * degrees.kv_heads(sizes.K)
    who = group("ulysses", degrees, request.machine)
    return 2 * who.exchange_s(rows * heads) + 2 * who.exchange_s(rows * kv)


def _tensor_s(request: Request, degrees: Degrees) -> float:
    """Return the seconds of two all-gathers and two reduce-scatters of the activations, equal in both passes."""
    if degrees.tp == 1:
        return 0.0
    whole = rank_tokens(request, degrees) * request.sized.d_model * element_bytes(request.dtype)
    return 4 * group("tp", degrees, request.machine).gather_s(whole)


def _weights_s(request: Request, degrees: Degrees, weights: WeightTraffic, backward: bool) -> float:
    """Return the seconds to gather one layer's weights, and after a backward to reduce its gradients over all copies."""
    shards = group("fsdp", degrees, request.machine)
    seconds = shards.gather_s(weights.layer_bytes)
    if backward:
        seconds += shards.gather_s(weights.layer_gradient_bytes)
        copies = group("replicas", degrees, request.machine)
        seconds += copies.reduce_s(weights.layer_gradient_bytes / degrees.fsdp)
    return seconds


def measured_time(request: Request, D: int) -> MeasuredTime | None:
    """Return the measured block time of this dtype and head dim, None if there is none."""
    time = block_time(request.machine, request.dtype, request.tile, D)
    return time if isinstance(time, MeasuredTime) else None


def attention_flops_per_s(request: Request, D: int, backward: bool) -> float:
    """Return the FLOP/s of attention in large blocks, as measured, or else as the fraction of the peak that is reached."""
    time = measured_time(request, D)
    block = (time.backward if backward else time.forward) if time else None
    if block is not None and block.per_score_s > 0:
        return attention_flops(Attention(1, 1, 1, D, request.dtype), 1, backward) / block.per_score_s
    reached = request.machine.reached
    fraction = reached.attention_backward if backward else reached.attention_forward
    return request.machine.peak(request.dtype) * fraction


def measured_seconds(
    time: MeasuredTime, request: Request, sizes: Attention, layout: str, P: int, backward: bool
) -> np.ndarray:
    """Return seconds by (rank, step), (P, P).

    In rings of more than ALL_PAIRS ranks, the times of a rank's own, an earlier and a later block are taken
    from ranks 0 and 1. This is exact if all ranks own equally many tokens.
    Raises: CostError if this pass was not measured.
    """
    dealt = get_layout(layout, request.tokens, P)

    def pair(rank: int, origin: int) -> float:
        found = tiles(dealt, rank, origin, request.causal)
        return time.seconds(found, sizes, dealt.length(rank), backward)

    ranks, steps = np.arange(P)[:, None], np.arange(P)[None, :]
    if P <= ALL_PAIRS:
        return np.array([[pair(rank, (rank - step) % P) for step in range(P)] for rank in range(P)])
    own, earlier, later = pair(0, 0), pair(1, 0), pair(0, 1)
    return np.where(steps == 0, own, np.where(steps <= ranks, earlier, later))

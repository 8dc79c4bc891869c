"""The time of a step: the computation, communication and hidden communication of each layer and pass.

Attention takes the seconds that were measured on the hardware, as in the simulator, or without a measurement
the seconds computed from the hardware's peak.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from ringlab.cost.block_time import MeasuredTime, block_time
from ringlab.cost.flops import attention_flops, linear_backward_flops, visible_pairs, vocabulary_flops
from ringlab.cost.hardware import Link
from ringlab.cost.models import Layer
from ringlab.cost.planner.parallelism import Degrees, Group, group, placed
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.ring_time import (
    ring_backward_s,
    ring_forward_s,
    ring_links,
    ring_work,
    window_work,
)
from ringlab.cost.planner.stages import largest_layers, stages
from ringlab.cost.scan_traffic import SCANS, LinearAttention, rounds, scan_flops, scan_traffic
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
    hidden. dispatch_s: tokens that go to their experts and back, which nothing hides.
    Of a model with several kinds of layers, a pass is the mean over its layers.
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
    dispatch_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return the seconds of computation."""
        return self.linear_s + self.attention_s

    @property
    def exposed_s(self) -> float:
        """Return the seconds of waiting for communication."""
        waits = self.ring_exposed_s + self.ulysses_s + self.tensor_s + self.weights_exposed_s
        return waits + self.host_exposed_s + self.dispatch_s

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
        """Return all figures: seconds per step, or per layer for passes, or per round for the vocabulary."""
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
    update_bytes: tuple[int, int],
    rounds: int = 1,
    offloaded_bytes: int = 0,
) -> StepTime:
    """Return the time of one training step, or of prefilling the context; `request` has one round's batch.

    update_bytes: two numbers, the bytes that an update of the weights reads and writes, and the part of them
    that comes from the host and goes back at the same time. offloaded_bytes: the bytes of one layer's
    activations that go to the host in the forward and come back later.
    """
    sizes = request.sized
    names = ["forward"]
    if request.training:
        names += [] if recomputation == "none" else [f"{recomputation} recomputation"]
        names.append("backward")
    passes = tuple(_mean_pass(request, degrees, layout, name) for name in names)
    if offloaded_bytes:
        passes = _with_offload(passes, request, offloaded_bytes)
    tokens = rank_tokens(request, degrees)
    words = replace(sizes, vocabulary=-(-sizes.vocabulary // degrees.tp))
    logits = vocabulary_flops(words, tokens if request.training else 1)
    logits += linear_backward_flops(logits) if request.training else 0
    rate = request.machine.peak(request.dtype) * request.machine.reached.linear
    update = _update_s(request, *update_bytes) if request.training else 0.0
    layers = largest_layers(stages(sizes, degrees.pp))
    pipeline = _pipeline(request, degrees)
    return StepTime(layers, passes, logits / rate, update, rounds, pipeline)


def _update_s(request: Request, moved: int, from_host: int) -> float:
    """Return the seconds of an update: to read and write its bytes, or if longer, to fetch those on the host."""
    seconds, host = moved / request.machine.memory_bytes_per_s, request.machine.host
    if from_host and host is not None:
        seconds = max(seconds, host.latency_s + from_host / host.bytes_per_s)
    return seconds


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


def rank_tokens(request: Request, degrees: Degrees) -> int:
    """Return the tokens of all sequences on the rank that owns most tokens."""
    return -(-request.tokens // degrees.cp) * (request.batch // degrees.dp)


@lru_cache(maxsize=1024)
def ring_sizes(request: Request, degrees: Degrees, layer: Layer | None = None) -> Attention:
    """Return the sizes of the attention that one ring computes, by default in a layer that attends to all tokens.

    The heads of these sizes are those that each rank holds after tp and Ulysses have split the heads.
    """
    it = layer or request.sized.main
    return Attention(
        request.batch // degrees.dp,
        it.H // (degrees.tp * degrees.ulysses),
        degrees.kv_heads(it.dealt_heads),
        it.D,
        request.dtype,
        request.causal,
        it.Dv,
        it.latent or None,
    )


def mixing_flops(layer: Layer, tokens: int, causal: bool) -> int:
    """Return the forward FLOPs of one layer's attention, or gated delta rule, of one sequence, without masked pairs."""
    if layer.linear:
        return scan_flops(LinearAttention(1, layer.H, layer.D, layer.value_dim), tokens)
    return attention_flops(layer.attention(), visible_pairs(tokens, causal, layer.window))


def block_seconds(
    request: Request, sizes: Attention, layout: str, P: int, backward: bool, window: int | None = None
) -> tuple[np.ndarray, int]:
    """Return the seconds of blocks by (rank, step), measured if the hardware file has measurements, and a shard's tokens.

    With a window, the tiles in it take the time of as many tiles of a large block, and steps without tiles
    are left out.
    Raises: CostError if the file has measurements, but none of this pass.
    """
    if window is not None and window < request.tokens:
        rate = attention_flops_per_s(request, sizes.D, backward)
        work, tokens = window_work(layout, request.tokens, P, request.causal, request.tile, window)
        return work * (attention_flops(sizes, 1, backward) / rate), tokens
    work, tokens = ring_work(layout, request.tokens, P, request.causal, request.tile)
    measured = measured_time(request, sizes.D)
    if measured is not None:
        return measured_seconds(measured, request, sizes, layout, P, backward), tokens
    rate = attention_flops_per_s(request, sizes.D, backward)
    return work * (attention_flops(sizes, 1, backward) / rate), tokens


def _mean_pass(request: Request, degrees: Degrees, layout: str, name: str) -> Pass:
    """Return the mean of a pass over all layers of the model."""
    kinds = request.sized.kinds
    found = [_pass(request, degrees, layout, name, it) for it in kinds]
    if len(found) == 1:
        return found[0]
    seconds = (it.name for it in fields(Pass) if it.name != "name")
    share = [it.layers / request.sized.layers for it in kinds]
    return Pass(
        name, **{s: sum(w * getattr(f, s) for w, f in zip(share, found, strict=True)) for s in seconds}
    )


def _pass(request: Request, degrees: Degrees, layout: str, name: str, layer: Layer) -> Pass:
    backward, again = name == "backward", name.endswith("recomputation")
    linear_s = 0.0 if name.startswith("selective") else _linear_s(request, degrees, layer, backward)
    attention_s, balanced_s, ring_s, exposed_s = _mixer_s(request, degrees, layer, layout, backward)
    ulysses_s = _ulysses_s(request, degrees, layer)
    tensor_s = 0.0 if name.startswith("selective") else _tensor_s(request, degrees)
    weights_s = 0.0 if again else _weights_s(request, degrees, layer, backward)
    weights_s += _from_host_s(request, degrees, layer)
    dispatch_s = 0.0 if name.startswith("selective") else _dispatch_s(request, degrees, layer)
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
        dispatch_s=dispatch_s,
    )


def _linear_s(request: Request, degrees: Degrees, layer: Layer, backward: bool) -> float:
    machine, tp = request.machine, degrees.tp
    active = layer.rank_active_parameters(tp)
    flops = 2 * active * rank_tokens(request, degrees)
    flops = linear_backward_flops(1) * flops if backward else flops
    if backward and request.ffn_chunk is not None:  # the feed-forward once more, some tokens at a time
        fed = active - layer.rank_mixer_parameters(tp)
        flops += 2 * fed * rank_tokens(request, degrees)
    return flops / (machine.peak(request.dtype) * machine.reached.linear)


def _mixer_s(
    request: Request, degrees: Degrees, layer: Layer, layout: str, backward: bool
) -> tuple[float, float, float, float]:
    """Return four figures of one layer's attention, in seconds.

    They are the time on free links; the same if balanced; the hops on the slowest link; and the waits.
    """
    if layer.linear:
        return _scan_s(request, degrees, layer, layout, backward)
    # Sharding does not change rings, and neither does the feed-forward.
    return _ring_of(request, replace(degrees, fsdp=1, ep=1), _attention_of(layer), layout, backward)


@lru_cache(maxsize=256)
def _attention_of(layer: Layer) -> Layer:
    """Return a layer that differs from others by its attention alone."""
    return replace(layer, layers=1, d_ff=1, experts=None, active_experts=None, shared_d_ff=None)


def _scan_s(
    request: Request, degrees: Degrees, layer: Layer, layout: str, backward: bool
) -> tuple[float, float, float, float]:
    """Return the seconds of one layer's gated delta rule, in the order of `_mixer_s`, by its fastest scan.

    All ranks that share a sequence pass states, once for each stretch of consecutive tokens that a rank owns. The
    chunks reach the fraction of the peak that attention reaches. Nothing hides the states.
    """
    sequences, own, cp = request.batch // degrees.dp, -(-request.tokens // degrees.cp), degrees.cp
    sizes = LinearAttention(sequences, layer.H // degrees.tp, layer.D, layer.value_dim, request.dtype)
    compute = scan_flops(sizes, own, backward=backward) / attention_flops_per_s(request, layer.D, backward)
    if cp == 1:
        return compute, compute, 0.0, 0.0
    across = placed(cp, degrees.tp, request.machine)
    stretches = len(get_layout(layout, 2 * cp, cp).runs(0)) if degrees.ring > 1 else 1
    sent = stretches * min(states_s(sizes, cp, scan, across.link) for scan in SCANS)
    return compute, compute, sent, sent


def states_s(sizes: LinearAttention, P: int, scan: str, link: Link) -> float:
    """Return the seconds in which the states of one scan pass through P ranks; a backward takes as long as a forward."""
    busiest = (
        (1 << n) - 1 for n in range((P - 1).bit_length())
    )  # one of these ranks sends most in every scan
    sent = max(scan_traffic(sizes, P, scan, rank=rank).total_bytes for rank in busiest)
    in_turn = rounds(P, scan)
    return in_turn * link.latency_s + sent * (in_turn if scan == "relay" else 1) / link.bytes_per_s


@lru_cache(maxsize=1024)
def _ring_of(
    request: Request, degrees: Degrees, layer: Layer, layout: str, backward: bool
) -> tuple[float, float, float, float]:
    sizes, P = ring_sizes(request, degrees, layer), degrees.ring
    compute, tokens = block_seconds(request, sizes, layout, P, backward, layer.window)
    compute = compute + _making_s(request, layer, sizes, tokens, compute.shape[1], backward)
    hops = compute.shape[1]
    rate, latency = ring_links(np.arange(P) * degrees.tp * degrees.ulysses, request.machine)
    block = sizes.block_bytes_per_token * tokens
    home = gradient_bytes_per_token(sizes) * tokens
    nothing = np.zeros(P)
    if backward:
        makespan = ring_backward_s(compute, block / rate, home / rate, latency)
        free = ring_backward_s(compute, nothing, nothing, nothing)
        travel = ((hops - 1) * block + hops * home) / rate + (2 * hops - 1) * latency if hops > 1 else nothing
    else:
        makespan = ring_forward_s(compute, block / rate, latency)
        free = ring_forward_s(compute, nothing, nothing)
        travel = (hops - 1) * (block / rate + latency)
    return free, float(compute.sum(axis=1).mean()), float(np.max(travel)), max(0.0, makespan - free)


def _making_s(
    request: Request, layer: Layer, sizes: Attention, tokens: int, steps: int, backward: bool
) -> np.ndarray:
    """Return, by step, the seconds of making K and V from latents, beyond the layer's own products.

    K and V of each block are made in the forward and again in the backward, where the gradients of the latent and of
    the matrices take two more products, as for all matrices. The products of own tokens count as the layer's matrices.
    """
    if not (layer.kv_latent and layer.latent):
        return np.zeros(steps)
    made = sizes.H * (layer.D - (layer.rope or 0) + layer.value_dim)
    rate = request.machine.peak(request.dtype) * request.machine.reached.linear
    once = 2 * layer.kv_latent * made * sizes.B * tokens / rate
    own, arrived = (1, 1 + linear_backward_flops(1)) if backward else (0, 1)
    return once * np.array([own] + [arrived] * (steps - 1))


def _ulysses_s(request: Request, degrees: Degrees, sizes: Layer) -> float:
    """Return the seconds of the all-to-alls before and after attention.

    They carry q, k, v before and out after it; in the backward, dout before and dq, dk, dv after it.
    """
    if degrees.ulysses == 1 or sizes.linear:
        return 0.0
    rows = rank_tokens(request, degrees) * element_bytes(request.dtype)
    heads, kv = sizes.H // degrees.tp, degrees.ulysses * degrees.kv_heads(sizes.K)
    who, dims = group("ulysses", degrees, request.machine), (sizes.D, sizes.value_dim)
    return sum(who.exchange_s(rows * dim * heads) + who.exchange_s(rows * dim * kv) for dim in dims)


def _tensor_s(request: Request, degrees: Degrees) -> float:
    """Return the seconds of two all-gathers and two reduce-scatters of the activations, equal in both passes."""
    if degrees.tp == 1:
        return 0.0
    whole = rank_tokens(request, degrees) * request.sized.d_model * element_bytes(request.dtype)
    return 4 * group("tp", degrees, request.machine).gather_s(whole)


def _weights_s(request: Request, degrees: Degrees, layer: Layer, backward: bool) -> float:
    """Return the seconds to gather one layer's weights and, if `backward`, to reduce their gradients.

    Expert-parallel ranks that hold the same experts divide them among themselves and gather them.
    """
    size, tp, ep, fsdp = element_bytes(request.dtype), degrees.tp, degrees.ep, degrees.fsdp
    shards, copies = (group(name, degrees, request.machine) for name in ("fsdp", "replicas"))
    if ep == 1:
        return _shared_s(shards, copies, layer.gathered_parameters(fsdp, 1, tp) * size, backward)
    seconds = _shared_s(shards, copies, layer.rank_common_parameters(tp) * size, backward)
    sharing, whole = max(1, fsdp // ep), max(ep, fsdp)
    among = placed(sharing, tp * ep, request.machine)
    others = placed(degrees.dp * degrees.cp // whole, tp * whole, request.machine)
    return seconds + _shared_s(among, others, layer.expert_parameters * size / (tp * ep), backward)


def _shared_s(shards: Group, copies: Group, layer_bytes: float, backward: bool) -> float:
    """Return the seconds to gather these bytes over `shards`; in backward also to reduce gradients over `copies`."""
    seconds = shards.gather_s(layer_bytes)
    if backward:
        seconds += shards.gather_s(layer_bytes)
        seconds += copies.reduce_s(layer_bytes / shards.size)
    return seconds


def _from_host_s(request: Request, degrees: Degrees, layer: Layer) -> float:
    """Return the seconds in which this rank's share of a layer's weights comes from the host, 0 if it is on the GPU."""
    host = request.machine.host
    if "weights" not in request.offloads or host is None:
        return 0.0
    experts = layer.expert_parameters / degrees.tp / max(degrees.fsdp, degrees.ep)
    weights = layer.rank_common_parameters(degrees.tp) / degrees.fsdp + experts
    return host.latency_s + weights * element_bytes(request.dtype) / host.bytes_per_s


def _dispatch_s(request: Request, degrees: Degrees, layer: Layer) -> float:
    """Return the seconds of the all-to-alls of experts: a token goes to each of its experts, and their outputs return.

    In the backward, the gradients do the same. Each rank sends and gets equally many tokens.
    """
    if degrees.ep == 1 or not layer.active_experts:
        return 0.0
    row = layer.active_experts * layer.d_model * element_bytes(request.dtype)
    return 2 * group("ep", degrees, request.machine).exchange_s(rank_tokens(request, degrees) * row)


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

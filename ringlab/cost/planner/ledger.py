"""The memory of one GPU, entry by entry: the GPU whose rank owns most tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ringlab.cost.memory import (
    attention_work,
    gathered_bytes,
    gradient_bytes,
    kv_cache_bytes,
    layer_gradient_bytes,
    logits_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_bytes,
)
from ringlab.cost.models import Model
from ringlab.cost.planner.degrees import Degrees
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.step_time import WeightTraffic, rank_tokens, ring_sizes
from ringlab.cost.sizes import element_bytes


@dataclass(frozen=True)
class Entry:
    """Bytes of one kind on one GPU; `note` says how they are computed."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class Ledger:
    """All entries; they are added as if all their peaks coincided."""

    entries: tuple[Entry, ...]

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(entry.bytes for entry in self.entries)

    def of(self, name: str) -> int:
        """Return the bytes of the entry `name`, 0 if there is none."""
        return sum(entry.bytes for entry in self.entries if entry.name == name)


def ledger(request: Request, degrees: Degrees, recomputation: str) -> Ledger:
    """Return the memory of one GPU, without entries of zero bytes."""
    state = _state(request.sized, request.dtype, request.training, degrees.fsdp, degrees.tp)
    return Ledger(state + _at_work(request, replace(degrees, fsdp=1), recomputation))


def weight_traffic(request: Request, degrees: Degrees) -> WeightTraffic:
    """Return the bytes of weights and gradients sent per layer, and the bytes that an update reads and writes."""
    sizes, dtype, share = request.sized, request.dtype, (degrees.fsdp, degrees.tp)
    layer = sizes.layer_matrix_parameters * element_bytes(dtype) / degrees.tp
    held = parameter_bytes(sizes, dtype, *share) + optimizer_bytes(sizes, dtype, *share)
    return WeightTraffic(layer, layer, 2 * held + gradient_bytes(sizes, fsdp=degrees.fsdp, tp=degrees.tp))


@lru_cache(maxsize=1024)
def _state(sizes: Model, dtype: str, training: bool, fsdp: int, tp: int) -> tuple[Entry, ...]:
    """Weights, and in training their gradients and Adam's state, on one of fsdp × tp ranks."""
    over = _over(fsdp=fsdp, tp=tp)
    found = [
        Entry(
            "parameters",
            parameter_bytes(sizes, dtype, fsdp, tp),
            f"{sizes.parameters / 1e9:.3g} billion × {element_bytes(dtype)} B{over}",
        )
    ]
    if training:
        master = (
            "two float32 moments and a float32 copy" if element_bytes(dtype) < 4 else "two float32 moments"
        )
        found += [
            Entry("gradients", gradient_bytes(sizes, "float32", fsdp, tp), f"float32{over}"),
            Entry("optimizer", optimizer_bytes(sizes, dtype, fsdp, tp), f"Adam: {master}{over}"),
        ]
    if fsdp > 1:
        layers = gathered_bytes(sizes, dtype, fsdp, tp)  # two of a layer's size
        matrix = sizes.vocabulary * sizes.d_model * element_bytes(dtype) // tp
        copies = 3 if training else 2
        what = "one layer at work, the next arriving" + (", a gradient leaving" if training else "")
        found.append(Entry("gathered weights", max(layers * copies // 2, (copies - 1) * matrix), what))
    return tuple(found)


@lru_cache(maxsize=4096)
def _at_work(request: Request, degrees: Degrees, recomputation: str) -> tuple[Entry, ...]:
    """The entries that do not depend on how weights are sharded: `degrees` has fsdp 1."""
    entries = _training(request, degrees, recomputation) if request.training else _inference(request, degrees)
    return tuple(entry for entry in entries if entry.bytes)


def _training(request: Request, degrees: Degrees, recomputation: str) -> list[Entry]:
    sizes, dtype, tp = request.sized, request.dtype, degrees.tp
    tokens = rank_tokens(request, degrees)
    whole = saved_bytes(sizes, tokens, dtype, "none", tp)
    kept = _kept_bytes(request, tokens, recomputation, tp)
    note = f"{{:,}} tokens × {sizes.vocabulary:,} words × 4 B{_over(tp=tp)}"
    at_once = min(tokens, request.logits_chunk or tokens)
    what = {
        "none": "all that the backward reads",
        "selective": "all but attention's output",
        "full": "the input of each layer",
    }[recomputation]
    return [
        Entry("activations", sizes.layers * kept, f"{what}: {sizes.layers} layers × {tokens:,} tokens"),
        Entry("layer at work", max(0, whole - kept), "what one layer holds besides"),
        Entry(
            "gradients of the layer at work",
            layer_gradient_bytes(sizes, tokens, dtype, tp),
            "of its feed-forward's activations, and of the residual stream",
        ),
        *_attention(request, degrees, backward=True),
        Entry("logits", logits_bytes(sizes, at_once, "float32", tp), note.format(at_once)),
    ]


def _over(**degrees: int) -> str:
    named = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return f", over {' × '.join(named)}" if named else ""


def _kept_bytes(request: Request, tokens: int, recomputation: str, tp: int) -> int:
    """Bytes that one layer keeps; sequence parallelism divides the parts that heads do not split among TP ranks."""
    sizes = request.sized
    kept = saved_bytes(sizes, tokens, request.dtype, recomputation, tp)
    of_width_d = (1 if recomputation == "full" else 4) * sizes.d_model * tokens * element_bytes(request.dtype)
    return kept - of_width_d + -(-of_width_d // tp)


def _inference(request: Request, degrees: Degrees) -> list[Entry]:
    sizes, dtype, tp = request.sized, request.dtype, degrees.tp
    sequences = request.batch // degrees.dp
    shard, copies = -(-request.tokens // degrees.cp), degrees.kv_copies(sizes.K)
    cache = -(-kv_cache_bytes(sizes, shard, dtype, sequences) * copies // tp)
    note = f"{sizes.layers} layers × {shard:,} tokens × {sequences} sequences"
    note += f", each head on {copies} ranks" if copies > 1 else ""
    decoding = request.purpose == "decode"
    tokens = sequences if decoding else rank_tokens(request, degrees)
    found = [
        Entry("K/V cache", cache, note),
        Entry(
            "layer at work", saved_bytes(sizes, tokens, dtype, "none", tp), f"one layer, {tokens:,} tokens"
        ),
        Entry("logits", logits_bytes(sizes, sequences, "float32", tp), "of the last token of each sequence"),
    ]
    return found if decoding else found + _attention(request, degrees, backward=False)


def _attention(request: Request, degrees: Degrees, backward: bool) -> list[Entry]:
    """Attention's temporary memory, and the results of all-to-alls beside their inputs."""
    attention, P = ring_sizes(request, degrees), degrees.ring
    work = attention_work(attention, -(-request.tokens // P), P, backward)
    home = "the sum so far, the sum arriving, the block's own" if P > 1 else "before they are rounded"
    summed = (
        "dq; or dout, out and their product for delta" if backward else "of out, and its rows' statistics"
    )
    found = [
        Entry(
            "K/V in flight",
            work.slots,
            "a block in use and a block arriving" if P > 2 else "a block arriving",
        ),
        Entry("dK and dV in float32", work.gradients, home),
        Entry("float32 accumulators", work.accumulators, summed),
    ]
    if degrees.ulysses > 1:
        rows = rank_tokens(request, degrees) * attention.D * element_bytes(request.dtype)
        heads = 2 * attention.H + 2 * attention.K
        found.append(
            Entry("all-to-all", rows * degrees.ulysses * heads, "q, k, v and out once more, by heads")
        )
    return found

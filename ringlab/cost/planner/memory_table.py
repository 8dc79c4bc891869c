"""The memory of one GPU, entry by entry.

For a training step or a prefill, the table is that of the GPU whose rank owns the most tokens, in the stage
that needs the most memory. For serving, there are two tables: of a GPU that decodes, and of a GPU that feeds
prompts.
"""

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
    loss_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_bytes,
)
from ringlab.cost.planner.parallelism import Degrees
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.serve_request import ServeRequest
from ringlab.cost.planner.stages import Stage, stages
from ringlab.cost.planner.step_time import WeightTraffic, rank_tokens, ring_sizes
from ringlab.cost.serving import travelling_kv_bytes
from ringlab.cost.sizes import element_bytes
from ringlab.cost.units import counted, short
from ringlab.errors import CostError


@dataclass(frozen=True)
class Entry:
    """Bytes of one kind on one GPU; `note` explains how they are computed."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class MemoryTable:
    """All entries of one GPU, added as if all their peaks coincided. host_bytes: the most bytes that one GPU offloads."""

    entries: tuple[Entry, ...]
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(entry.bytes for entry in self.entries)

    def of(self, name: str) -> int:
        """Return the bytes of the entry `name`, 0 if there is no such entry."""
        return sum(entry.bytes for entry in self.entries if entry.name == name)


def step_memory(request: Request, degrees: Degrees, recomputation: str, rounds: int = 1) -> MemoryTable:
    """Return the memory of one GPU, without entries of zero bytes; `request` has one round's batch."""
    found = stages(request.sized, degrees.pp, request.interleave, rounds)
    books = [_of_stage(request, degrees, recomputation, stage) for stage in found]
    fullest = max(books, key=lambda it: it.total_bytes)
    if len(books) == 1:
        return fullest
    return replace(fullest, host_bytes=max(it.host_bytes for it in books))


def _of_stage(request: Request, degrees: Degrees, recomputation: str, stage: Stage) -> MemoryTable:
    state = _state(stage, request.dtype, request.training, degrees.fsdp, degrees.tp)
    entries = state + _at_work(request, replace(degrees, fsdp=1), recomputation, stage)
    if request.offload == "none":
        return MemoryTable(entries)
    kept = kept_bytes(request, degrees, recomputation)
    return MemoryTable(entries, max(0, stage.layers_held - ON_THE_GPU) * kept)


def weight_traffic(request: Request, degrees: Degrees) -> WeightTraffic:
    """Return the bytes of weights and gradients sent per layer, and the bytes that an update reads and writes."""
    dtype, share = request.dtype, (degrees.fsdp, degrees.tp)
    layer = request.sized.layer_matrix_parameters * element_bytes(dtype) / degrees.tp
    stage = max(stages(request.sized, degrees.pp), key=lambda it: it.parameters)
    held = parameter_bytes(stage, dtype, *share) + optimizer_bytes(stage, dtype, *share)
    return WeightTraffic(layer, layer, 2 * held + gradient_bytes(stage, fsdp=degrees.fsdp, tp=degrees.tp))


@lru_cache(maxsize=1024)
def _state(stage: Stage, dtype: str, training: bool, fsdp: int, tp: int) -> tuple[Entry, ...]:
    """Return the entries of a stage's weights, and in training of gradients and Adam's state, on one of fsdp × tp ranks."""
    over, sizes = _over(fsdp=fsdp, tp=tp), stage.model
    whose = f" of the {stage.name} stage" if stage.name else ""
    found = [
        Entry(
            "parameters",
            parameter_bytes(stage, dtype, fsdp, tp),
            f"{stage.parameters / 1e9:.3g} billion{whose} × {element_bytes(dtype)} B{over}",
        )
    ]
    if training:
        master = (
            "two float32 moments and a float32 copy" if element_bytes(dtype) < 4 else "two float32 moments"
        )
        found += [
            Entry("gradients", gradient_bytes(stage, "float32", fsdp, tp), f"float32{over}"),
            Entry("optimizer", optimizer_bytes(stage, dtype, fsdp, tp), f"Adam: {master}{over}"),
        ]
    if fsdp > 1:
        layers = gathered_bytes(sizes, dtype, fsdp, tp)  # two of a layer's size
        matrix = sizes.vocabulary * sizes.d_model * element_bytes(dtype) // tp
        copies = 3 if training else 2
        what = "one layer at work, the next arriving" + (", a gradient leaving" if training else "")
        found.append(Entry("gathered weights", max(layers * copies // 2, (copies - 1) * matrix), what))
    return tuple(found)


@lru_cache(maxsize=4096)
def _at_work(request: Request, degrees: Degrees, recomputation: str, stage: Stage) -> tuple[Entry, ...]:
    """Return the entries that do not depend on how weights are sharded; `degrees` has fsdp 1."""
    if request.training:
        entries = _training(request, degrees, recomputation, stage)
    else:
        entries = _inference(request, degrees)
    return tuple(entry for entry in entries if entry.bytes)


KEPT = {
    "none": "all that the backward reads",
    "selective": "all but attention's output",
    "full": "the input of each layer",
}
ON_THE_GPU = 2  # layers whose offloaded activations are on the GPU: one computes, one is transferred


def _training(request: Request, degrees: Degrees, recomputation: str, stage: Stage) -> list[Entry]:
    sizes, dtype, tp = request.sized, request.dtype, degrees.tp
    tokens = rank_tokens(request, degrees)
    whole = saved_bytes(sizes, tokens, dtype, "none", tp)
    kept = kept_bytes(request, degrees, recomputation)
    return [
        _activations(request, stage, kept, f"{KEPT[recomputation]}: {{}} layers × {tokens:,} tokens"),
        Entry("layer at work", max(0, whole - kept), "what one layer holds besides"),
        Entry(
            "gradients of the layer at work",
            layer_gradient_bytes(sizes, tokens, dtype, tp),
            "of its feed-forward's activations, and of the residual stream",
        ),
        *_attention(request, degrees, backward=True),
        *([_loss(request, tokens, tp)] if stage.computes_loss else []),
    ]


def _activations(request: Request, stage: Stage, kept: int, note: str) -> Entry:
    layers = stage.layers_held
    if request.offload != "none" and layers > ON_THE_GPU:
        rest = (
            f"; those of {layers - ON_THE_GPU} more on the host, {kept * (layers - ON_THE_GPU) / 1e9:.1f} GB"
        )
        return Entry("activations", ON_THE_GPU * kept, note.format(ON_THE_GPU) + rest)
    held = stage.chunks_held / stage.interleave
    several = f", of {held:.3g} micro-batches" if stage.name else ""
    return Entry("activations", layers * kept, note.format(stage.layers) + several)


def _loss(request: Request, tokens: int, tp: int) -> Entry:
    """Return the entries of the logits and of the tensors that the loss computes from them."""
    at_once = min(tokens, request.logits_chunk or tokens)
    size = loss_bytes(request.sized, at_once, request.dtype, tp)
    note = f"{at_once:,} tokens × {request.sized.vocabulary:,} words{_over(tp=tp)}: in {request.dtype}, and three times in float32"
    return Entry("logits", size, note)


def _over(**degrees: int) -> str:
    named = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return f", over {' × '.join(named)}" if named else ""


def kept_bytes(request: Request, degrees: Degrees, recomputation: str) -> int:
    """Return the bytes that one layer keeps for its backward in one round.

    Sequence parallelism divides, among TP ranks, the parts that are not split by heads.
    """
    sizes, tokens, tp = request.sized, rank_tokens(request, degrees), degrees.tp
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
    decoding = request.decoding
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
    """Return the entries for attention's temporary memory and for the results of all-to-alls."""
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


SHARED = {
    "copies": "over tp {1}",
    "dcp": "over all {0} ranks, K and V over tp {1}",
    "helix": "over all {0} ranks, K, V and queries over tp {1}",
}


def decode_memory(request: ServeRequest) -> MemoryTable:
    """Return the memory of a GPU that decodes when every sequence has reached its whole context."""
    it, dtype, tp, B = request.sized, request.dtype, request.head_ranks, request.sequences
    over = SHARED[request.sharing].format(request.gpus, tp)
    held = -(-request.context // request.token_ranks)
    return MemoryTable(
        (
            Entry("parameters", request.weight_bytes, f"{it.parameters / 1e9:.3g} billion, {over}"),
            Entry(
                "K/V cache",
                request.cache_bytes(request.context, B),
                f"{it.layers} layers × {held:,} tokens × {counted(B, 'sequence')}",
            ),
            Entry(
                "layer at work", saved_bytes(it, B, dtype, "none", tp), f"one layer, {counted(B, 'token')}"
            ),
            Entry("logits", logits_bytes(it, B, "float32", tp), "of the last token of each sequence"),
        )
    )


def prefill_memory(request: ServeRequest) -> MemoryTable:
    """Return the memory of a GPU that feeds one prompt in chunks, at the last chunk."""
    it, dtype, tp, P = request.sized, request.dtype, request.head_ranks, request.token_ranks
    held, rows = -(-request.prompt // P), -(-min(request.chunk, request.prompt) // P)
    work = attention_work(request.row_sizes, rows, P, False)
    found = (
        Entry("parameters", parameter_bytes(it, dtype, 1, tp), f"of a GPU that feeds prompts: over tp {tp}"),
        Entry(
            "K/V cache",
            request.cache_bytes(request.prompt, 1),
            f"{it.layers} layers × {held:,} tokens of one prompt",
        ),
        Entry("K/V in flight", travelling_kv_bytes(request.row_sizes, held, P), "where K and V travel"),
        Entry(
            "layer at work",
            saved_bytes(it, rows, dtype, "none", tp),
            f"one layer, {rows:,} tokens of a chunk",
        ),
        Entry("float32 accumulators", work.accumulators, "of out, and its rows' statistics"),
        Entry("logits", logits_bytes(it, 1, "float32", tp), "of the last token"),
    )
    return MemoryTable(tuple(entry for entry in found if entry.bytes))


def fuller_memory(request: ServeRequest) -> MemoryTable:
    """Return the memory of the GPU that needs more: the one that decodes, or the one that feeds prompts."""
    return max(decode_memory(request), prefill_memory(request), key=lambda it: it.total_bytes)


def most_sequences(request: ServeRequest, memory_bytes: float) -> int:
    """Return the most sequences of this context that fit, with the weights, into the memory of a GPU; 0 if none fits."""

    def needed(sequences: int) -> int:
        return decode_memory(replace(request, sequences=sequences)).total_bytes

    one = needed(1)
    if one > memory_bytes:
        return 0
    found = 1 + int((memory_bytes - one) // max(1, needed(2) - one))
    while needed(found) > memory_bytes:  # each entry is rounded up to whole bytes
        found -= 1
    return found


def check_fits(request: ServeRequest) -> None:
    """Raises: CostError with the needed and the available bytes, and the number of sequences that fits."""
    memory = request.machine.memory_bytes
    feeding, decoding = prefill_memory(request).total_bytes, decode_memory(request).total_bytes
    got = f"{request.machine.label} has {short(memory, 'bytes')}"
    what = f"{counted(request.sequences, 'sequence')} of {request.context:,} tokens"
    if decoding > memory:
        fit = most_sequences(request, memory)
        remedy = "no sequence of this length fits: more ranks, or a shorter context"
        if fit:
            remedy = f"at most {counted(fit, 'sequence')} of this length, or more ranks"
        raise CostError(f"{short(decoding, 'bytes')} on each GPU for {what}", got, remedy)
    if feeding > memory:
        needed = f"{short(feeding, 'bytes')} on each GPU that feeds a prompt of {request.prompt:,} tokens"
        raise CostError(needed, got, "no sequence fits: more head ranks, or shorter chunks")

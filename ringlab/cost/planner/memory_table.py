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
    feed_forward_bytes,
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
from ringlab.cost.models import Layer, Model
from ringlab.cost.planner.parallelism import Degrees
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.serve_request import ServeRequest
from ringlab.cost.planner.stages import Stage, stages
from ringlab.cost.planner.step_time import rank_tokens, ring_sizes
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
    state = _state(stage, request.dtype, request.training, degrees.fsdp, degrees.tp, degrees.ep)
    state, away = _offloaded_state(state, request, degrees, stage)
    entries = state + _at_work(request, replace(degrees, fsdp=1, ep=1), recomputation, stage)
    if "activations" not in request.offloads:
        return MemoryTable(entries, away)
    kept = kept_bytes(request, degrees, recomputation)
    return MemoryTable(entries, away + max(0, stage.layers_held - ON_THE_GPU) * kept)


def _offloaded_state(
    entries: tuple[Entry, ...], request: Request, degrees: Degrees, stage: Stage
) -> tuple[tuple[Entry, ...], int]:
    """Return the entries of a stage's state without its bytes on the host, and the bytes on the host.

    Two layers of offloaded weights and gradients are on the GPU, one at work and one on its way, or one
    matrix of the vocabulary if that is larger. The offloaded optimizer state passes through the GPU in
    pieces during the update, when nothing else is there.
    """
    if not request.offloads & {"weights", "optimizer"}:
        return entries, 0
    sizes, (fsdp, tp, ep) = stage.model, (degrees.fsdp, degrees.tp, degrees.ep)
    largest = max(
        ON_THE_GPU * max(it.gathered_parameters(fsdp, ep, tp) for it in sizes.kinds),
        -(-sizes.vocabulary // tp) * sizes.d_model,
    )
    left = {"optimizer": 0} if "optimizer" in request.offloads else {}
    if "optimizer" in request.offloads:
        left["gradients"] = -(-largest * 4 // fsdp)
    if "weights" in request.offloads:
        left["parameters"] = -(-largest * element_bytes(request.dtype) // fsdp)
    found, away = [], 0
    for it in entries:
        here = min(it.bytes, left.get(it.name, it.bytes))
        away += it.bytes - here if it.name in left else 0
        words = f"; {(it.bytes - here) / 1e9:.1f} GB more on the host" if here < it.bytes else ""
        found.append(Entry(it.name, here, it.note + words))
    return tuple(it for it in found if it.bytes), away


def update_bytes(request: Request, degrees: Degrees) -> int:
    """Return the bytes that an update of the weights reads and writes."""
    dtype, share = request.dtype, (degrees.fsdp, degrees.tp, degrees.ep)
    stage = max(stages(request.sized, degrees.pp), key=lambda it: it.parameters)
    held = parameter_bytes(stage, dtype, *share) + optimizer_bytes(stage, dtype, *share)
    return 2 * held + gradient_bytes(stage, "float32", *share)


def host_update_bytes(request: Request, degrees: Degrees) -> int:
    """Return the offloaded bytes of optimizer and gradients that come to the GPU for an update, or 0."""
    if "optimizer" not in request.offloads:
        return 0
    share = (degrees.fsdp, degrees.tp, degrees.ep)
    stage = max(stages(request.sized, degrees.pp), key=lambda it: it.parameters)
    return optimizer_bytes(stage, request.dtype, *share) + gradient_bytes(stage, "float32", *share)


@lru_cache(maxsize=1024)
def _state(stage: Stage, dtype: str, training: bool, fsdp: int, tp: int, ep: int) -> tuple[Entry, ...]:
    """Return the entries of a stage's weights, and in training of gradients and Adam's state, on one of fsdp × tp ranks."""
    over, sizes = _over(fsdp=fsdp, tp=tp) + (f", experts over ep {ep}" if ep > fsdp else ""), stage.model
    whose = f" of the {stage.name} stage" if stage.name else ""
    found = [
        Entry(
            "parameters",
            parameter_bytes(stage, dtype, fsdp, tp, ep),
            f"{stage.parameters / 1e9:.3g} billion{whose} × {element_bytes(dtype)} B{over}{_shared_heads(sizes, tp)}",
        )
    ]
    if training:
        master = (
            "two float32 moments and a float32 copy" if element_bytes(dtype) < 4 else "two float32 moments"
        )
        found += [
            Entry("gradients", gradient_bytes(stage, "float32", fsdp, tp, ep), f"float32{over}"),
            Entry("optimizer", optimizer_bytes(stage, dtype, fsdp, tp, ep), f"Adam: {master}{over}"),
        ]
    if fsdp > 1:
        layers = gathered_bytes(sizes, dtype, fsdp, tp, ep)  # twice a layer's bytes
        matrix = -(-sizes.vocabulary // tp) * sizes.d_model * element_bytes(dtype)
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
    kept = kept_bytes(request, degrees, recomputation)
    fed = request.ffn_chunk and min(tokens, request.ffn_chunk)
    besides = (
        saved_bytes(it, tokens, dtype, "none", tp, bool(fed))
        + (feed_forward_bytes(it, fed, dtype, tp) if fed else 0)
        - _kept(request, degrees, recomputation, it)
        for it in sizes.kinds
    )
    return [
        _activations(request, stage, kept, f"{KEPT[recomputation]}: {{}} layers × {tokens:,} tokens"),
        Entry("layer at work", max(0, *besides), "what one layer holds besides"),
        Entry(
            "gradients of the layer at work",
            layer_gradient_bytes(sizes, tokens, dtype, tp, fed),
            "of its feed-forward's activations, and of the residual stream",
        ),
        *_attention(request, degrees, backward=True),
        *([_loss(request, tokens, tp)] if stage.computes_loss else []),
    ]


def _activations(request: Request, stage: Stage, kept: int, note: str) -> Entry:
    layers = stage.layers_held
    if "activations" in request.offloads and layers > ON_THE_GPU:
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


def _shared_heads(it: Model, ranks: int) -> str:
    copies = it.main.kv_copies(ranks)
    return f", each K/V head on {copies} ranks" if copies > 1 else ""


def _over(**degrees: int) -> str:
    named = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return f", over {' × '.join(named)}" if named else ""


def kept_bytes(request: Request, degrees: Degrees, recomputation: str) -> int:
    """Return the bytes that one layer keeps for its backward in one round; the mean, if layers differ.

    Sequence parallelism divides, among TP ranks, the parts that are not split by heads.
    """
    kinds, layers = request.sized.kinds, request.sized.layers
    return -(-sum(it.layers * _kept(request, degrees, recomputation, it) for it in kinds) // layers)


def _kept(request: Request, degrees: Degrees, recomputation: str, layer: Layer) -> int:
    sizes, tokens, tp = layer, rank_tokens(request, degrees), degrees.tp
    kept = saved_bytes(sizes, tokens, request.dtype, recomputation, tp, request.ffn_chunk is not None)
    of_width_d = (1 if recomputation == "full" else 4) * sizes.d_model * tokens * element_bytes(request.dtype)
    return kept - of_width_d + -(-of_width_d // tp)


def _inference(request: Request, degrees: Degrees) -> list[Entry]:
    sizes, dtype, tp = request.sized, request.dtype, degrees.tp
    sequences = request.batch // degrees.dp
    shard, copies = -(-request.tokens // degrees.cp), degrees.kv_copies(sizes.main.dealt_heads)
    cache = kv_cache_bytes(sizes, request.tokens, dtype, sequences, degrees.cp, tp, degrees.ulysses)
    note = f"{_cached_words(sizes, shard)} × {sequences} sequences"
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


def _cached_words(it: Model, held: int) -> str:
    """Return the layers and the tokens that a rank caches, in words."""
    parts, full = [], sum(kind.layers for kind in it.kinds if kind.global_attention)
    if full:
        parts.append(f"{full} layers × {held:,} tokens")
    parts += [f"{kind.layers} layers × {kind.window:,} tokens at most" for kind in it.kinds if kind.window]
    parts += [f"{kind.layers} layers with a state" for kind in it.kinds if kind.linear]
    return " and ".join(parts)


def _attention(request: Request, degrees: Degrees, backward: bool) -> list[Entry]:
    """Return the entries for attention's temporary memory and for the results of all-to-alls."""
    kinds, P = [it for it in request.sized.kinds if not it.linear] or [request.sized.main], degrees.ring
    found = [
        (attention_work(sizes, -(-request.tokens // P), P, backward), sizes)
        for sizes in (ring_sizes(request, degrees, it) for it in kinds)
    ]
    work, attention = max(found, key=lambda it: it[0].total_bytes)
    home = "the sum so far, the sum arriving, the block's own" if P > 1 else "before they are rounded"
    summed = (
        "dq; or dout, out and their product for delta" if backward else "of out, and its rows' statistics"
    )
    entries = [
        Entry(
            "K/V in flight",
            work.slots,
            "a block in use and a block arriving" if P > 2 else "a block arriving",
        ),
        Entry("dK and dV in float32", work.gradients, home),
        Entry("float32 accumulators", work.accumulators, summed),
        Entry("K and V of a latent", work.made, "made of the block at work"),
    ]
    if degrees.ulysses > 1:
        rows = rank_tokens(request, degrees) * element_bytes(request.dtype)
        numbers = (attention.H + attention.K) * (attention.D + attention.value_dim)
        entries.append(
            Entry("all-to-all", rows * degrees.ulysses * numbers, "q, k, v and out once more, by heads")
        )
    return entries


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
            Entry(
                "parameters",
                request.weight_bytes,
                f"{it.parameters / 1e9:.3g} billion, {over}{_shared_heads(it, tp)}",
            ),
            Entry(
                "K/V cache",
                request.cache_bytes(request.context, B),
                f"{_cached_words(it, held)} × {counted(B, 'sequence')}",
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
        Entry(
            "parameters",
            parameter_bytes(it, dtype, 1, tp),
            f"of a GPU that feeds prompts: over tp {tp}{_shared_heads(it, tp)}",
        ),
        Entry(
            "K/V cache",
            request.cache_bytes(request.prompt, 1),
            f"{_cached_words(it, held)} of one prompt",
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
    """Check that a request fits into memory.

    Raises: CostError with the needed and the available bytes, and the number of sequences that fits.
    """
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

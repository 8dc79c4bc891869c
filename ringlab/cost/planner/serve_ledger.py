"""The memory of serving: of one GPU that decodes, and of one that feeds prompts."""

from __future__ import annotations

from dataclasses import replace

from ringlab.cost.memory import attention_work, logits_bytes, parameter_bytes, saved_bytes
from ringlab.cost.planner.ledger import Entry, Ledger
from ringlab.cost.planner.serve_request import ServeRequest
from ringlab.cost.serving import travelling_kv_bytes
from ringlab.cost.units import counted, short
from ringlab.errors import CostError

SHARED = {
    "copies": "over tp {1}",
    "dcp": "over all {0} ranks, K and V over tp {1}",
    "helix": "over all {0} ranks, K, V and queries over tp {1}",
}


def decode_ledger(request: ServeRequest) -> Ledger:
    """Return the memory of a GPU on which every sequence has reached its whole context."""
    it, dtype, tp, B = request.sized, request.dtype, request.head_ranks, request.sequences
    over = SHARED[request.sharing].format(request.gpus, tp)
    held = -(-request.context // request.token_ranks)
    return Ledger(
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


def prefill_ledger(request: ServeRequest) -> Ledger:
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
    return Ledger(tuple(entry for entry in found if entry.bytes))


def fuller_ledger(request: ServeRequest) -> Ledger:
    """Return the memory of the GPU that needs more: the one that decodes, or the one that feeds prompts."""
    return max(decode_ledger(request), prefill_ledger(request), key=lambda it: it.total_bytes)


def most_sequences(request: ServeRequest, memory_bytes: float) -> int:
    """Return the most sequences of this context whose weights and cache fit into the memory of a GPU; 0 if none does."""

    def needed(sequences: int) -> int:
        return decode_ledger(replace(request, sequences=sequences)).total_bytes

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
    feeding, decoding = prefill_ledger(request).total_bytes, decode_ledger(request).total_bytes
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

"""Bytes that a rank holds: attention's blocks, activations kept for the backward, KV cache, and the model's state.

Tokens are those of one rank (S/P under ring attention). e is the number of bytes of an element. All figures
are counted, not measured: allocators round up, and kernels take workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ringlab.cost.flops import check_recomputation
from ringlab.cost.models import Model
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.errors import CostError


class Weights(Protocol):
    """A model or a part of a model, of which only the number of weights matters."""

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        ...


ATTENTION_KINDS = ("ring", "allgather", "blockwise", "materialised")


def attention_bytes(sizes: Attention, tokens: int, P: int = 1, kind: str = "ring") -> int:
    """Return the bytes of one layer's attention forward on a rank of `tokens` tokens, S = P · tokens.

    Derivation, with c = tokens, h = H·D and g = K·D, if v has the head dim of q and k:
    q and out are c·h each, K and V c·g each. The ring adds the K and V that are arriving:
    (2h + 4g)·b·c·e, independent of S; with K = H six blocks, 6·b·c·h elements. (arXiv 2310.01889
    prints 6·b·c·h bytes beside 2·b·s·h bytes for ONE bfloat16 tensor: six are 12·b·c·h.)
    Six blocks are that paper's count. The ring of this package, measured in bfloat16 with K = H, D = 128 and
    P >= 3, takes 7.05 blocks beside its own q, k and v, which makes ten in all: see `attention_work`.
    "allgather" holds K and V of all P·c tokens; "blockwise" works on one device, where no block is in flight;
    "materialised" adds the c × S scores of every head.
    Raises: CostError for an unknown kind.
    """
    rows, block = (sizes.B * heads * (sizes.D + sizes.value_dim) * tokens for heads in (sizes.H, sizes.K))
    extra = {
        "ring": block if P > 1 else 0,
        "allgather": block * (P - 1),
        "blockwise": 0,
        "materialised": sizes.B * sizes.H * tokens * tokens * P + block * (P - 1),
    }
    if kind not in extra:
        raise CostError(f"a kind among {', '.join(ATTENTION_KINDS)}", repr(kind))
    return (rows + block + extra[kind]) * element_bytes(sizes.dtype)


@dataclass(frozen=True)
class AttentionWork:
    """Temporary bytes of attention, beside q, k, v, out and lse, at their peak.

    slots: bytes of the K/V of other ranks. gradients: bytes of dK and dV in float32. accumulators: bytes of
    float32 sums.
    """

    slots: int
    gradients: int
    accumulators: int

    @property
    def total_bytes(self) -> int:
        """Return the bytes of slots, gradients and accumulators together."""
        return self.slots + self.gradients + self.accumulators


def attention_work(sizes: Attention, tokens: int, P: int, backward: bool = False) -> AttentionWork:
    """Return the temporary bytes of one layer's attention on a rank of `tokens` tokens in this package's ring.

    Derivation, a block being K and V of one rank:
    Both passes have two slots for arriving blocks, one in use and one being filled; with P = 2 one slot is
    enough. The forward has out's float32 accumulator and two numbers for each row, until out is written
    beside them. The backward has dK and dV in float32 three times: their sum so far, the arriving sum, and
    the current block's share. In addition it has the largest of three: dq in float32; at the last step dq in
    both dtypes, when nothing is left to add; at the beginning, before there are gradients, dout, out and
    their product in float32, whose rows add up to delta. `simulate` measures the same bytes on the program
    itself, and a test compares the two results.
    """
    query, out = (sizes.B * sizes.H * dim * tokens for dim in (sizes.D, sizes.value_dim))
    block = sizes.B * sizes.K * (sizes.D + sizes.value_dim) * tokens
    size, rows = element_bytes(sizes.dtype), 2 * 4 * sizes.B * sizes.H * tokens
    slots = min(2, P - 1) * block * size
    if not backward:
        return AttentionWork(slots, 0, 4 * out + rows if P > 1 else 0)
    gradients = block * 4 * (3 if P > 1 else 1)
    delta = (12 if size < 4 else 4) * out  # for float32, only dO·out is new memory
    if P > 1:
        largest = max(4 * query, (4 + size) * query - block * 4, delta - gradients)
    else:  # dq is written in its dtype at once, and dK and dV are copied
        largest = max(size * (query + (block if size < 4 else 0)), delta - gradients)
    return AttentionWork(slots, gradients, largest + rows)


def saved_bytes(
    model: Model, tokens: int, dtype: str = "bfloat16", recomputation: str = "none", tp: int = 1
) -> int:
    """Return the bytes that ONE layer keeps from its forward for its backward.

    Derivation, elements per token: input of the attention norm and of the feed-forward norm, d each;
    their outputs, d each, which the matrices' gradients need; q and the attention's output, H·D
    each; k and v, K·D each; in the feed-forward d_ff for each of its matrices (gate, up and their
    product; or before and after the activation). Besides, lse: H float32. Softmax probabilities
    are not kept: the backward computes them from lse.
    "selective" computes attention again and keeps neither its output nor lse; "full" keeps the layer's input only.
    Tensor parallelism of degree `tp` divides heads and d_ff; the four tensors of width d stay whole.
    Raises: CostError for an unknown recomputation, or a degree that does not divide the heads.
    """
    check_recomputation(recomputation)
    check_tp(model, tp)
    size = element_bytes(dtype)
    if recomputation == "full":
        return tokens * model.d_model * size
    heads = model.H * model.D + 2 * max(model.K // tp, 1) * tp * model.D
    split = heads + model.ffn_matrices * model.d_ff
    statistics = 0
    if recomputation == "none":
        split += model.H * model.D
        statistics = 4 * model.H // tp
    return tokens * (4 * model.d_model * size + -(-split * size // tp) + statistics)


def layer_gradient_bytes(model: Model, tokens: int, dtype: str = "bfloat16", tp: int = 1) -> int:
    """Return the most bytes of gradients of activations at once, in the backward of ONE layer.

    Derivation, elements per token: the residual stream's gradient, d; and either the feed-forward's,
    d_ff for each of its matrices (gate, up and their product; or before and after the activation),
    or attention's, of out and q H·D each and of k and v K·D each. Only one of the two counts, since they
    follow each other. Tensor parallelism of degree `tp` divides all parts except the residual stream's.
    Raises: CostError for a degree that does not divide the heads.
    """
    check_tp(model, tp)
    key_heads = max(model.K // tp, 1) * tp
    split = max(model.ffn_matrices * model.d_ff, 2 * (model.H + key_heads) * model.D)
    return tokens * (model.d_model - (-split // tp)) * element_bytes(dtype)


def logits_bytes(model: Model, tokens: int, dtype: str = "float32", tp: int = 1) -> int:
    """Return the bytes of the logits of `tokens` tokens; `loss_bytes` adds the other tensors of a training loss."""
    return tokens * -(-model.vocabulary // tp) * element_bytes(dtype)


def loss_bytes(model: Model, tokens: int, dtype: str = "bfloat16", tp: int = 1) -> int:
    """Return the most bytes that the loss of `tokens` tokens holds at once, including its logits in `dtype`.

    Derivation, in numbers per token and word: the caller holds the logits in `dtype`. In float32 the backward
    holds at least three more numbers at once: the log-softmax, its gradient, and the gradient of the logits.
    The sum is 14 bytes in bfloat16 and 16 in float32. Tensor parallelism of degree `tp` divides the words.
    """
    wide = max(4, element_bytes(dtype))
    return tokens * -(-model.vocabulary // tp) * (element_bytes(dtype) + 3 * wide)


def kv_cache_bytes(model: Model, tokens: int, dtype: str = "bfloat16", B: int = 1) -> int:
    """Return the bytes of K AND V of all layers: 2·layers·K·D·e per token. 70B, 1M tokens, bf16: 327.68 GB."""
    return 2 * B * model.layers * model.K * model.D * element_bytes(dtype) * tokens


def parameter_bytes(model: Weights, dtype: str = "bfloat16", fsdp: int = 1, tp: int = 1) -> int:
    """Return the bytes of the weights on one rank, sharded over `fsdp` · `tp` ranks, rounded up.

    Raises: CostError for a degree below one.
    """
    return _shared(model.parameters * element_bytes(dtype), fsdp, tp)


def gradient_bytes(model: Weights, dtype: str = "float32", fsdp: int = 1, tp: int = 1) -> int:
    """Return the bytes of the weights' gradients on one rank, kept in `dtype`.

    Raises: as `parameter_bytes`.
    """
    return _shared(model.parameters * element_bytes(dtype), fsdp, tp)


def optimizer_bytes(model: Weights, dtype: str = "bfloat16", fsdp: int = 1, tp: int = 1) -> int:
    """Return the bytes of Adam's state on one rank: two float32 moments per weight.

    Weights narrower than float32 also have a float32 master copy: 12 bytes per weight, not 8.
    Raises: as `parameter_bytes`.
    """
    master = 4 if element_bytes(dtype) < 4 else 0
    return _shared(model.parameters * (4 + 4 + master), fsdp, tp)


def gathered_bytes(model: Model, dtype: str = "bfloat16", fsdp: int = 1, tp: int = 1) -> int:
    """Return the bytes that FSDP gathers to compute one layer: all its weights, and their whole gradient.

    The result is 0 without FSDP (degree 1).
    Raises: CostError for a degree below one.
    """
    _check_degrees(fsdp, tp)
    return 0 if fsdp == 1 else -(-2 * model.layer_matrix_parameters * element_bytes(dtype) // tp)


def state_bytes(
    model: Model, dtype: str = "bfloat16", gradient_dtype: str = "float32", fsdp: int = 1, tp: int = 1
) -> int:
    """Return the bytes of weights, gradients, optimizer and one gathered layer on one rank.

    Raises: CostError for a degree below one.
    """
    return (
        parameter_bytes(model, dtype, fsdp, tp)
        + gradient_bytes(model, gradient_dtype, fsdp, tp)
        + optimizer_bytes(model, dtype, fsdp, tp)
        + gathered_bytes(model, dtype, fsdp, tp)
    )


def check_tp(model: Model, tp: int) -> None:
    """Check a tensor-parallel degree. Raises: CostError if the heads of the model do not allow the degree."""
    _check_degrees(1, tp)
    if model.H % tp or (model.K % tp and tp % model.K):
        raise CostError(
            f"a tensor-parallel degree that divides the {model.H} query heads of {model.name}, and "
            f"divides its {model.K} key/value heads or is a multiple of them",
            f"{tp}",
        )


def _shared(whole: int, fsdp: int, tp: int) -> int:
    _check_degrees(fsdp, tp)
    return -(-whole // (fsdp * tp))


def _check_degrees(fsdp: int, tp: int) -> None:
    for name, degree in (("FSDP", fsdp), ("tensor-parallel", tp)):
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise CostError(f"{name} degree >= 1, an integer", f"{degree!r}")

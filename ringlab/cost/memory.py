"""Bytes that a rank holds: attention's blocks, activations kept for the backward, KV cache, and the model's state.

Tokens are those of one rank (S/P under ring attention). e is the number of bytes of an element. All figures
are counted, not measured: allocators round up, and kernels take workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ringlab.cost.flops import check_recomputation
from ringlab.cost.models import Layer, Model
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.errors import CostError


class Weights(Protocol):
    """A model or a part of a model, of which only the number of weights matters."""

    def rank_parameters(self, tp: int) -> int:
        """Return the number of weights on one of `tp` ranks, without those of experts."""
        ...

    @property
    def expert_parameters(self) -> int:
        """Return the number of the experts' weights."""
        ...


ATTENTION_KINDS = ("ring", "allgather", "blockwise", "materialised")


def attention_bytes(sizes: Attention, tokens: int, P: int = 1, kind: str = "ring") -> int:
    """Return the bytes of one layer's attention forward on a rank of `tokens` tokens, S = P · tokens.

    Derivation, with c = tokens, h = H·D and g = K·D, if v has the head dim of q and k:
    q and out are c·h each, K and V c·g each. The ring adds the K and V that are arriving:
    (2h + 4g)·b·c·e, independent of S; with K = H six blocks, 6·b·c·h elements. (arXiv 2310.01889
    prints 6·b·c·h bytes, but 2·b·s·h bytes for ONE bfloat16 tensor: six are 12·b·c·h.)
    Six blocks are that paper's count. The ring of this package, measured in bfloat16 with K = H, D = 128 and
    P >= 3, takes 7.05 blocks besides its own q, k and v, which makes ten in all: see `attention_work`.
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
        raise CostError(f"one of the kinds {', '.join(ATTENTION_KINDS)}", repr(kind))
    return (rows + block + extra[kind]) * element_bytes(sizes.dtype)


@dataclass(frozen=True)
class AttentionWork:
    """Temporary bytes of attention, besides q, k, v, out and lse, at their peak.

    slots: bytes of the K/V of other ranks. gradients: bytes of dK and dV in float32. accumulators: bytes of
    float32 sums. made: bytes of the K and V that are made from the latent of one block, and of their gradients.
    """

    slots: int
    gradients: int
    accumulators: int
    made: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of slots, gradients, accumulators and `made` together."""
        return self.slots + self.gradients + self.accumulators + self.made


def attention_work(sizes: Attention, tokens: int, P: int, backward: bool = False) -> AttentionWork:
    """Return the temporary bytes of one layer's attention on a rank of `tokens` tokens in this package's ring.

    Derivation, a block being K and V of one rank:
    Both passes have two slots for arriving blocks, one in use and one being filled; with P = 2 one slot is
    enough. The forward has out's float32 accumulator and two numbers for each row, until out is written
    beside them. The backward has dK and dV in float32 three times: their sum so far, the arriving sum, and
    the current block's share. In addition it has dq in float32; or, if one of the following is larger: dq in
    both dtypes, at the last step, when no sum remains to be added; or dout, out and their product in
    float32, whose rows add up to delta, at the beginning, before there are gradients. `simulate` measures
    the same bytes on the program itself, and a test compares the two results.
    If a latent travels, blocks and their gradients are those of the latent, and K and V of the block at work are
    made from it: H·(D + Dv) numbers for each token and, in the backward, their gradients in float32.
    """
    query, out = (sizes.B * sizes.H * dim * tokens for dim in (sizes.D, sizes.value_dim))
    block = sizes.travelling * tokens
    size, rows = element_bytes(sizes.dtype), 2 * 4 * sizes.B * sizes.H * tokens
    slots = min(2, P - 1) * block * size
    made = (query + out) * (size + 4 * backward) if sizes.latent else 0
    if not backward:
        return AttentionWork(slots, 0, 4 * out + rows if P > 1 else 0, made)
    gradients = block * 4 * (3 if P > 1 else 1)
    delta = (12 if size < 4 else 4) * out  # for float32, only dO·out is new memory
    if P > 1:
        largest = max(4 * query, (4 + size) * query - block * 4, delta - gradients)
    else:  # dq is written in its dtype at once, and dK and dV are copied
        largest = max(size * (query + (block if size < 4 else 0)), delta - gradients)
    return AttentionWork(slots, gradients, largest + rows, made)


def saved_bytes(
    model: Model | Layer,
    tokens: int,
    dtype: str = "bfloat16",
    recomputation: str = "none",
    tp: int = 1,
    tiled: bool = False,
) -> int:
    """Return the bytes that ONE layer keeps for its backward; for a model, the layer that keeps most counts.

    Derivation, elements per token: input of the attention norm and of the feed-forward norm, d each;
    their outputs, d each, which the matrices' gradients need; q and the attention's output, H·D
    each; k and v, K·D each; in the feed-forward d_ff for each tensor inside it (gate, up and their
    product; or the values before and after the activation function). In addition, lse has H float32
    numbers. Softmax probabilities are not kept: the backward computes them from lse.
    An output gate adds the gate and the gated output. A latent is kept twice, before and after its norm, and so
    are the numbers from which q is made. k and v are then kept only if they travel. A gated delta rule keeps q,
    k and v before and after the convolution, the gate, the output and the gated output, and two float32 numbers
    of each head.
    A token's experts keep their inputs and outputs, d each, and d_ff for each matrix; the router keeps a float32
    number of each expert. Balanced routing is assumed: a rank gets as many tokens as it sends.
    "selective" computes attention again and keeps neither its output nor lse; "full" keeps the layer's input only.
    tiled: the feed-forward keeps its input only, because its backward computes it again, some tokens at a time.
    Tensor parallelism of degree `tp` divides heads and d_ff; the tensors of width d and latents stay whole.
    Raises: CostError for an unknown recomputation, or a degree that does not divide the heads.
    """
    check_recomputation(recomputation)
    if isinstance(model, Model):
        check_tp(model, tp)
        return max(saved_bytes(it, tokens, dtype, recomputation, tp, tiled) for it in model.kinds)
    size = element_bytes(dtype)
    if recomputation == "full":
        return tokens * model.d_model * size
    whole, split, statistics = _kept_mixer(model, tp, recomputation)
    if not tiled:
        more, within = _kept_feed_forward(model)
        whole, split, statistics = whole + more, split + within, statistics + 4 * (model.experts or 0)
    return tokens * ((4 * model.d_model + whole) * size + -(-split * size // tp) + statistics)


def _kept_feed_forward(it: Layer) -> tuple[int, int]:
    """Return the elements that the feed-forward keeps for a token: whole ones, and those that tp splits."""
    experts = it.active_experts or 0
    return 2 * experts * it.d_model, it.ffn_matrices * ((experts or 1) * it.d_ff + (it.shared_d_ff or 0))


def feed_forward_bytes(it: Layer, tokens: int, dtype: str = "bfloat16", tp: int = 1) -> int:
    """Return the bytes inside the feed-forward of `tokens` tokens: what its backward needs, besides its input.

    A token has d_ff elements for each matrix, and d twice for each of its experts, as in `saved_bytes`.
    """
    whole, split = _kept_feed_forward(it)
    return tokens * ((whole - (-split // tp)) * element_bytes(dtype) + 4 * (it.experts or 0))


def _kept_mixer(it: Layer, tp: int, recomputation: str) -> tuple[int, int, int]:
    """Return what attention keeps for a token: elements that are whole on a tp rank, elements split by tp, other bytes."""
    q, out = it.H * it.D, it.H * it.value_dim
    if it.linear:
        mixed = 2 * it.K * it.kv_copies(tp) * it.D + out
        again = 0 if recomputation == "selective" else out
        return 0, 2 * mixed + 2 * out + again, 2 * 4 * it.H // tp
    whole = 2 * (it.latent_numbers + (it.q_latent or 0))
    split = q + (0 if it.latent else it.K * it.kv_copies(tp) * (it.D + it.value_dim))
    split += 2 * q if it.output_gate else 0
    if recomputation == "none":
        return whole, split + out, 4 * it.H // tp
    return whole, split, 0


def layer_gradient_bytes(
    model: Model | Layer, tokens: int, dtype: str = "bfloat16", tp: int = 1, fed: int | None = None
) -> int:
    """Return the peak bytes of the activations' gradients in the backward of a layer, or of a model's largest layer.

    Derivation, elements per token: d for the residual stream, and the larger of two parts, since one follows
    the other.

    - The feed-forward has d_ff for each tensor inside it (gate, up and their product; or the values before and
      after the activation function). A token's experts also have d twice, for their inputs and outputs.
    - Attention has H·D each for out and q, and K·D each for k and v. If K and V are made from a latent, the
      latent counts instead, as `attention_work` counts K and V. A gated delta rule has q, k, v, the gate and
      the output.

    Tensor parallelism of degree `tp` divides all but the residual stream. fed: the tokens whose feed-forward is
    computed at once, all of them if None.
    Raises: CostError for a degree that does not divide the heads.
    """
    if isinstance(model, Model):
        check_tp(model, tp)
        return max(layer_gradient_bytes(it, tokens, dtype, tp, fed) for it in model.kinds)
    it = model
    rows = it.H * (it.D + it.value_dim)
    if it.linear:
        mixer = 2 * it.K * it.kv_copies(tp) * it.D + 3 * it.H * it.value_dim
    else:
        keys = it.latent * tp if it.latent else it.K * it.kv_copies(tp) * (it.D + it.value_dim)
        mixer = rows + keys
    whole, split = _kept_feed_forward(it)
    within = max(-(-(split + whole * tp) // tp) * min(tokens, fed or tokens), -(-mixer // tp) * tokens)
    return (tokens * it.d_model + within) * element_bytes(dtype)


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


def kv_cache_bytes(
    model: Model,
    tokens: int,
    dtype: str = "bfloat16",
    B: int = 1,
    parts: int = 1,
    tp: int = 1,
    ulysses: int = 1,
) -> int:
    """Return the bytes of K AND V of all layers: 2·layers·K·D·e per token. 70B, 1M tokens, bf16: 327.68 GB.

    parts, tp: the numbers of ranks that divide the tokens and the heads; the result is the bytes of one
    rank. ulysses: how many of the parts exchange tokens for heads. A rank has whole K/V heads, so if more ranks
    than heads share them, several ranks have the same head. A layer with a window caches only its tokens.
    A latent is cached in place of K and V, whole on each of the tp ranks. A gated delta rule has a float32
    state of H·D·Dv numbers in place of a cache, and the last tokens of its convolution, whole on each part.
    """
    return sum(_layer_cache_bytes(it, tokens, dtype, B, parts, tp, ulysses) for it in model.kinds)


def _layer_cache_bytes(it: Layer, tokens: int, dtype: str, B: int, parts: int, tp: int, ulysses: int) -> int:
    size = element_bytes(dtype)
    if it.linear:
        state = 4 * it.H * it.D * it.value_dim
        mixed = (
            (2 * it.K * it.kv_copies(tp) * it.D + it.H * it.value_dim) * ((it.convolution or 1) - 1) * size
        )
        return it.layers * -(-B * (state + mixed) // tp)
    held = -(-min(tokens, it.window or tokens) // parts)
    if it.latent:
        return it.layers * B * it.latent * size * held
    heads = it.K * it.kv_copies(tp * ulysses)
    return -(-it.layers * B * heads * (it.D + it.value_dim) * size * held // tp)


def parameter_bytes(model: Weights, dtype: str = "bfloat16", fsdp: int = 1, tp: int = 1, ep: int = 1) -> int:
    """Return the bytes of the weights on one rank, sharded over `fsdp` · `tp` ranks, rounded up.

    A rank of tensor parallelism has whole K/V heads, latents, routers, words and norms, so `tp` shares may be more than
    the weights. With expert parallelism of degree `ep` above `fsdp`, `ep` · `tp` ranks share the experts.
    Raises: CostError for a degree below one.
    """
    return _shared(model, element_bytes(dtype), fsdp, tp, ep)


def gradient_bytes(model: Weights, dtype: str = "float32", fsdp: int = 1, tp: int = 1, ep: int = 1) -> int:
    """Return the bytes of the weights' gradients on one rank, kept in `dtype`, sharded as the weights.

    Raises: as `parameter_bytes`.
    """
    return _shared(model, element_bytes(dtype), fsdp, tp, ep)


def optimizer_bytes(model: Weights, dtype: str = "bfloat16", fsdp: int = 1, tp: int = 1, ep: int = 1) -> int:
    """Return the bytes of Adam's state on one rank: two float32 moments per weight, sharded as the weights.

    Weights narrower than float32 also have a float32 master copy: 12 bytes per weight, not 8.
    Raises: as `parameter_bytes`.
    """
    master = 4 if element_bytes(dtype) < 4 else 0
    return _shared(model, 4 + 4 + master, fsdp, tp, ep)


def gathered_bytes(model: Model, dtype: str = "bfloat16", fsdp: int = 1, tp: int = 1, ep: int = 1) -> int:
    """Return the bytes that FSDP gathers to compute the largest layer: its weights and their whole gradient.

    The result is 0 without FSDP (degree 1). With expert parallelism a rank gathers only its own experts, and
    none if `ep` is at least `fsdp`, because then it holds its experts whole.
    Raises: CostError for a degree below one.
    """
    _check_degrees(fsdp, tp, ep)
    largest = max(it.gathered_parameters(fsdp, ep, tp) for it in model.kinds)
    return 0 if fsdp == 1 else 2 * largest * element_bytes(dtype)


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
    for it in model.kinds:
        if it.H % tp or (it.dealt_heads % tp and tp % it.dealt_heads):
            raise CostError(
                f"a tensor-parallel degree that divides the {it.H} query heads of {model.name}, and "
                f"divides its {it.dealt_heads} key/value heads or is a multiple of them",
                f"{tp}",
            )


def _shared(model: Weights, bytes_each: int, fsdp: int, tp: int, ep: int) -> int:
    _check_degrees(fsdp, tp, ep)
    experts = model.expert_parameters if ep > fsdp else 0
    rest = model.rank_parameters(tp) * tp + model.expert_parameters - experts
    return -(-rest * bytes_each // (fsdp * tp)) - (-experts * bytes_each // (ep * tp))


def _check_degrees(fsdp: int, tp: int, ep: int = 1) -> None:
    for name, degree in (("FSDP", fsdp), ("tensor-parallel", tp), ("expert-parallel", ep)):
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise CostError(f"{name} degree >= 1, an integer", f"{degree!r}")

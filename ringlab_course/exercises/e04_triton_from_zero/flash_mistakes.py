"""Exercise 04: the plainest flash forward over padded buffers, and imitations of common mistakes in it.

Imitations have the arguments of the learner's function, (q, k, v, out, lse, S, shift, block_m, block_n).
shift is None if nothing is masked. Imitations return the first S rows of out or of lse. A block contains
block_m packed query rows of one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Imitation = Callable[..., Tensor]


def visible_pairs(S: int, shift: int | None) -> Tensor:
    """Return which query row sees which key: j <= i + shift, or all keys if shift is None."""
    rows, keys = torch.arange(S)[:, None], torch.arange(S)
    return keys <= rows + (S if shift is None else shift)


def shared(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for the query heads that share it. Neighbouring query heads share a key head."""
    return x.repeat_interleave(heads // len(x), dim=0)


def blocks_of(q: Tensor, k: Tensor, S: int, m: int) -> Tensor:
    """Return the number of the block that computes each token of each head, (H, S, 1)."""
    group = len(q) // len(k)
    heads, tokens = torch.arange(len(q))[:, None, None], torch.arange(S)[:, None]
    return (tokens * group + heads % group) // m


def end_of(block: Tensor, group: int, m: int) -> Tensor:
    """Return the token after the last token of a block, as if tokens went on after S − 1."""
    return ((block + 1) * m - 1) // group + 1


def scores_of(q: Tensor, k: Tensor, S: int, shift: int | None) -> Tensor:
    """Return the scores (H, S, S) in float32, −inf where a key is hidden."""
    q, k = q[:, :S].float(), shared(k, len(q))[:, :S].float()
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible_pairs(S, shift), -math.inf)


def values_of(q: Tensor, v: Tensor, S: int) -> Tensor:
    """Return the values that each query head reads, (H, S, D), in float32."""
    return shared(v, len(q))[:, :S].float()


def weights_of(scores: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return e^(s − m), rounded to dtype, and the sum in float32. Both are 0 in a row that sees no key."""
    maximum = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - torch.where(maximum == -math.inf, 0.0, maximum))
    return powers.to(dtype).float(), powers.sum(-1, keepdim=True)


def attend(scores: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return out for the given scores. out is 0 in a row that sees no key."""
    powers, total = weights_of(scores, dtype)
    return powers @ v.float() / torch.where(total == 0, 1.0, total)


def plain(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: int | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) with sums in float32.

    The weights are rounded to v's dtype before they multiply v, because a matrix unit needs them in this
    dtype.
    """
    scores = scores_of(q, k, S, shift)
    return attend(scores, values_of(q, v, S), v.dtype).to(out.dtype), torch.logsumexp(scores, -1)


def changed(change: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out with scores replaced by `change(scores, S, shift, block_m, block_n)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        return attend(change(scores_of(q, k, S, shift), S, shift, m, n), values_of(q, v, S))

    return imitate


def masked(see: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out with the mask `see(rows, keys, S, shift, m, n, block, group)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        if shift is None:
            raise ValueError("there is no mask here")
        rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
        seen = see(rows, keys, S, shift, m, n, blocks_of(q, k, S, m), len(q) // len(k))
        return attend(scores_of(q, k, S, None).masked_fill(~seen, -math.inf), values_of(q, v, S))

    return imitate


def up_to(stop: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out in which the loop over keys ends at key `stop(block, shift, m, n, group)`.

    The mask is right.
    """

    def see(
        rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
    ) -> Tensor:
        tiles = -(-stop(block, shift, m, n, group) // n)
        return (keys <= rows + shift) & (keys < tiles * n)

    return masked(see)


def by_packed_row(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return a mask that compares keys with rows of the packed matrix instead of tokens."""
    return keys <= _packed(rows, block, group) + shift


def by_packed_row_in_seen_tiles(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return the mask of `by_packed_row` in a loop that ends at the right tile."""
    seen = by_packed_row(rows, keys, S, shift, m, n, block, group)
    return seen & (keys < -(-(end_of(block, group, m) + shift) // n) * n)


def within_the_tile(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return a mask that compares places inside the tile instead of tokens."""
    return keys % n <= _packed(rows, block, group) % m + shift


def shift_backwards(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return a mask that is shifted in the wrong direction, in a loop that ends at the right tile."""
    return (keys <= rows - shift) & (keys < -(-(end_of(block, group, m) + shift) // n) * n)


def _packed(rows: Tensor, block: Tensor, group: int) -> Tensor:
    """Return the packed row of each of the tokens `rows`, for every head, (H, S, 1)."""
    return rows * group + torch.arange(len(block))[:, None, None] % group


def streamed(step: Callable[..., tuple[Tensor, Tensor, Tensor]], *, divide: bool = True) -> Imitation:
    """Return the imitation of out that applies `step(m, total, acc, scores, values)` to each tile in turn."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        scores, values = scores_of(q, k, S, shift), values_of(q, v, S)
        state = (
            torch.full(scores.shape[:-1], -math.inf),
            torch.zeros(scores.shape[:-1]),
            torch.zeros_like(values),
        )
        for first in range(0, S, n):
            state = step(*state, scores[..., first : first + n], values[:, first : first + n])
        return state[2] / state[1][..., None] if divide else state[2]

    return imitate


def rescaled(*, total: bool, acc: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a step that, when the maximum grows, rescales only the sums named by `total` and `acc`."""

    def step(
        m: Tensor, old_total: Tensor, old_acc: Tensor, scores: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        new, powers = _tile(m, scores)
        factor = torch.exp(m - new)
        kept = old_total * factor if total else old_total, old_acc * factor[..., None] if acc else old_acc
        return new, kept[0] + powers.sum(-1), kept[1] + powers @ values

    return step


def divided_each_time(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the accumulator by the sum in every tile, but go on as if it were not divided."""
    new, powers = _tile(m, scores)
    factor = torch.exp(m - new)
    total = total * factor + powers.sum(-1)
    return new, total, (acc * factor[..., None] + powers @ values) / total[..., None]


def maximum_of_the_tile(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the maximum of the tile as the new maximum, and ignore the old one."""
    new, powers = _tile(torch.full_like(m, -math.inf), scores)
    factor = torch.exp(m - new)
    return new, total * factor + powers.sum(-1), acc * factor[..., None] + powers @ values


def _tile(m: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.maximum(m, scores.amax(-1))
    return new, torch.exp(scores - new[..., None])


def not_transposed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that multiplies q by tiles of k without transposing them; the tiles must be square."""
    if n != q.shape[-1]:
        raise ValueError("tiles that are not square cannot be multiplied untransposed")
    keys = torch.nn.functional.pad(values_of(q, k, S), (0, 0, 0, -S % n)).unflatten(1, (-1, n))
    scores = torch.einsum("hsd,htde->hste", q[:, :S].float(), keys).flatten(2)[..., :S] * n**-0.5
    return attend(scores.masked_fill(~visible_pairs(S, shift), -math.inf), values_of(q, v, S))


def tail_dropped(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that visits only whole tiles of keys."""
    keys = S // n * n
    if keys == 0:
        return torch.full_like(out[:, :S], math.nan).float()
    return attend(scores_of(q, k, S, shift)[..., :keys], values_of(q, v, keys))


def padding_counted(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that counts padding after the last key as keys with score 0.

    A causal mask may hide the padding.
    """
    missing = -S % n
    scores = torch.nn.functional.pad(scores_of(q, k, S, shift), (0, missing))
    scores = scores.masked_fill(~visible_pairs(S + missing, shift)[:S], -math.inf)
    return attend(scores, torch.nn.functional.pad(values_of(q, v, S), (0, 0, 0, missing)))


def padding_read(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that reads numbers after the last key as keys.

    A causal mask may hide them.
    """
    if v[:, S:].isnan().any():
        raise ValueError("NaN in V reveals loads, and does not imitate counted keys")
    whole = S + -S % n
    return attend(scores_of(q, k, whole, shift)[:, :S], values_of(q, v, whole))


def in_half(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that sums weights times values in float16, which overflows before the division."""
    if v.dtype != torch.float16:  # nothing overflows
        return plain(q, k, v, out, lse, S, shift)[0].float()
    powers, total = weights_of(scores_of(q, k, S, shift), v.dtype)
    return (powers @ values_of(q, v, S)).half().float() / total


def blind_rows_nan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that computes −inf − (−inf) in rows that see no key."""
    return torch.softmax(scores_of(q, k, S, shift), -1) @ values_of(q, v, S)


def visited_blind_rows_nan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that computes −inf − (−inf) in rows that see no key.

    Blocks that visit no tile are an exception: their sum is 0, and the kernel guards the division by it.
    """
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    end = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S) + shift
    return torch.where((torch.arange(S)[:, None] + shift < 0) & (end > 0), math.nan, right)


def hidden_is_finite(unvisited: float) -> Imitation:
    """Return the imitation of out that uses a large finite number in place of −inf.

    A row that sees no key then averages the values of all lanes that its block visits, including lanes after
    the last key. If its block visits no lane, the row is `unvisited`.
    """

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        if shift is None:
            raise ValueError("there is no mask here")
        right, values = plain(q, k, v, out, lse, S, shift)[0].float(), values_of(q, v, S)
        end = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S)
        lanes = -(-(end + shift).clamp(min=0) // n) * n
        sums = torch.nn.functional.pad(values.cumsum(1), (0, 0, 1, 0))
        mean = sums.gather(1, lanes.clamp(max=S).expand_as(values)) / lanes
        blind = torch.arange(S)[:, None] + shift < 0
        return torch.where(blind, torch.where(lanes > 0, mean, unvisited), right)

    return imitate


def blind_blocks_unwritten(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that does not write the blocks of queries that see no key."""
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    blind = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S) + shift <= 0
    return torch.where(blind, out[:, :S].float(), right)


def no_maximum(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that takes exp of the scores without subtracting a maximum."""
    powers = torch.exp(scores_of(q, k, S, shift))
    return powers @ values_of(q, v, S) / powers.sum(-1, keepdim=True)


def no_other(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate loads of V without `other`.

    Undefined lanes, here NaN, reach every row that visits the last tile.
    """
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    end = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S) + (S if shift is None else shift)
    return torch.where((end > S // n * n) & (S % n > 0), math.nan, right)


def junk_times_zero(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate unmasked loads of V: NaN after V's last row reaches every row that visits the last tile."""
    if not v[:, S:].isnan().any():
        return plain(q, k, v, out, lse, S, shift)[0].float()
    return no_other(q, k, v, out, lse, S, shift, m, n)


def base_two(scores: Tensor, *_: Any) -> Tensor:
    """Return scores s' with e^s' = 2^s for the right scores s."""
    return scores * math.log(2)


def no_scale(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that does not multiply by 1/√D."""
    return plain(q.float() * q.shape[-1] ** 0.5, k, v, out.float(), lse, S, shift)[0]


def lse_in_base_two(scores: Tensor) -> Tensor:
    """Return log₂ Σ e^s."""
    return torch.logsumexp(scores, -1) / math.log(2)


def lse_by_log2(scores: Tensor) -> Tensor:
    """Return the maximum plus the logarithm of the sum in base 2, instead of the natural logarithm."""
    maximum = scores.amax(-1)
    return maximum + (torch.logsumexp(scores, -1) - maximum) / math.log(2)


def lse_is_the_maximum(scores: Tensor) -> Tensor:
    """Return the maximum m in place of lse."""
    return scores.amax(-1)


def lse_without_maximum(scores: Tensor) -> Tensor:
    """Return the logarithm of Σ e^(s − m), without adding m."""
    return torch.logsumexp(scores, -1) - scores.amax(-1)


def lse_of(change: Callable[[Tensor], Tensor]) -> Imitation:
    """Return the imitation of lse that computes `change(scores)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, *_: int
    ) -> Tensor:
        return change(scores_of(q, k, S, shift))

    return imitate

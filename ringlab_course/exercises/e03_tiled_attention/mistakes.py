"""Common mistakes in the tiled forward and backward: each function answers as a learner who makes the mistake.

Each is a walk over the tiles with one small fault. Arguments are those of exercise 03; inputs are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringlab.merge import Partial, merge

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
Visit: TypeAlias = Callable[[slice, slice, int], bool]
"""Whether the query tile `rows` visits the key tile `keys`, if query 0 is at position `start`."""
Mask: TypeAlias = Callable[[slice, slice, int], Tensor]
"""The hidden pairs of a tile, True for hidden, with the arguments of `Visit`."""
Part: TypeAlias = Callable[[int, int, int], tuple[int, int]]
"""How many of M queries and N keys count, from (M, N, tile): the first ones."""


def cuts(length: int, tile: int) -> list[slice]:
    """Return the tiles of `length` tokens as slices, the last one shorter when `tile` does not divide it."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def visible(rows: slice, keys: slice, start: int) -> bool:
    """Return whether any query of the tile sees any of its keys."""
    return keys.start < rows.stop + start


def everything(rows: slice, keys: slice, start: int) -> bool:
    """The mistake: hidden tiles are visited too."""
    return True


def without_start(rows: slice, keys: slice, start: int) -> bool:
    """The mistake: the end of the visible keys as if query 0 were at position 0."""
    return keys.start < rows.stop


def only_before(offset: bool) -> Visit:
    """The mistake: of a key tile, the query tiles that begin at or before it; `offset` counts from the corner."""
    return lambda rows, keys, start: rows.start <= keys.start - (0 if offset else start)


def to_the_first_query(rows: slice, keys: slice, start: int) -> bool:
    """The mistake: the visible keys end with those of the tile's first query."""
    return keys.start <= rows.start + start


def hidden(rows: slice, keys: slice, start: int) -> Tensor:
    """Return where the key's position is after the query's."""
    queries = torch.arange(rows.start, rows.stop).unsqueeze(-1) + start
    return torch.arange(keys.start, keys.stop) > queries


def hidden_from_the_corner(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: query i sees keys 0 to i."""
    return hidden(rows, keys, 0)


def hidden_locally(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: positions are counted inside the tile."""
    return hidden(slice(0, rows.stop - rows.start), slice(0, keys.stop - keys.start), 0)


def hidden_with_itself(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: a query does not see its own token."""
    return hidden(rows, keys, start - 1)


def hidden_with_the_offset(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: N − M is added to positions that are counted inside the tile."""
    return hidden(slice(0, rows.stop - rows.start), slice(0, keys.stop - keys.start), start)


def hidden_where_they_meet(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: only a tile whose first key is at the token of its first query is masked."""
    return (
        hidden(rows, keys, start) if keys.start == rows.start + start else nothing_hidden(rows, keys, start)
    )


def hidden_where_indices_meet(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: only a tile whose first key has the index of its first query is masked."""
    return hidden(rows, keys, start) if keys.start == rows.start else nothing_hidden(rows, keys, start)


def in_cut_tiles(mask: Mask) -> Mask:
    """Return `mask` in the tiles that hold hidden pairs, and nothing hidden in the others."""

    def chosen(rows: slice, keys: slice, start: int) -> Tensor:
        cut = keys.stop - 1 > rows.start + start
        return (mask if cut else nothing_hidden)(rows, keys, start)

    return chosen


def nothing_hidden(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: no tile is masked."""
    return torch.zeros(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool)


def hidden_if_cut(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: tiles that hold no visible pair are seen whole."""
    seen = visible(rows, keys, start)
    return hidden(rows, keys, start) if seen else nothing_hidden(rows, keys, start)


def hidden_in_the_last(rows: slice, keys: slice, start: int) -> Tensor:
    """The mistake: only the last tile that a query tile visits is masked, though the one before may be cut too."""
    last = rows.stop + start <= keys.stop
    return hidden(rows, keys, start) if last else nothing_hidden(rows, keys, start)


def shared(x: Tensor, heads: int) -> Tensor:
    """Return the key/value head of every query head: neighbours share."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def dealt(x: Tensor, heads: int) -> Tensor:
    """The mistake: query head h reads key/value head h mod K."""
    return x.repeat(1, heads // x.shape[1], 1, 1)


def tiles_of(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    scale: float,
    tile: int,
    visit: Visit = visible,
    mask: Mask = hidden,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield every visited tile, row of tiles by row of tiles: its queries, its keys, its masked scores."""
    M, N = q.shape[-2], k.shape[-2]
    for rows in cuts(M, tile):
        for keys in cuts(N, tile):
            if causal and not visit(rows, keys, N - M):
                continue
            scores = scale * (q[..., rows, :] @ k[..., keys, :].mT)
            if causal:
                scores = scores.masked_fill(mask(rows, keys, N - M), -math.inf)
            yield rows, keys, scores


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rescale: bool = True,
    rescale_acc: bool = True,
    subtract: bool = True,
    guard: bool = False,
    share: Callable[[Tensor, int], Tensor] = shared,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by a running maximum m, sum l and accumulator acc; faults by keyword.

    With `guard`, a row that has seen nothing stays at (0, −inf).
    """
    k, v = share(k, q.shape[1]), share(v, q.shape[1])
    m, total, acc = torch.full_like(q[..., 0], -math.inf), torch.zeros_like(q[..., 0]), torch.zeros_like(q)
    for rows, keys, scores in tiles_of(q, k, **how):
        top = torch.maximum(m[..., rows], scores.amax(-1)) if subtract else torch.zeros_like(m[..., rows])
        if guard:
            top = top.masked_fill(top == -math.inf, 0.0)
        powers = torch.exp(scores - top.unsqueeze(-1))
        old = torch.exp(m[..., rows] - top) if rescale and subtract else torch.ones_like(top)
        total[..., rows] = total[..., rows] * old + powers.sum(-1)
        acc[..., rows, :] *= old.unsqueeze(-1) if rescale_acc else 1.0
        acc[..., rows, :] += powers @ v[..., keys, :]
        m[..., rows] = top
    shares = total.masked_fill(total == 0, 1.0) if guard else total
    return acc / shares.unsqueeze(-1), m + torch.log(total)


def merged_with(part: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the forward that merges every tile's (out, lse); `part` makes (weights, lse) of a tile's scores."""

    def answer(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        k, v = shared(k, q.shape[1]), shared(v, q.shape[1])
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        for rows, keys, scores in tiles_of(q, k, **how):
            weights, new = part(scores)
            state = merge(Partial(out[..., rows, :], lse[..., rows]), Partial(weights @ v[..., keys, :], new))
            out[..., rows, :], lse[..., rows] = state.out, state.lse
        return out, lse

    return answer


def with_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """A tile's weights from its lse; a row that sees nothing gets −inf − (−inf), NaN."""
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)), lse


def with_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """A tile's weights from its maximum and sum; a row that sees nothing gets NaN, also as lse."""
    top = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True)
    return powers / total, (top + total.log()).squeeze(-1)


def without_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """A tile's weights and lse from sums of e^score."""
    powers = torch.exp(scores)
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0), total.log().squeeze(-1)


def lse_without_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The lse as the logarithm of a sum of e^score, and weights from that lse."""
    lse = torch.exp(scores).sum(-1).log()
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)), lse


def lse_to_base_two(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """lse is the logarithm to base 2."""
    out, lse = forward(q, k, v, **how)
    return out, lse / math.log(2)


def averages(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Every tile normalised by itself, the results averaged; lse is right."""
    k, v = shared(k, q.shape[1]), shared(v, q.shape[1])
    out, count = torch.zeros_like(q), torch.zeros(q.shape[-2], 1, dtype=q.dtype)
    for rows, keys, scores in tiles_of(q, k, **how):
        out[..., rows, :] += torch.softmax(scores, -1) @ v[..., keys, :]
        count[rows] += 1
    return out / count, forward(q, k, v, **how)[1]


def no_rescale(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """The maximum grows, what was accumulated under the old one stays."""
    return forward(q, k, v, rescale=False, **how)


def acc_not_rescaled(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """The sum follows the growing maximum, the accumulator does not."""
    return forward(q, k, v, rescale_acc=False, **how)


def out_not_rescaled(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Every tile adds e^(score − lse so far) v to out, and out does not follow the growing lse."""
    k, v = shared(k, q.shape[1]), shared(v, q.shape[1])
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for rows, keys, scores in tiles_of(q, k, **how):
        lse[..., rows] = torch.logaddexp(lse[..., rows], scores.logsumexp(-1))
        out[..., rows, :] += torch.exp(scores - lse[..., rows].unsqueeze(-1)) @ v[..., keys, :]
    return out, lse


def no_maximum(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """e^score without subtracting a maximum."""
    return forward(q, k, v, subtract=False, **how)


def forward_with(**faults: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the forward with faults of `forward` or of `tiles_of`."""
    return lambda q, k, v, **how: forward(q, k, v, **{**how, **faults})


def forward_on(part: Part, *, unseen: float = 0.0, guard: bool = False) -> Callable[..., Any]:
    """Return the forward of a part; other queries get out 0 and lse `unseen`."""

    def answer(q: Tensor, k: Tensor, v: Tensor, *, tile: int, **how: Any) -> tuple[Tensor, Tensor]:
        M, N = part(q.shape[-2], k.shape[-2], tile)
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], unseen)
        head = (q[..., :M, :], k[..., :N, :], v[..., :N, :])
        out[..., :M, :], lse[..., :M] = forward(*head, tile=tile, guard=guard, **how)
        return out, lse

    return answer


def own_scale(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """D^−½ whatever `scale` says."""
    return forward(q, k, v, **{**how, "scale": q.shape[-1] ** -0.5})


def forward_first_head(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Every head gets the result of head 0."""
    out, lse = forward(q, k, v, **how)
    return out[:, :1].expand(q.shape), lse[:, :1].expand(lse.shape)


def lse_is_maximum(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """The running maximum is returned as lse, without + ln l."""
    return forward(q, k, v, **how)[0], _largest_score(q, k, **how)


def lse_is_sum(q: Tensor, k: Tensor, v: Tensor, *, ln: bool = False, **how: Any) -> tuple[Tensor, Tensor]:
    """The running sum l, or ln l, is returned as lse, without the maximum."""
    out, lse = forward(q, k, v, **how)
    rest = lse - _largest_score(q, k, **how)
    return out, rest if ln else torch.exp(rest)


def _largest_score(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    whole = max(q.shape[-2], k.shape[-2])
    ((_, _, scores),) = tiles_of(q, shared(k, q.shape[1]), **{**how, "tile": whole})
    return scores.amax(-1)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    tile_lse: bool = False,
    tile_delta: bool = False,
    delta_weight: float = 1.0,
    delta_outside: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    assign: str = "",
    share: Callable[[Tensor, int], Tensor] = shared,
    gather: Callable[[Tensor], Tensor] = lambda heads: heads.sum(2),
    **how: Any,
) -> Gradients:
    """Return (dq, dk, dv) from lse and delta; faults by keyword.

    `assign` names gradients that are set, not added to, in every tile; `gather` makes one gradient of those of the
    query heads that share a key/value head, (B, K, H/K, N, D).
    """
    key_heads = k.shape[1]
    k, v = share(k, q.shape[1]), share(v, q.shape[1])
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(-1, keepdim=True)
    for rows, keys, scores in tiles_of(q, k, scale=scale, **how):
        total = scores.logsumexp(-1, keepdim=True) if tile_lse else lse[..., rows].unsqueeze(-1)
        weights = torch.exp(scores - total)
        dweights = dout[..., rows, :] @ v[..., keys, :].mT
        used = (weights * dweights).sum(-1, keepdim=True) if tile_delta else delta[..., rows, :]
        inside = 0.0 if delta_outside else delta_weight * used
        dscores = weights * (dweights - inside) - (used if delta_outside else 0.0)
        for name, gradient, place in (("q", dq, rows), ("k", dk, keys), ("v", dv, keys)):
            if name in assign:
                gradient[..., place, :] = 0.0
        dq[..., rows, :] += (scale if q_scale is None else q_scale) * (dscores @ k[..., keys, :])
        dk[..., keys, :] += (scale if k_scale is None else k_scale) * (dscores.mT @ q[..., rows, :])
        dv[..., keys, :] += weights.mT @ dout[..., rows, :]
    return dq, *(_gathered(x, key_heads, share, gather) for x in (dk, dv))


def _gathered(
    x: Tensor, key_heads: int, share: Callable[..., Tensor], gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return one gradient for each key/value head out of one for each query head."""
    order = torch.arange(key_heads).reshape(1, -1, 1, 1)  # which key/value head each query head reads
    reads = share(order, x.shape[1]).flatten()
    return torch.cat([gather(x[:, reads == head].unsqueeze(1)) for head in range(key_heads)], dim=1)


def backward_with(**faults: Any) -> Callable[..., Gradients]:
    """Return the backward with faults of `backward` or of `tiles_of`."""
    return lambda *tensors, **how: backward(*tensors, **{**how, **faults})


def scaled_twice(*tensors: Tensor, scale: float, **how: Any) -> Gradients:
    """The factor `scale` in dS, and in dQ and dK again."""
    return backward(*tensors, scale=scale, q_scale=scale**2, k_scale=scale**2, **how)


def backward_first_head(*tensors: Tensor, **how: Any) -> Gradients:
    """Every head gets the gradients of head 0."""
    dq, dk, dv = (x[:, :1].expand(x.shape) for x in backward(*tensors, **how))
    return dq, dk, dv


def backward_on(part: Part) -> Callable[..., Gradients]:
    """Return the backward of a part: other queries and keys get and give no gradient."""

    def answer(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *state: Tensor, tile: int, **how: Any) -> Any:
        M, N = part(q.shape[-2], k.shape[-2], tile)
        head = (dout[..., :M, :], q[..., :M, :], k[..., :N, :], v[..., :N, :])
        parts = backward(*head, state[0][..., :M, :], state[1][..., :M], tile=tile, **how)
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))
        for full, each in zip(grads, parts, strict=True):
            full[..., : each.shape[-2], :] = each
        return grads

    return answer

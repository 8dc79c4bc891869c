"""Another form of the merge: running maximum and running sum. Some names are Greek, and arguments bear their shapes."""

from jaxtyping import Float
from torch import Tensor


def ring_step(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B K T D"],
    v: Float[Tensor, "B K T D"],
    out: Float[Tensor, "B H L D"],
    lse: Float[Tensor, "B H L"],
    mask=None,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """The merge with a maximum instead of logaddexp, one head at a time."""
    group, dtype = q.shape[1] // k.shape[1], out.dtype
    heads = []
    for h in range(q.shape[1]):
        kh, vh = k[:, h // group].to(dtype), v[:, h // group].to(dtype)
        scores = q[:, h].to(dtype) @ kh.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = torch.where(mask, scores, -math.inf)
        heads.append(_merge_scores(scores, vh, out[:, h], lse[:, h]))
    return tuple(torch.stack(parts, dim=1) for parts in zip(*heads, strict=True))


def _merge_scores(scores, v, out, lse):
    top = torch.cat([scores, lse[..., None]], dim=-1).amax(-1)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    weights, before = torch.exp(scores - top[..., None]), torch.exp(lse - top)
    Σ = weights.sum(-1) + before
    δ = torch.where(Σ == 0, torch.ones_like(Σ), Σ)[..., None]
    return (weights @ v + before[..., None] * out) / δ, torch.log(Σ) + top


def nothing_yet(q):
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)


def ring_forward(ring, q, k, v):
    out, lse = nothing_yet(q)
    for step in range(ring.world_size):
        out, lse = ring_step(q, k, v, out, lse)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return out, lse


def ring_forward_causal(ring, q, k, v, positions):
    mine = positions[ring.rank]
    out, lse = nothing_yet(q)
    for step in range(ring.world_size):
        mask = mine[:, None] >= positions[ring.origin(step)]
        out, lse = ring_step(q, k, v, out, lse, mask)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out, lse

"""The loss of a sequence that is spread over ranks, and the one reduction of its gradients that is exact.

    loss = Σ over all tokens that count of −log p(label) / N,   N = how many count, on all ranks

Every rank computes its own tokens' sum divided by the N of all; the loss, and the gradient of weights that all
ranks hold, is the SUM of that over ranks. (A mean over ranks is P times too small. A mean of each rank's own mean
weighs tokens by how few their rank has, and is NaN where a rank has none.)
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.mask import Mask
from ringlab.merge import state_dtype

IGNORE = -100
"""The label of a token that does not count; torch's own default."""


def next_tokens(tokens: Int[Tensor, "B S"], mask: Mask | None = None) -> Int[Tensor, "B S"]:
    """Return the label of each token of WHOLE sequences: the token after it, IGNORE at the end of a document.

    Labels are made before the sequence is sharded: the successor of a rank's token is, mostly, another rank's.
    """
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    if mask is not None and mask.documents:
        ends = torch.from_numpy(mask.bounds[1:] - 1)
        labels[:, ends[ends >= 0]] = IGNORE
    return labels


def valid_tokens(labels: Int[Tensor, "B L"], *rings: Ring | None) -> int:
    """Return how many labels count on all ranks of the `rings`.

    Raises: TrainingError, on every rank, if none does.
    """
    counted = int(summed((labels != IGNORE).sum(), *rings))
    if not counted:
        got = "every label ignored, on every rank"
        raise TrainingError("a batch in which at least one label counts", got, "leave such batches out")
    return counted


def loss_share(
    logits: Float[Tensor, "B L vocabulary"], labels: Int[Tensor, "B L"], count: int
) -> Float[Tensor, ""]:
    """Return this rank's part of the loss, natural logarithm; the loss is the sum over ranks. 0 for no tokens."""
    logits = logits.to(state_dtype(logits.dtype))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / count


@torch.no_grad()
def sum_gradients(model: nn.Module, *rings: Ring | None) -> None:
    """Replace every parameter's gradient by the SUM over the ranks of all `rings`, the same bits on each of them.

    Ranks whose tokens did not touch a parameter add zero. All gradients travel in one message, in float32 at least,
    and a rank holds P copies of them for a moment: for models whose weights are large use `Degrees`, which leaves
    gradients to torch's FSDP.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    dtype = state_dtype(trained[0].dtype)
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = summed(torch.cat([part.flatten().to(dtype) for part in parts]), *rings)
    for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def summed(x: Tensor, *rings: Ring | None) -> Tensor:
    """Return the sum of `x` over the ranks of all `rings`, a grid of them; None stands for one rank alone."""
    for ring in rings:
        if ring is not None and ring.world_size > 1:
            x = ring.all_reduce(x)
    return x

"""The loss of a sequence that is spread over ranks, and the only exact way to reduce its gradients.

    loss = Σ −log p(label) / N,   over the N tokens that count, on all ranks

Every rank computes the sum over its own tokens, divided by the N of all ranks. The loss is the SUM of these
shares. The gradient of weights that all ranks hold is likewise the sum of the ranks' gradients. (A mean of
the shares is P times too small. A mean of the ranks' own means gives more weight to tokens on ranks that
have few tokens, and is NaN if a rank has none.)
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.mask import Mask
from ringlab.merge import state_dtype
from ringlab.upload import upload

IGNORE = -100
"""The label of a token that does not count; torch's own default."""


def next_tokens(tokens: Int[Tensor, "B S"], mask: Mask | None = None, ahead: int = 1) -> Int[Tensor, "B S"]:
    """Return the label of each token of WHOLE sequences: the next token, or IGNORE at the end of a document.

    Make labels before sharding the sequence, because the token after a rank's last token is often on another
    rank.
    ahead: how many tokens ahead the label is, for multi-token prediction. The last `ahead` tokens of a
    document have no label.
    Raises: TrainingError for `ahead` below 1.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8]]), Mask(documents=(2, 2)))
    tensor([[   6, -100,    8, -100]])
    """
    if ahead < 1:
        raise TrainingError("ahead >= 1 token", f"{ahead}", "1 is the next token")
    S = tokens.shape[1]
    labels = torch.full_like(tokens, IGNORE)
    labels[:, : max(0, S - ahead)] = tokens[:, ahead:]
    if mask is not None and mask.documents:
        positions = np.arange(S)
        left = mask.of_length(S).bounds[mask.document_of(positions) + 1] - positions
        labels[:, upload(np.flatnonzero(left <= ahead), tokens.device)] = IGNORE
    return labels


def valid_tokens(labels: Int[Tensor, "B L"], *rings: Ring | None) -> int:
    """Return the number of labels that count on all ranks of the `rings`.

    rings: the ring of the sequence and, with data parallelism, also the ring of the replicas, as in
    valid_tokens(labels, cp, dp). With cp alone, all replicas would have the same weight in the loss, however many
    labels they have. A replica without labels would raise an error while the other replicas continue.
    Raises: TrainingError, on every rank of the rings, if no label counts.

    >>> valid_tokens(torch.tensor([[6, IGNORE, 8, IGNORE]]))
    2
    """
    counted = int(summed((labels != IGNORE).sum(), *rings))
    if not counted:
        raise TrainingError(
            "a batch in which at least one label counts",
            "every label ignored, on all ranks of the rings given",
            "leave such batches out; if another replica has labels, count over the replicas too: valid_tokens(labels, cp, dp)",
        )
    return counted


def total_weight(weights: Float[Tensor, "B L"], labels: Int[Tensor, "B L"], *rings: Ring | None) -> float:
    """Return the sum of the loss weights of all labels that count, on all ranks of the `rings`.

    Raises: TrainingError, on every rank, if the sum is not above zero.

    >>> total_weight(torch.tensor([[1.0, 0.5, 2.0]]), torch.tensor([[6, 8, IGNORE]]))
    1.5
    """
    own = weights.masked_fill(labels == IGNORE, 0).sum(dtype=torch.float64)
    if not (total := float(summed(own, *rings))) > 0:
        raise TrainingError("loss weights with a sum above zero, on all ranks", f"{total}")
    return total


def loss_share(
    logits: Float[Tensor, "B L vocabulary"],
    labels: Int[Tensor, "B L"],
    count: int | float,
    weights: Float[Tensor, "B L"] | None = None,
) -> Float[Tensor, ""]:
    """Return this rank's part of the loss in nats, which is 0 without tokens. The loss is the sum over ranks.

    count: the result of `valid_tokens`, or of `total_weight` if there are loss weights. weights: the loss
    weight of each label. Weights of ignored labels are not used.
    Raises: TrainingError for a count that is not above zero, which would make the loss, and then the model,
    NaN.

    >>> loss_share(torch.zeros(1, 2, 256), torch.tensor([[6, 8]]), count=4)  # ln 256 · 2 / 4
    tensor(2.7726)
    """
    if not count > 0:
        raise TrainingError(
            "a count of the labels on all ranks that is above zero",
            f"{count}",
            "leave such batches out, on every rank",
        )
    logits, flat = logits.to(state_dtype(logits.dtype)).flatten(0, 1), labels.flatten()
    if weights is None:
        return F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum") / count
    each = F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none")
    weights = weights.flatten().masked_fill(flat == IGNORE, 0)  # before the product, because 0 · NaN is NaN
    return (each * weights.to(each.dtype)).sum() / count


@torch.no_grad()
def sum_gradients(model: nn.Module, *rings: Ring | None) -> None:
    """Replace every parameter's gradient by its SUM over the ranks of all `rings`; all ranks get the same bits.

    A rank whose tokens do not use a parameter adds zero. All gradients are sent in one message, in float32 at
    least, and a rank briefly holds P copies of them. For large models use `Degrees`, which lets torch's FSDP
    sum the gradients.

    This function works with any model. torch's DistributedDataParallel divides the sum by P. If you use it,
    do not call this function, and multiply the loss by P before backward.

    Raises: TrainingError if parameters are sharded, for example by FSDP, which sums their gradients itself.

    >>> from ringlab import VirtualCluster
    >>> def program(ring):
    ...     model = nn.Linear(1, 1, bias=False)
    ...     model(torch.ones(1, 1) * (ring.rank + 1)).sum().backward()
    ...     sum_gradients(model, ring)
    ...     return model.weight.grad.item()
    >>> VirtualCluster(2).run(program).results
    [3.0, 3.0]
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    if any(map(is_sharded, trained)):
        raise TrainingError(
            "parameters that every rank holds whole",
            "parameters that torch shards, and whose gradients it reduces",
            "let FSDP sum. On each module that fully_shard returns, call set_gradient_divide_factor(1.0) and "
            "set_force_sum_reduction_for_comms(True); without the latter, gloo cannot sum",
        )
    dtype = state_dtype(reduce(torch.promote_types, (p.dtype for p in trained)))
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = summed(torch.cat([part.flatten().to(dtype) for part in parts]), *rings)
    for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def is_sharded(tensor: Shaped[Tensor, "..."]) -> bool:
    """Return whether the tensor's entries are spread over several ranks."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def summed(x: Shaped[Tensor, "*shape"], *rings: Ring | None) -> Shaped[Tensor, "*shape"]:
    """Return the sum of `x` over the ranks of all `rings`, which form a grid.

    None means a ring of one rank.
    """
    for ring in rings:
        if ring is not None and ring.world_size > 1:
            x = ring.all_reduce(x)
    return x

"""The loss of a sequence that is spread over ranks, and the only reduction of its gradients that is exact.

    loss = Σ over all tokens that count of −log p(label) / N,   N = the number that count, on all ranks

Every rank computes its own tokens' sum divided by the N of all; the loss, and the gradient of weights that all
ranks hold, is the SUM of that over ranks. (A mean over ranks is P times too small. A mean of each rank's own mean
gives more weight to the tokens of ranks that have few, and is NaN if a rank has none.)
"""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Float, Int, Shaped
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

    Make labels before sharding the sequence: the token after a rank's own is often on another rank.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8]]), Mask(documents=(2, 2)))
    tensor([[   6, -100,    8, -100]])
    """
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    if mask is not None and mask.documents:
        ends = torch.from_numpy(mask.bounds[1:] - 1)
        labels[:, ends[ends >= 0]] = IGNORE
    return labels


def valid_tokens(labels: Int[Tensor, "B L"], *rings: Ring | None) -> int:
    """Return how many labels count on all ranks of the `rings`.

    Raises: TrainingError, on every rank, if no label counts.

    >>> valid_tokens(torch.tensor([[6, IGNORE, 8, IGNORE]]))
    2
    """
    counted = int(summed((labels != IGNORE).sum(), *rings))
    if not counted:
        got = "every label ignored, on every rank"
        raise TrainingError("a batch in which at least one label counts", got, "leave such batches out")
    return counted


def loss_share(
    logits: Float[Tensor, "B L vocabulary"], labels: Int[Tensor, "B L"], count: int
) -> Float[Tensor, ""]:
    """Return this rank's part of the loss in nats; the loss is the sum over ranks. 0 without tokens.

    >>> loss_share(torch.zeros(1, 2, 256), torch.tensor([[6, 8]]), count=4)  # ln 256 · 2 / 4
    tensor(2.7726)
    """
    logits = logits.to(state_dtype(logits.dtype))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / count


@torch.no_grad()
def sum_gradients(model: nn.Module, *rings: Ring | None) -> None:
    """Replace every parameter's gradient by the SUM over the ranks of all `rings`, the same bits on each of them.

    A rank whose tokens do not use a parameter adds zero. All gradients are sent in one message, in float32 at
    least, and a rank briefly holds P copies of them: for large models use `Degrees`, which leaves gradients
    to torch's FSDP.

    It works with any model. torch's DistributedDataParallel divides the sum by P: with it, leave this out and
    multiply the loss by P before backward.

    Raises: TrainingError if parameters are sharded, as by FSDP, which reduces their gradients itself.

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
            "let FSDP sum: set_gradient_divide_factor(1.0)",
        )
    dtype = state_dtype(reduce(torch.promote_types, (p.dtype for p in trained)))
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = summed(torch.cat([part.flatten().to(dtype) for part in parts]), *rings)
    for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def is_sharded(tensor: Shaped[Tensor, "..."]) -> bool:
    """Return whether the tensor's entries lie on several ranks."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def summed(x: Shaped[Tensor, "*shape"], *rings: Ring | None) -> Shaped[Tensor, "*shape"]:
    """Return the sum of `x` over the ranks of all `rings`, a grid of them; None stands for one rank alone."""
    for ring in rings:
        if ring is not None and ring.world_size > 1:
            x = ring.all_reduce(x)
    return x

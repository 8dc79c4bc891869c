"""Partials of all heads on every rank become attention of each rank's own heads: two ways to merge them.

reduce-scatter  all ranks learn all lse; each scales its out to its share of the whole, and a plain sum is right
                (vLLM's cp_lse_ag_out_rs)
all-to-all      out and lse of a head go to its owner, who merges them (vLLM's dcp_a2a_lse_reduce)

lse is a natural logarithm, and −inf on a rank without keys. All sums are in the state dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.comm.protocol import Comm
from ringlab.merge import Partial, merge


def reduce_scatter(comm: Comm, part: Partial) -> Partial:
    """Return the merge of all ranks' partials for this rank's heads, as a sum: out is scaled by e^(lse − LSE) first."""
    every_lse = torch.stack(comm.all_gather(part.lse, tag="decode lse"))
    scaled = part.out * shares(every_lse)[comm.rank].unsqueeze(-1)
    out = reduce(torch.add, exchange_heads(comm, scaled, tag="decode out"))
    return Partial(out, torch.logsumexp(every_lse[:, :, own_heads(comm, part.out.shape[1])], dim=0))


def all_to_all(comm: Comm, part: Partial) -> Partial:
    """Return the merge of all ranks' partials for this rank's heads: out and lse travel together, folded in rank order."""
    message = torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1)
    arrived = exchange_heads(comm, message, tag="decode partials")
    return reduce(merge, (Partial(x[..., :-1], x[..., -1]) for x in arrived))


MERGES: dict[str, Callable[[Comm, Partial], Partial]] = {
    "all-to-all": all_to_all,
    "reduce-scatter": reduce_scatter,
}


def shares(lse: Float[Tensor, "P B H N"]) -> Float[Tensor, "P B H N"]:
    """Return each rank's share of the softmax, e^(lse − LSE), LSE being the logsumexp over the ranks.

    A rank without keys has the share 0. Where no rank has any, all partials are 0, and so is any weighted sum of them.
    """
    nobody = lse.amax(dim=0) == -torch.inf
    # Not from LSE itself: a large one is rounded, and the shares would not add up to 1.
    return torch.softmax(lse.masked_fill(nobody, 0.0), dim=0)


def own_heads(comm: Comm, heads: int) -> slice:
    """Return which of `heads` heads belong to this rank."""
    share = heads // comm.world_size
    return slice(comm.rank * share, (comm.rank + 1) * share)


def exchange_heads(comm: Comm, x: Float[Tensor, "B H N D"], tag: str) -> list[Float[Tensor, "B own N D"]]:
    """Return every rank's part of this rank's heads, in rank order: an all-to-all of P − 1 messages."""
    parts = list(x.chunk(comm.world_size, dim=1))
    works = {}
    for distance in range(1, comm.world_size):
        to, source = (comm.rank + distance) % comm.world_size, (comm.rank - distance) % comm.world_size
        into = x.new_empty(parts[comm.rank].shape)
        send = parts[to].contiguous()
        works[source] = comm.exchange(send=(send,), to=to, receive=(into,), source=source, tag=tag)
    return [works[rank].wait()[0] if rank in works else parts[rank] for rank in range(comm.world_size)]

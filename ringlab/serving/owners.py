"""Two ways to merge partials of all heads on every rank into attention of each rank's own heads.

reduce-scatter  all ranks receive every lse; each scales its out by its softmax share; outs are summed
                (vLLM's cp_lse_ag_out_rs)
all-to-all      out and lse of a head go to the head's owner, which merges them (vLLM's dcp_a2a_lse_reduce)

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
    """Return the merge of all ranks' partials for this rank's heads, computed as a sum.

    Each rank's out is scaled by e^(lse − LSE) before the sum, where LSE is the logsumexp over the ranks.
    """
    every_lse = torch.stack(comm.all_gather(part.lse, tag="decode lse"))
    scaled = part.out * shares(every_lse)[comm.rank].unsqueeze(-1)
    out = reduce(torch.add, exchange_heads(comm, scaled, tag="decode out"))
    return Partial(out, torch.logsumexp(every_lse[:, :, own_heads(comm, part.out.shape[1])], dim=0))


def all_to_all(comm: Comm, part: Partial) -> Partial:
    """Return the merge of all ranks' partials for this rank's heads.

    out and lse travel in one message, and the partials are merged in rank order.
    """
    message = torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1)
    arrived = exchange_heads(comm, message, tag="decode partials")
    return reduce(merge, (Partial(x[..., :-1], x[..., -1]) for x in arrived))


MERGES: dict[str, Callable[[Comm, Partial], Partial]] = {
    "all-to-all": all_to_all,
    "reduce-scatter": reduce_scatter,
}


def shares(lse: Float[Tensor, "P B H N"]) -> Float[Tensor, "P B H N"]:
    """Return each rank's share of the softmax, e^(lse − LSE), where LSE is the logsumexp over the ranks.

    A rank without keys has the share 0. If no rank has keys, all partials are 0, so any shares give the right
    sum.
    """
    nobody = lse.amax(dim=0) == -torch.inf
    # Softmax computes the shares without LSE. A large LSE would be rounded, so that the shares would not add
    # up to 1.
    return torch.softmax(lse.masked_fill(nobody, 0.0), dim=0)


def own_heads(comm: Comm, heads: int) -> slice:
    """Return the slice of `heads` heads that belongs to this rank."""
    share = heads // comm.world_size
    return slice(comm.rank * share, (comm.rank + 1) * share)


def exchange_heads(comm: Comm, x: Float[Tensor, "B H N D"], tag: str) -> list[Float[Tensor, "B own N D"]]:
    """Return each rank's part of `x` for this rank's heads, in rank order, by an all-to-all of P − 1 messages."""
    parts = list(x.chunk(comm.world_size, dim=1))
    works = {}
    for distance in range(1, comm.world_size):
        to, source = (comm.rank + distance) % comm.world_size, (comm.rank - distance) % comm.world_size
        into = x.new_empty(parts[comm.rank].shape)
        send = parts[to].contiguous()
        works[source] = comm.exchange(send=(send,), to=to, receive=(into,), source=source, tag=tag)
    return [works[rank].wait()[0] if rank in works else parts[rank] for rank in range(comm.world_size)]

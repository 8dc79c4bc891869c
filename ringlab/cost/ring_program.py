"""The ring program of a simulation: `ringlab.ring_attention` on shapes, with a block that charges seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.lockstep import Blocks, evaluate_alike
from ringlab.comm.clocked.recording import Recording
from ringlab.comm.clocked.timeline import Links, Timeline
from ringlab.comm.ring import Ring
from ringlab.cost.equal_ranks import Seconds, models_of, run, seconds_by_label
from ringlab.cost.shape_block import Prices, ShapeBlock, torch_dtype
from ringlab.cost.sizes import Attention
from ringlab.layout import Layout, Run
from ringlab.mask import Mask

Timed: TypeAlias = tuple[Recording, Timeline, Timeline]


@dataclass(frozen=True)
class RingProgram:
    """One call of ring attention of these sizes, with its backward if `backward` is true."""

    sizes: Attention
    layout: Layout
    prices: Prices
    schedule: str
    backward: bool
    mask: Mask

    def recording(self) -> Recording:
        """Return the operations of every rank."""
        _warm_up(self.backward)
        queries = [self._shards[length][0] for length in self.layout.lengths]
        models = models_of(self.layout, self.schedule, self.mask, self.backward)
        return run(self, models, Seconds(self.prices, queries, self.layout, self.mask))

    def in_lockstep(
        self, networks: tuple[Links, Links], slow: Mapping[int, float], keep: Sequence[int]
    ) -> Timed | None:
        """Return the operations of rank 0, and the times of all ranks on both networks.

        The ranks must satisfy `equal_ranks.go_together`. The recording also has the memory of every rank,
        and the operations of the first rank of each length. The result is None if the messages of rank 0 do
        not fit together. slow: how many times longer each rank computes. keep: the ranks whose operations
        are kept, on the first network.
        """
        P, lengths = self.layout.P, self.layout.lengths
        queries = {length: shards[0] for length, shards in self._shards.items()}
        seconds = seconds_by_label(self.prices, queries, self.layout, self.mask)
        factors = np.ones(P)
        factors[list(slow)] = list(slow.values())

        def of_all(label: str) -> Float[np.ndarray, " P"]:
            return seconds(label) * factors

        _warm_up(self.backward)
        first = {length: lengths.index(length) for length in sorted({*lengths})}
        found = ClockedCluster(P).run_some(self, sorted(first.values()))
        # In the forward, a rank's memory depends only on its length: it holds its rows, and buffers for the
        # longest block or for all blocks.
        found.memory = [
            replace(found.memory[first[length]], rank=rank) for rank, length in enumerate(lengths)
        ]
        log, forms, blocks = found.logs[0], found.forms, self._blocks() if len(first) > 1 else None
        timeline = evaluate_alike(log, forms, P, networks[0], of_all, keep, blocks)
        free = evaluate_alike(log, forms, P, networks[1], of_all, (), blocks)
        return None if timeline is None or free is None else (found, timeline, free)

    def _blocks(self) -> Blocks:
        """Return the owner of the block that each exchange carries.

        Rank 0 runs under a layout in which rank r has r + 1 tokens, so that the length of a block names its
        owner.
        """
        P, start = self.layout.P, 0
        runs = []
        for rank in range(P):
            runs.append((Run(start, 1, rank + 1),))
            start += rank + 1
        apart = replace(self, layout=Layout(start, P, "of all lengths", tuple(runs)))
        found = ClockedCluster(P, memory=False).run_some(apart)
        forms = found.forms

        def behind(of_exchanges: Sequence[int]) -> Int[np.ndarray, " exchanges"]:
            return np.array(
                [(1 - forms[form].shapes[0][-2]) % P if form >= 0 else 0 for form in of_exchanges]
            )

        log = found.logs[0]
        return Blocks(np.array(self.layout.lengths), behind(log.sent), behind(log.received))

    @cached_property
    def _shards(self) -> dict[int, tuple[Tensor, ...]]:
        """Return q, k, v and the gradient of out by the number of tokens of a rank."""
        sizes = self.sizes
        dtype = torch_dtype(sizes.dtype)
        kinds = (
            (sizes.H, sizes.D),
            (sizes.K, sizes.D),
            (sizes.K, sizes.value_dim),
            (sizes.H, sizes.value_dim),
        )
        return {
            length: tuple(
                torch.empty((sizes.B, heads, length, dim), dtype=dtype, device="meta") for heads, dim in kinds
            )
            for length in set(self.layout.lengths)
        }

    def __call__(self, ring: Ring) -> None:
        """Run ring attention on one rank of a clocked cluster."""
        q, k, v, dout = self._shards[self.layout.length(ring.rank)]
        block = ShapeBlock(self.prices, ring.comm.spend)  # type: ignore[attr-defined]
        if self.backward:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = ring_attention(
            q, k, v, ring=ring, layout=self.layout, mask=self.mask, block=block, schedule=self.schedule, validate=False,
        )  # fmt: skip
        if self.backward:
            torch.autograd.grad(out, (q, k, v), dout)


@cache
def _warm_up(products: bool) -> None:
    """Use the device "meta" once, since its first operators keep their arguments alive, as if a rank held them.

    Only the backward multiplies and sums. The first product on "meta" makes torch load its compiler, which
    takes a second.
    """
    x = torch.empty(2, dtype=torch.bfloat16, device="meta").to(torch.float32)
    if products:
        (x * x).sum(dim=-1)

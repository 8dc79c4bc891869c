"""The cost of emulation: P virtual ranks are compared with one call of torch on the whole problem.

The CPU benchmarks share `Work`: causal attention, forward alone or forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.bench.device import Cpu, machine
from ringlab.bench.interleaved import Turn, interleaved, paired
from ringlab.blocks import get_block
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.memory import MemoryReport
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.layout import Layout, zigzag
from ringlab.plan import tiles


@dataclass(frozen=True)
class Work:
    """The sizes of causal attention in float32: B batch, H heads, S tokens, D head dim."""

    B: int = 1
    H: int = 8
    S: int = 8192
    D: int = 64

    def as_dict(self) -> dict[str, object]:
        """Return the sizes and the kind of attention, ready for JSON."""
        return {**asdict(self), "dtype": "float32", "causal": True, "layout": "zigzag", "block": "native"}

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random whole sequences for q, k, v and the gradient of out."""
        random = torch.Generator().manual_seed(seed)
        shape = (self.B, self.H, self.S, self.D)
        q, k, v, dout = (torch.randn(shape, generator=random) for _ in range(4))
        return q, k, v, dout


def sdpa(tensors: tuple[Float[Tensor, "B H S D"], ...], gradients: bool) -> None:
    """Compute the whole problem in one call of torch's own attention."""
    q, k, v, dout = tensors
    if not gradients:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(out, (q, k, v), dout)


def shards(
    ring_rank: int, P: int, tensors: tuple[Float[Tensor, "B H S D"], ...]
) -> tuple[Float[Tensor, "B H L D"], ...]:
    """Return this rank's part of each tensor under the zig-zag layout."""
    layout = zigzag(tensors[0].shape[-2], P)
    return tuple(layout.shard(x, ring_rank) for x in tensors)


def ring_program(ring: Ring, S: int, shards: tuple[Float[Tensor, "B H L D"], ...], gradients: bool) -> None:
    """Compute one rank's part of the same work in a ring, from prepared shards."""
    q, k, v, dout = shards
    layout = zigzag(S, ring.world_size)
    if not gradients:
        with torch.no_grad():
            ring_attention(q, k, v, ring=ring, layout=layout, block="native")
        return
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, ring=ring, layout=layout, block="native")
    torch.autograd.grad(out, (q, k, v), dout)


def block_alone(S: int, parts: Sequence[tuple[Float[Tensor, "B H L D"], ...]], gradients: bool) -> None:
    """Compute the tiles of all ranks with the block only: no messages, no merges and no sums.

    Each rank has one thread, and the ranks share as many threads as torch has, as on a virtual cluster.
    """
    layout, threads = zigzag(S, len(parts)), torch.get_num_threads()

    def compute(rank: int) -> None:
        for origin in range(len(parts)):
            _tiles_alone(layout, rank, parts[rank], origin, parts[origin], gradients)

    with ThreadPoolExecutor(threads, initializer=_use_one_thread) as pool:
        list(pool.map(compute, range(len(parts))))


def _use_one_thread() -> None:
    torch.get_num_threads()  # the first call on a thread resets its number of threads
    torch.set_num_threads(1)


def _tiles_alone(
    layout: Layout,
    rank: int,
    rows_of: tuple[Tensor, ...],
    origin: int,
    keys_of: tuple[Tensor, ...],
    gradients: bool,
) -> None:
    block, scale = get_block("native", rows_of[0]), rows_of[0].shape[-1] ** -0.5
    for tile in tiles(layout, rank, origin, largest_causal=block.largest_causal):
        q, dout = (rows_of[i].narrow(-2, tile.q_start, tile.q_stop - tile.q_start) for i in (0, 3))
        k, v = (keys_of[i].narrow(-2, tile.k_start, tile.k_stop - tile.k_start) for i in (1, 2))
        part = block.forward(q, k, v, causal=tile.causal, scale=scale)
        if gradients:
            # The second lse takes the place of delta, because the native block computes delta itself.
            rows = BackwardRows(dout, q, part.out, part.lse, part.lse)
            block.backward(rows, k, v, causal=tile.causal, scale=scale)


def bench_emulate(
    work: Work, P: int = 8, pairs: int = 11, progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return ratios, times and the machine, for JSON; times in seconds.

    Shards are prepared before the clock starts, as are the tensors for SDPA. `block_alone` is the part of the
    ratios that no ring of these tiles can avoid. Memory is measured in separate runs, per rank and beyond the
    prepared shards.
    """
    tensors = work.tensors()
    parts = [shards(rank, P, tensors) for rank in range(P)]
    cluster = VirtualCluster(P, memory=False)

    def beside_sdpa(subject: Callable[[], object], gradients: bool) -> dict[str, Any]:
        turns = {"subject": Turn(lambda _: subject()), "baseline": Turn(lambda _: sdpa(tensors, gradients))}
        return paired(interleaved(turns, Cpu(), pairs, 2, progress=progress))

    def ring(gradients: bool) -> dict[str, Any]:
        def program(ring: Ring) -> None:
            ring_program(ring, work.S, parts[ring.rank], gradients)

        return beside_sdpa(lambda: cluster.run(program), gradients)

    def memory(gradients: bool) -> dict[str, Any]:
        def program(ring: Ring) -> None:
            ring_program(ring, work.S, parts[ring.rank], gradients)

        return _memory(VirtualCluster(P).run(program).memory, work, P)

    def alone(gradients: bool) -> float:
        found = beside_sdpa(lambda: block_alone(work.S, parts, gradients), gradients)
        return float(found["ratio"])

    measured = {"forward": ring(False), "forward_backward": ring(True)}
    return {
        "bench": "emulate",
        "work": {**work.as_dict(), "P": P},
        "threads": torch.get_num_threads(),
        **{f"{of}_ratio": found["ratio"] for of, found in measured.items()},
        "block_alone": {"forward_ratio": alone(False), "forward_backward_ratio": alone(True)},
        "memory": {"forward": memory(False), "forward_backward": memory(True)},
        **measured,
        "machine": machine(),
    }


def _memory(reports: list[MemoryReport], work: Work, P: int) -> dict[str, Any]:
    """Return peak bytes per rank, also as a number of shards (tensors of S/P tokens of all heads)."""
    shard = work.B * work.H * -(-work.S // P) * work.D * 4
    return {
        "peak_bytes": [report.peak_bytes for report in reports],
        "largest_bytes": max(report.largest_bytes for report in reports),
        "peak_shards": round(max(report.peak_bytes for report in reports) / shard, 2),
        "scores_of_a_row_of_blocks_bytes": -(-work.S // P) * work.S * 4,
    }

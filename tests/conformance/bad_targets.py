"""Bad targets: they hang, crash, print without end, or return something other than attention.

Some handle a lost neighbour wrongly, send nothing, or leave a process behind. Over torch.distributed, some
fail on rank 1, continue without rank 1, or average gathered values and replace any error by zeros.

One target is correct: a plain ring whose hops are all-to-alls with split sizes, in which a rank sends its
whole block to the next rank and nothing to the others.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab import plain_ring, ring_attention
from ringlab.comm.ring import Ring
from ringlab.conformance.peers.peer import Peer
from ringlab.conformance.plain_distributed import Neighbours, Transfer
from ringlab.conformance.target.claims import Target

NO_FUNCTION = 3


def __getattr__(name: str) -> Any:
    if name != "of_an_absent_package":
        raise AttributeError(name)
    return Peer("absent", "ringlab-no-such-package", "1.0", _never_made).target()


def _never_made() -> Any:
    raise AssertionError("a package that is not there is not imported")


def hangs(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while ring.world_size == 2:
        time.sleep(0.1)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def is_slow(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    time.sleep(20.0)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def both_receive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    return q


def receives_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        time.sleep(60.0)
    dist.barrier()
    return q


def hangs_always(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while True:
        time.sleep(0.1)


def crashes(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if ring.world_size == 2:
        print("last words")
        os._exit(3)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def prints(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while ring.world_size == 2:
        print("x" * 10_000)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def leaves(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise SystemExit(0)


def interrupts(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise KeyboardInterrupt


def asserts(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert ring.world_size > 8
    return q


def returns_text(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return "attention"


def returns_nothing(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return None


def returns_one_token(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q[:, :, :1]


def returns_float64(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False).double()


def returns_no_gradient(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False).detach()


def needs_a_package(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    missing: Any = importlib.import_module("a_package_that_is_not_there")
    return missing.attention(q, k, v)  # type: ignore[no-any-return]


def needs_an_argument(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, sauce: str) -> Tensor:
    return q


def one_is_missing(S: int, P: int) -> list[Tensor]:
    return [torch.arange(S - 1) for _ in range(P)]


claims_a_wrong_layout = Target(returns_text, layouts={"mine": one_is_missing}, causal=(False,))
claims_no_schedule = Target(returns_text, schedule="sometimes")


def _contiguous(ring: Ring, q: Tensor) -> Any:
    from ringlab import contiguous

    lengths = [int(x) for x in ring.all_gather(torch.tensor([q.shape[2]]))]
    return contiguous(sum(lengths), ring.world_size)


def _guarded(instead: Callable[[Tensor], Any]) -> Target:
    """Return the plain ring, changed so that it returns `instead(q)` when an error is raised."""

    def attend(
        ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]
    ) -> tuple[Tensor, Tensor] | Any:
        try:
            return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)
        except Exception:
            return instead(q)

    return Target(attend)


def _waits(q: Tensor) -> None:
    while True:
        time.sleep(0.05)


def _prints(q: Tensor) -> None:
    while True:
        print("trying again " * 1000)


def _ends(q: Tensor) -> None:
    os._exit(7)


zeros_instead = _guarded(lambda q: q * 0)
nothing_instead = _guarded(lambda q: None)
text_instead = _guarded(lambda q: "a rank is gone")
waits_instead = _guarded(_waits)
prints_instead = _guarded(_prints)
ends_instead = _guarded(_ends)


def _alone(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _one_message(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = ring.shift(k.detach(), v.detach())
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values) + 0 * (k.sum() + v.sum())


sends_nothing = Target(_alone, grouped=False, causal=(False,), schedule="any")
sends_once = Target(_one_message, grouped=False, causal=(False,), schedule="any", backward=False)


def segfaults(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if ring.world_size == 2:
        ctypes.string_at(0)
    return q


def leaves_a_process(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if ring.rank == 0:
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"left behind: {left.pid}.", flush=True)
        os._exit(3)
    return q


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Any:
    """Compute all-gather attention in which rank 1 goes wrong differently for each kind of input."""
    if dist.get_rank() == 1:
        if not q.is_contiguous():
            _hang()
        if q.abs().max() > 100:
            print("last words", flush=True)
            os._exit(3)
        if scale is not None:
            _print()
        if q.dtype == torch.float64:
            importlib.import_module("a_package_that_is_not_there")
        if q.shape[1] == 6:
            return None
    keys, values = ([torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (k, v))
    dist.all_gather(keys, k.contiguous())
    dist.all_gather(values, v.contiguous())
    heads = q.shape[1] // k.shape[1]
    k, v = (torch.cat(x, 2).repeat_interleave(heads, 1) for x in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def raises_on_odd_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if dist.get_rank() % 2:
        raise ValueError(f"rank {dist.get_rank()} has no keys")
    dist.all_reduce(k.detach().clone())
    return q


def _hang() -> None:
    while True:
        time.sleep(0.1)


def _print() -> None:
    while True:
        print("x" * 10_000)


def waits_for_the_dead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        result: Tensor = attend(q, k, v)
    except RuntimeError:
        _hang()
    return result


def gathered(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return parts


def gather_and_average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        keys, values = torch.stack(gathered(k)), torch.stack(gathered(v))
    except RuntimeError:
        return (q + k.sum() + v.sum()) * 0
    group = q.shape[1] // k.shape[1]
    blocks = [
        torch.softmax(q @ one.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5, -1)
        @ each.repeat_interleave(group, 1)
        for one, each in zip(keys, values, strict=True)
    ]
    return sum(blocks[1:], blocks[0]) / len(blocks) + 0 * (k.sum() + v.sum())


class ByAllToAll(Neighbours):
    """A neighbour exchange that shifts tensors by one rank with a collective, an all-to-all."""

    def post(self, *tensors: Tensor, length: int, tag: str) -> Transfer:
        """Send to the next rank and receive from the previous rank by an all-to-all."""
        sends = [x.contiguous() for x in tensors]
        buffers = tuple(x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors)
        works = []
        for x, buffer in zip(sends, buffers, strict=True):
            given, taken = [0] * self.world_size, [0] * self.world_size
            given[(self.rank + 1) % self.world_size] = x.numel()
            taken[(self.rank - 1) % self.world_size] = buffer.numel()
            works.append(dist.all_to_all_single(buffer.view(-1), x.view(-1), taken, given, async_op=True))
        return Transfer([work for work in works if work is not None], sends, buffers)


def ring(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
    """Compute ring attention correctly."""
    return plain_ring.attend(ByAllToAll(), q, k, v, causal=causal, positions=positions)  # type: ignore[arg-type]


by_all_to_all = Target(ring, over="torch.distributed", layouts=("contiguous",))


def takes_ranks_of_the_group_for_ranks_of_the_world(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Send to rank 1 of the world instead of rank 1 of the group, the mistake of ms-swift 9509."""
    neighbours = Neighbours()
    neighbours.rank, neighbours.world_size = dist.get_rank(group), dist.get_world_size(group)
    return plain_ring.attend(neighbours, q, k, v, causal=causal, positions=positions)  # type: ignore[arg-type]

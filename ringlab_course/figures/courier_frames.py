"""Where the gradients of every block are at each step of a backward ring, and who has added to them: measured.

The program runs on probes, and its messages are read. With v = 0 and out = 0 the gradient of v is Pᵀ·dO;
with lse = 0 a weight is e^score, and k is such that it is 16^o for the keys of rank o. The dO of rank r is
one in column r and in its last row alone. So column r of a dV holds, in digits to the base 16, how often
rank r added something of each rank's block to it. No closed form of the ring appears here: a wrong ring
makes a wrong picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.protocol import Comm, Work
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.errors import CommError
from ringlab.layout import Layout

BASE = 16
BLOCKS, COURIERS = "kv", "dkv"
"""How the tags of messages begin that carry K/V, and dK/dV."""
Program = Callable[..., Any]


@dataclass(frozen=True)
class Frame:
    """One step: the owner of the K/V on every rank, the sums that it sends, and to whom.

    sums: [rank][contributor, owner], int64, how often the contributor added of the owner's block. The
    last frame holds what the ranks returned, and nothing is sent.
    """

    step: int
    held: tuple[int | None, ...]
    sums: tuple[np.ndarray | None, ...]
    to: tuple[int | None, ...]

    @property
    def home(self) -> bool:
        """Whether this is what the ranks returned."""
        return all(rank is None for rank in self.held)

    def describe(self) -> str:
        """The frame in words, one sentence per rank."""
        lines = ["At the end." if self.home else f"Step {self.step}."]
        for rank, sums in enumerate(self.sums):
            what = "no gradient" if sums is None else _inside(sums)
            if self.home:
                lines.append(f"Rank {rank} returns {what}.")
                continue
            onward = "" if self.to[rank] is None or sums is None else f" to rank {self.to[rank]}"
            lines.append(f"Rank {rank}, with K/V {self.held[rank]}, sends {what}{onward}.")
        return " ".join(lines)


def follow(program: Program, layout: Layout) -> list[Frame]:
    """Return the frames of `program(ring, dout, q, k, v, out, lse)`, which returns (dq, dk, dv) of a rank.

    Its scores are q·k/√D, with D of the q that it is given; another scale shows as wrong counts. Its messages have tags that begin with "kv" and "dkv", and carry k, v and dk, dv.
    Raises: CommError for more than 6 ranks, whose digits float32 does not hold, and without a token on every rank.
    """
    P = layout.P
    if P > 6 or not all(layout.lengths):
        raise CommError("a ring of at most 6 ranks, each with a token", f"{P} ranks, {layout.lengths} tokens")
    probes = [_probe(layout, rank) for rank in range(P)]
    logs: list[list[_Sent]] = [[] for _ in range(P)]

    def watched(ring: Any) -> Any:
        return program(Ring(_Watching(ring.comm, logs[ring.rank])), *probes[ring.rank])

    results = VirtualCluster(P).run(watched).results
    steps = max(sum(s.tag.startswith(COURIERS) for s in log) for log in logs)
    frames = [_frame(logs, step) for step in range(max(steps, P))]
    nobody = (None,) * P
    return [*frames, Frame(len(frames), nobody, tuple(_counts(dv) for _, _, dv in results), nobody)]


def _probe(layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """dout, q, k, v, out and lse of a rank; head dim P."""
    L, P = layout.length(rank), layout.P
    zeros = torch.zeros(1, 1, L, P)
    q, k, dout = zeros.clone(), zeros.clone(), zeros.clone()
    q[..., 0], k[..., 0] = math.sqrt(P), rank * math.log(BASE)
    dout[..., int(np.argmax(layout.positions(rank))), rank] = 1.0
    return dout, q, k, zeros, zeros.clone(), torch.zeros(1, 1, L)


@dataclass(frozen=True)
class _Sent:
    tag: str
    to: int | None
    tensors: tuple[Tensor, ...]


class _Watching(Comm):
    """`comm`, with a copy of everything that is sent."""

    def __init__(self, comm: Comm, log: list[_Sent]) -> None:
        self.inner, self.log = comm, log
        self.rank, self.world_size = comm.rank, comm.world_size

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        self.log.append(_Sent(tag, to, tuple(t.detach().float() for t in send)))
        self.log[-1] = _Sent(tag, to, tuple(t.clone() for t in self.log[-1].tensors))
        return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

    def compute(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner.compute(label, function, *args, **kwargs)

    def now(self) -> float:
        return self.inner.now()


def _frame(logs: list[list[_Sent]], step: int) -> Frame:
    P = len(logs)
    couriers = [_nth(log, COURIERS, step) for log in logs]
    return Frame(
        step,
        tuple(_held(logs, rank, step) for rank in range(P)),
        tuple(None if sent is None else _counts(sent.tensors[-1]) for sent in couriers),
        tuple(None if sent is None else sent.to for sent in couriers),
    )


def _held(logs: list[list[_Sent]], rank: int, step: int) -> int | None:
    """Whose K/V are on `rank`: read off what it sends, or off what it was sent last."""
    sent = _nth(logs[rank], BLOCKS, step)
    if sent is None and step:
        arrived = [found for log in logs if (found := _nth(log, BLOCKS, step - 1)) and found.to == rank]
        sent = arrived[0] if arrived else None
    if sent is None:
        return rank if step == 0 else None
    return round(sent.tensors[0].max().item() / math.log(BASE))


def _nth(log: list[_Sent], begins: str, number: int) -> _Sent | None:
    of_kind = [sent for sent in log if sent.tag.startswith(begins)]
    return of_kind[number] if number < len(of_kind) else None


def _counts(dv: Tensor) -> np.ndarray:
    """The digits of each column: [contributor, owner]."""
    P = dv.shape[-1]
    values = np.rint(dv[0, 0].amax(dim=0).double().numpy()).astype(np.int64)
    return np.array([[value // BASE**owner % BASE for owner in range(P)] for value in values])


def _inside(sums: np.ndarray) -> str:
    """What a courier holds, in words."""
    by_owner = {
        owner: [str(rank) for rank in range(len(sums)) if sums[rank, owner]] for owner in range(len(sums))
    }
    told = [f"dK/dV {owner} from {', '.join(ranks)}" for owner, ranks in by_owner.items() if ranks]
    return " and ".join(told) or "an empty sum"

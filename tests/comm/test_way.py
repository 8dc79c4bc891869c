"""A way changes nothing but the communicator: it reaches the innermost transport, past all wrappers."""

from __future__ import annotations

from typing import Any

import torch

from ringlab import VirtualCluster
from ringlab.comm.protocol import Comm, Work
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.trace import Trace
from ringlab.comm.way import OnWay, current_way
from ringlab.comm.wrappers.faulty import Fault, Faulty
from ringlab.comm.wrappers.strict import Strict
from ringlab.comm.wrappers.traced import Traced


class Posted(Work):
    def wait(self) -> tuple[torch.Tensor, ...]:
        return ()


class Spy(Comm):
    """Rank 2 of six, which notes the method of each exchange and the way on which it is posted."""

    rank, world_size = 2, 6

    def __init__(self) -> None:
        self.noted: list[tuple[str, Any]] = []

    def exchange(self, **_: Any) -> Work:
        self.noted.append(("exchange", current_way()))
        return Posted()

    def hand_over(self, **_: Any) -> Work:
        self.noted.append(("hand_over", current_way()))
        return Posted()

    def relay(self, **_: Any) -> Work:
        self.noted.append(("relay", current_way()))
        return Posted()

    def now(self) -> float:
        return 0.0


def posts(comm: Comm) -> None:
    """Make an exchange of each kind with the next rank."""
    both: dict[str, Any] = {"send": (torch.zeros(1),), "to": 0, "receive": (torch.zeros(1),), "source": 0}
    comm.exchange(**both).wait()
    comm.hand_over(**both).wait()
    comm.relay(hops=1, **both).wait()


def test_every_kind_of_exchange_is_posted_on_its_way() -> None:
    spy = Spy()
    posts(OnWay(Traced(spy, Trace(6)), "far"))
    posts(spy)
    on_far = "far", tuple(range(6))
    kinds = ("exchange", "hand_over", "relay")
    assert spy.noted == [(kind, on_far) for kind in kinds] + [(kind, None) for kind in kinds]


def test_a_way_has_the_ranks_of_its_ring_as_the_innermost_transport_numbers_them() -> None:
    spy = Spy()
    inner = SubGroup(SubGroup(Strict(spy), (4, 2, 0)), (2, 1))
    Ring(OnWay(OnWay(inner, "near"), "far")).post(torch.zeros(1))
    posts(SubGroup(OnWay(Traced(spy, Trace(6)), "all"), (2, 3)))
    assert [way for _, way in spy.noted[:2]] == [("far", (0, 2)), ("all", tuple(range(6)))]


def test_a_delayed_exchange_keeps_its_way() -> None:
    """An exchange that is posted late, while another way is in use, is posted on its own way."""
    spy = Spy()
    faulty = Faulty(spy, [Fault("delay", rank=2, exchange=0, seconds=0.0)])
    work = Ring(OnWay(faulty, "far")).post(torch.zeros(1))
    OnWay(faulty, "near").exchange(send=(torch.zeros(1),), to=0)
    work.wait()
    assert [way[0] for _, way in spy.noted] == ["far", "near"]


def shifts(ring: Ring) -> list[float]:
    """Shift the rank's number once on the common way and once on another, with both in flight at once."""
    mine = torch.tensor([float(ring.rank)])
    works = [ring.post(mine, tag="common"), Ring(OnWay(ring.comm, "other")).post(mine, tag="other", stride=2)]
    return [work.wait()[0].item() for work in works]


def test_a_way_on_the_virtual_cluster() -> None:
    assert VirtualCluster(4).run(shifts).results == [[3.0, 2.0], [0.0, 3.0], [1.0, 0.0], [2.0, 1.0]]

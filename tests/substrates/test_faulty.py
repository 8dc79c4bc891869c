"""Faults end in errors, never in a hang, and only `corrupt` may end in a silently wrong result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.comm.wrappers.faulty import KINDS, Fault, RankKilled, random_faults
from ringlab.errors import (
    CommError,
    DeadlockError,
    MismatchError,
    PeerDiedError,
    RankFailedError,
    RinglabError,
    TransportTimeout,
    UnreceivedError,
    WorldSizeError,
)
from tests.substrates.programs import four_shifts

LAST = 3  # the last exchange of four_shifts, which no exchange follows
ENDINGS: dict[tuple[str, int], tuple[type[RinglabError], ...]] = {
    ("drop", 1): (MismatchError,),
    ("drop", LAST): (DeadlockError, TransportTimeout, PeerDiedError),
    ("duplicate", 0): (MismatchError,),
    ("duplicate", LAST): (UnreceivedError,),
    ("reorder", 1): (MismatchError,),
    ("reorder", LAST): (DeadlockError, TransportTimeout, PeerDiedError),
}


def expected(P: int) -> list[Tensor]:
    return VirtualCluster(P).run(four_shifts).results


def same(results: list[Tensor], P: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected(P), strict=True))


@pytest.mark.parametrize(("kind", "exchange"), ENDINGS)
def test_virtual_faults_end_in_errors(kind: str, exchange: int) -> None:
    with pytest.raises(ENDINGS[kind, exchange]):
        VirtualCluster(3, faults=[Fault(kind, 2, exchange)]).run(four_shifts)
    with pytest.raises((*ENDINGS[kind, exchange], DeadlockError)):
        VirtualCluster(1, faults=[Fault(kind, 0, exchange)]).run(four_shifts)


def test_virtual_delay_of_an_exchange_with_others_behind_it() -> None:
    def posts_two(ring: Ring) -> Tensor:
        first, second = ring.post(torch.tensor([ring.rank])), ring.post(torch.tensor([10 + ring.rank]))
        [late], [early] = second.wait(), first.wait()
        return torch.cat([early, late])

    results = VirtualCluster(2, faults=[Fault("delay", 0, 0)]).run(posts_two).results
    assert [r.tolist() for r in results] == [[1, 11], [0, 10]]
    with pytest.raises(MismatchError, match="message 1"):
        VirtualCluster(2, faults=[Fault("reorder", 0, 0)]).run(posts_two)


@pytest.mark.parametrize("seed", range(2))
def test_virtual_corruption_changes_one_element_and_not_the_senders(seed: int) -> None:
    def once(ring: Ring) -> tuple[Tensor, Tensor]:
        mine = torch.full((2, 3), float(ring.rank + 1))
        return mine, ring.shift(mine)

    faults = [Fault("corrupt", 0, 0, seed=seed)]
    (sent, intact), (_, damaged) = VirtualCluster(2, faults=faults).run(once).results
    assert torch.equal(sent, torch.full((2, 3), 1.0))
    assert torch.equal(intact, torch.full((2, 3), 2.0))
    assert (damaged.view(torch.int32) != sent.view(torch.int32)).sum() == 1
    again = VirtualCluster(2, faults=faults).run(once).results[1][1]
    assert torch.equal(again.view(torch.int32), damaged.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_virtual_corruption_of_any_dtype(dtype: torch.dtype) -> None:
    def once(ring: Ring) -> Tensor:
        return ring.shift(torch.zeros(0), torch.ones(4, 2).to(dtype).t())[1]

    _, damaged = VirtualCluster(2, faults=[Fault("corrupt", 0, 0, seed=3)]).run(once).results
    assert (damaged != torch.ones(2, 4).to(dtype)).sum() == 1


def test_virtual_kill() -> None:
    def survives(ring: Ring) -> str:
        try:
            four_shifts(ring)
        except PeerDiedError as error:
            seen.append((ring.rank, str(error)))
            raise
        return ""

    seen: list[tuple[int, str]] = []
    with pytest.raises(RankKilled, match="rank 2 to make exchange 1"):
        VirtualCluster(3, faults=[Fault("kill", 2, 1)]).run(survives)
    assert sorted(rank for rank, _ in seen) == [0, 1]
    assert all("rank 2" in message for _, message in seen)


def test_control_messages_are_not_counted() -> None:
    def with_barriers(ring: Ring) -> Tensor:
        for _ in range(3):
            ring.barrier()
        return ring.shift(torch.tensor([ring.rank]))

    comm_faults = [Fault("drop", 0, 0)]
    with pytest.raises(DeadlockError, match="'shift"):
        VirtualCluster(2, faults=comm_faults).run(with_barriers)
    assert VirtualCluster(2, faults=[Fault("drop", 0, 1)]).run(with_barriers).results[0].item() == 1


def test_collectives_under_faults() -> None:
    def gather(ring: Ring) -> Tensor:
        return torch.stack(ring.all_gather(torch.tensor([ring.rank])))

    assert VirtualCluster(3, faults=[Fault("delay", 1, 1)]).run(gather).results[2].flatten().tolist() == [
        0,
        1,
        2,
    ]
    with pytest.raises(CommError):
        VirtualCluster(3, faults=[Fault("drop", 1, 1)]).run(gather)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "exchange"), [("duplicate", 0), ("reorder", 1)])
def test_faults_on_processes_end_in_errors(kind: str, exchange: int) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(four_shifts, 2, faults=[Fault(kind, 0, exchange)], timeout=20, memory=False)
    assert isinstance(caught.value.__cause__, ENDINGS[kind, exchange])


def test_random_faults_are_seeded_and_at_different_places() -> None:
    faults = random_faults(7, KINDS, world_size=4, exchanges=10, count=12)
    assert faults == random_faults(7, KINDS, 4, 10, 12)
    assert faults != random_faults(8, KINDS, 4, 10, 12)
    assert len({(f.rank, f.exchange) for f in faults}) == 12
    assert all(0 <= f.rank < 4 and 0 <= f.exchange < 10 and f.kind in KINDS for f in faults)
    assert {f.kind for f in random_faults(1, ["drop"], 2, 3, 6)} == {"drop"}
    with pytest.raises(CommError, match="at most 6"):
        random_faults(1, KINDS, 2, 3, 7)


@pytest.mark.parametrize("seed", range(8))
def test_no_random_faults_end_in_a_wrong_result(seed: int) -> None:
    """Several random faults, of all kinds but corrupt, end in an error or in the right result."""
    kinds = [kind for kind in KINDS if kind != "corrupt"]
    faults = random_faults(seed, kinds, world_size=3, exchanges=4, count=1 + seed % 4)
    try:
        results = VirtualCluster(3, faults=faults).run(four_shifts).results
    except CommError:
        return
    assert {fault.kind for fault in faults} == {"delay"}
    assert same(results, 3)


def test_bad_faults() -> None:
    with pytest.raises(CommError, match="drop, delay"):
        Fault("lose", 0, 0)
    with pytest.raises(CommError, match="0 or above"):
        Fault("drop", 0, -1)
    with pytest.raises(WorldSizeError, match=r"ranks 0\.\.1"):
        VirtualCluster(2, faults=[Fault("drop", 2, 0)]).run(four_shifts)
    with pytest.raises(CommError, match="one fault per rank and exchange"):
        VirtualCluster(2, faults=[Fault("drop", 0, 0), Fault("kill", 0, 0)]).run(four_shifts)

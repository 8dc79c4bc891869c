"""Exercise 11: what a death leaves, by formula and by events; the same answers on real processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import re

import pytest
import torch

from ringlab import VirtualCluster, errors, launch
from ringlab.comm.wrappers.faulty import Fault
from ringlab.errors import RankFailedError
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.faults import Ended, Faults
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.checking.virtual_ranks import run_virtual
from ringlab_course.exercises.e11_real_processes import lost as e11_lost
from ringlab_course.exercises.e11_real_processes import order as e11_order
from ringlab_course.exercises.e11_real_processes import uneven as e11_uneven
from ringlab_course.exercises.e11_real_processes.order import HOP
from tests.course.submissions_of import namespace, submission

RIGHT = namespace(submission("11/right_plain"))


def blocks_held(P: int, dead: int, exchange: int) -> list[int | None]:
    """Return how many blocks each rank has had when `dead` ends before its exchange of that number."""

    def program(ring):
        x, held = torch.zeros(1), 1
        try:
            while held < P:
                x, held = ring.shift(x), held + 1
        except Exception:
            pass
        return held

    results = run_virtual(P, program, Faults(kill=(dead, exchange), final=True)).results
    return [None if isinstance(count, Ended) else count for count in results]


@pytest.mark.parametrize("P", [2, 3, 5, 8])
def test_news_of_a_death_travel_one_rank_per_step(P: int) -> None:
    for dead, exchange in itertools.product(range(P), range(P - 1)):
        away = [min((rank - dead) % P, (dead - rank) % P) for rank in range(P)]
        expected = [None if rank == dead else min(exchange + away[rank], P) for rank in range(P)]
        assert blocks_held(P, dead, exchange) == expected


@pytest.mark.parametrize("P", [2, 3, 4, 7, 8, 16])
def test_every_second_rank_first_takes_two_messages_time_and_three_where_ranks_are_odd(P: int) -> None:
    run = VirtualCluster(P).run(lambda ring: RIGHT["blocking_shift"](ring, torch.tensor([ring.rank])))
    assert [int(x) for x in run.results] == [(rank - 1) % P for rank in range(P)]
    assert max(event.done for event in run.trace.exchanges()) == (2 + P % 2) * HOP


def uneven(ring, lengths):
    """The learner's two programs on shards of these lengths."""
    generator = torch.Generator().manual_seed(ring.rank)
    q, k, v = (torch.randn(1, 2, lengths[ring.rank], 4, generator=generator) for _ in range(3))
    whose = RIGHT["blocking_shift"](ring, torch.tensor([ring.rank]))
    return int(whose), *RIGHT["uneven_ring"](ring, q, k, v)


def test_real_processes_give_the_bits_of_virtual_ranks() -> None:
    lengths = (3, 0, 2)
    virtual, real = VirtualCluster(3).run(uneven, lengths).results, launch(uneven, 3, lengths).results
    assert [whose for whose, *_ in real] == [2, 0, 1]
    for (_, *ours), (_, *theirs) in zip(virtual, real, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def with_losses(ring):
    shards = (torch.full((1, 1, 2, 4), float(ring.rank)) for _ in range(3))
    print("seen", RIGHT["ring_with_losses"](ring, *shards)[2], flush=True)


def test_real_processes_keep_what_they_had_when_one_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(with_losses, 4, faults=[Fault("kill", rank=2, exchange=1)])
    assert caught.value.rank == 2
    told = re.findall(r"\[rank (\d)\] seen (\[.*\])", capfd.readouterr().out)
    said = {int(rank): json.loads(seen) for rank, seen in told}
    most = {0: 3, 1: 4, 3: 2}  # block 1 ends with rank 2; how far the others come is a matter of time
    assert set(said) == set(most)
    for rank, seen in said.items():
        assert seen == [(rank - step) % 4 for step in range(len(seen))] and 1 <= len(seen) <= most[rank]


@pytest.mark.parametrize(
    ("told", "P", "name"),
    [
        ("rank 0 waits: rank 0 sends x\nrank 1 waits: rank 1 sends x\ncycle: 0 → 1 → 0", 2, "all_send_first"),
        ("rank 0 waits: rank 0 expects x\nrank 1 waits: rank 1 expects x\ncycle: 0 → 1 → 0", 2, "all_receive_first"),
        ("rank 0 waits: rank 0 sends x\nrank 1 waits: rank 1 sends x\ncycle: 0 → 1 → 0", 3, "order_with_a_circle"),
        ("rank 0 waits: rank 0 expects x\ncycle: none: they wait for a rank that has finished", 2, "leaves_somebody_waiting"),
        ("rank 0 waits: rank 0 sends x\ncycle: 0 → 0", 1, "sends_to_itself"),
        ("Default process group has not been initialized", 2, "asks_torch_itself"),
    ],
    ids=["send", "receive", "circle", "line", "alone", "torch"],
)  # fmt: skip
def test_a_deadlock_is_told_by_what_its_ranks_began_with(told: str, P: int, name: str) -> None:
    assert e11_order.reason(Crashed("the ranks cannot finish (DeadlockError).", told), P) == name


def test_a_wrong_length_is_one_that_nobody_asked_for_or_one_of_another_block() -> None:
    crash = "the ranks cannot finish (MismatchError)."
    first, later = (f"rank 0 sends a to rank 1 (exchange {n}, 'x', tensor 0)" for n in (0, 2))
    assert e11_uneven.reason(Crashed(crash, first), (1, 2)) == "length_unknown"
    assert e11_uneven.reason(Crashed(crash, later), (1, 2)) == "length_of_another_block"
    assert e11_uneven.reason(Crashed(crash, first), (2, 2)) is None


def test_what_ranks_tell_each_other_of_lengths_is_no_block() -> None:
    run = VirtualCluster(3).run(uneven, (3, 0, 2))
    assert [e11_uneven.blocks_only(run.trace).rounds(rank) for rank in range(3)] == [2, 2, 2]
    assert run.trace.rounds(0) > 2


def test_a_rank_named_that_does_not_exist_is_told_so() -> None:
    parts = torch.zeros(1), torch.zeros(1)
    for seen, words in (([0, 2], "from 0 to 1"), (["a"], "not a rank"), (7, "a list of ranks")):
        with pytest.raises(Failure, match=words):
            e11_lost._read((*parts, seen), 0, 2, "P=2")


def losing(caught: str) -> dict[str, object]:
    """A right answer but for what it catches around the exchange."""
    code = submission("11/wrong_lost_goes_on_after_the_death").source
    code = code.replace("except PeerDiedError", f"except {caught}").replace("continue", "break")
    space: dict[str, object] = {"__name__": "losing"} | vars(errors)
    exec(code, space)
    return space


@pytest.mark.parametrize(
    ("caught", "name"),
    [
        ("PeerDiedError", None),
        ("Exception", "swallows_a_mismatch"),
        ("RinglabError", "swallows_a_mismatch"),
        ("CommError", "swallows_a_mismatch"),
        ("(PeerDiedError, MismatchError)", "swallows_a_mismatch"),
        ("(PeerDiedError, TransportTimeout)", "swallows_a_timeout"),
    ],
)
def test_around_the_exchange_nothing_but_a_death_may_be_caught(caught: str, name: str | None) -> None:
    stage = load_exercise("11").stage("11.lost")
    report = run_in_process(stage, losing(caught), tier="all", seed=1)
    failed = {check.id: check.misconception for check in report.checks if not check.ok}
    assert failed == ({"other_errors": name} if name else {})


def test_a_ring_that_asks_for_lengths_has_no_mismatch_to_let_through() -> None:
    """It answers rightly where blocks differ in length, and catches nothing that it should not."""

    def asks(ring, q, k, v):
        told = [k.shape[-2]] * ring.world_size
        with contextlib.suppress(errors.PeerDiedError):
            told = [int(n) for n in ring.all_gather(torch.tensor([k.shape[-2]]))]
        (out, lse), seen = RIGHT["nothing_seen"](q), []
        for step in range(ring.world_size):
            out, lse = RIGHT["attend"](q, k, v, out, lse)
            seen.append(ring.origin(step))
            if step < ring.world_size - 1:
                k, v = ring.shift(k, v, length=told[ring.origin(step + 1)])
        return out, lse, seen

    stage = load_exercise("11").stage("11.lost")
    report = run_in_process(stage, RIGHT | {"ring_with_losses": asks}, tier="all", seed=1)
    assert next(check for check in report.checks if check.id == "other_errors").ok

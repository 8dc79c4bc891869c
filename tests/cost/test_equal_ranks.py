"""A rank that repeats another rank's operations gets the operations and times that it would have by itself.

Some ranks repeat the operations of another rank (`equal_ranks.models_of`). In `Lockstep`, rank 0 is the model
of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.lockstep import Lockstep, evaluate_alike
from ringlab.comm.ring import Ring
from ringlab.cost import equal_ranks, ring_program, simulate
from ringlab.cost.block_time import PeakTime
from ringlab.cost.hardware import hardware
from ringlab.cost.ring_program import RingProgram
from ringlab.cost.shape_block import Prices
from ringlab.cost.simulate import FullMesh, Network, Simulation
from ringlab.cost.sizes import Attention
from ringlab.errors import CommError
from ringlab.layout import LAYOUTS, Layout, dealt, get_layout, zigzag
from ringlab.mask import Mask
from ringlab.plan import plan

H100 = hardware("h100")
TIME = PeakTime(1e9, 3e8, (4, 4))
"""Prices that differ for any two pairs of ranks with different scores."""
PROGRAM = ("starts", "kinds", "refs", "to", "source", "sent_bytes", "received_bytes", "labels")


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, Any]:
    P = draw(st.integers(2, 6))
    heads = draw(st.sampled_from([(1, 1), (4, 2)]))
    return {
        "layout": get_layout(draw(st.sampled_from(sorted(LAYOUTS))), draw(st.integers(P, 60)), P),
        "mask": Mask(causal=draw(st.booleans())),
        "schedule": draw(st.sampled_from(equal_ranks.ROTATING)),
        "backward": draw(st.booleans()),
        "sizes": Attention(H=heads[0], K=heads[1], D=4),
    }


def recording(layout: Layout, mask: Mask, schedule: str, backward: bool, sizes: Attention) -> Any:
    return RingProgram(sizes, layout, Prices(TIME, sizes), schedule, backward, mask).recording()


def each_for_itself(monkeypatch: pytest.MonkeyPatch, **run: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(ring_program, "models_of", lambda layout, *_: [*range(layout.P)])
        return recording(**run)


def sent_forms(found: Any, rank: int) -> list[Any]:
    return [number >= 0 and found.forms[number] for number in found.logs[rank].sent]


def differences_of_recordings(repeated: Any, own: Any) -> list[str]:
    """Return the parts that differ between two recordings: arrays of the programs, seconds, memory."""
    found = [
        name
        for name in PROGRAM
        if not np.array_equal(getattr(repeated.program, name), getattr(own.program, name))
    ]
    found += ["forms"] * any(sent_forms(repeated, rank) != sent_forms(own, rank) for rank in range(own.P))
    found += ["seconds"] * any(a.seconds != b.seconds for a, b in zip(repeated.logs, own.logs, strict=True))
    return found + ["memory"] * (repeated.memory != own.memory)


@pytest.mark.slow
@settings(max_examples=100)
@given(run=settings_of_a_run())
def test_repeated_operations_are_those_of_ranks_that_run_themselves(run: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = each_for_itself(monkeypatch, **run)
        monkeypatch.setattr(equal_ranks, "FEWEST_EQUAL", 0)
        assert differences_of_recordings(recording(**run), own) == []


def test_a_rank_whose_blocks_have_other_lengths_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose shard has another length runs itself; a mutant that treats all ranks as equal is noticed."""
    run = {"layout": get_layout("contiguous", 11, 4), "mask": Mask(), "schedule": "ring", "backward": False}
    run["sizes"] = Attention(H=1, K=1, D=4)
    assert len(set(equal_ranks.models_of(run["layout"], "ring", run["mask"], False))) == 4
    own = each_for_itself(monkeypatch, **run)
    monkeypatch.setattr(equal_ranks, "FEWEST_EQUAL", 0)
    monkeypatch.setattr(ring_program, "models_of", lambda layout, *_: [0] * layout.P)
    try:
        assert differences_of_recordings(recording(**run), own)
    except CommError as error:
        assert "messages" in str(error) or "sends" in str(error)


def test_few_ranks_run_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank runs for all in a contiguous causal ring, whose ranks differ in work but not in program."""
    ran = []
    real = ClockedCluster.run_alike
    monkeypatch.setattr(
        ClockedCluster,
        "run_alike",
        lambda self, program, models, seconds: (
            ran.append(set(models)) or real(self, program, models, seconds)
        ),
    )
    found = recording(get_layout("contiguous", 256, 16), Mask(), "ring", False, Attention(H=2, K=1, D=4))
    assert ran == [{0}] and len({tuple(log.seconds) for log in found.logs}) == 16


@pytest.mark.parametrize(
    ("schedule", "mask"), [("bidirectional", Mask()), ("ring", Mask(window=5)), ("double-ring", Mask())]
)
def test_what_is_not_known_to_repeat_runs_on_every_rank(schedule: str, mask: Mask) -> None:
    layout = get_layout("zigzag", 32, 4)
    assert equal_ranks.models_of(layout, schedule, mask, False) == [0, 1, 2, 3]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    P = draw(st.integers(2, 9))
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    heads = draw(st.sampled_from([(1, 1), (4, 2)]))
    network = draw(
        st.sampled_from(
            [
                None,
                Network(P, 1e9, 1e-6, 1e8, 1e-5, 3),
                Network.free(P),
                FullMesh(P, 1e8, 1e-6),
                FullMesh(P, 1e8, 1e-6, links=2),
            ]
        )
    )
    slow = draw(st.dictionaries(st.integers(0, P - 1), st.floats(0.5, 3.0), max_size=2))
    S = draw(st.one_of(st.integers(1, 6).map(lambda n: 2 * P * n), st.integers(P, 12 * P)))
    return {
        "layout": get_layout(name, S, P),
        "sizes": Attention(H=heads[0], K=heads[1], D=4, causal=draw(st.booleans())),
        "schedule": draw(st.sampled_from(equal_ranks.ROTATING)),
        "backward": draw(st.booleans()),
        "network": network,
        "slow": slow,
    }


def simulated(
    monkeypatch: pytest.MonkeyPatch, fewest: int, layout: Any, sizes: Any, **how: Any
) -> Simulation:
    """Return a simulation that uses `Lockstep` for at least `fewest` ranks and shows three ranks."""
    with monkeypatch.context() as patched:
        patched.setattr(simulate, "FEWEST_IN_LOCKSTEP", fewest)
        patched.setattr(simulate, "shown_ranks", lambda P: [0, P // 2, P - 1])
        return simulate.simulate(sizes, layout, H100, block_time=TIME, **how)


def differences(together: Simulation, each: Simulation) -> list[str]:
    figures = [dict(run.as_dict(), wall_s=0, cpu_s=0) for run in (together, each)]
    found = [name for name in figures[1] if figures[0][name] != figures[1][name]]
    pairs = ((together.timeline, each.timeline), (together.free, each.free))
    for name in ("ends_of_ranks", "busy_s", "waited_s", "makespan_s"):
        found += [name for a, b in pairs if not np.array_equal(getattr(a, name), getattr(b, name))]
    kept = sorted({0, each.P // 2, each.P - 1})
    for rank in kept:
        strips = zip(together.timeline.strip(rank), each.timeline.strip(rank), strict=True)
        found += ["strip"] * any(not np.array_equal(a, b) for a, b in strips)
    return found + ["trace"] * (together.timeline.trace(kept).events != each.timeline.trace(kept).events)


@settings(max_examples=100)
@given(request=requests())
def test_ranks_that_go_on_together_have_the_times_of_ranks_that_run(request: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        each = simulated(monkeypatch, 10**9, **request)
        together = simulated(monkeypatch, 2, **request)
    mask = Mask(causal=request["sizes"].causal)
    go = equal_ranks.go_together(request["layout"], request["schedule"], mask, request["backward"])
    assert isinstance(together.timeline, Lockstep) == go
    assert differences(together, each) == []


def test_most_requests_go_together_and_contiguous_gradients_do_not() -> None:
    causal = Mask(causal=True)
    for name in LAYOUTS:
        layout = get_layout(name, 64, 8)
        assert equal_ranks.go_together(layout, "ring", causal, False)
        assert equal_ranks.go_together(layout, "allgather", Mask(causal=False), True)
        assert equal_ranks.go_together(layout, "ring", causal, True) == (name != "contiguous")
        assert not equal_ranks.go_together(layout, "ulysses", causal, False)
        assert not equal_ranks.go_together(layout, "ring", Mask(window=5), False)
        assert equal_ranks.go_together(get_layout(name, 67, 8), "ring", causal, False)
        assert not equal_ranks.go_together(get_layout(name, 67, 8), "ring", Mask(causal=False), True)
    assert not equal_ranks.go_together(dealt(64, 8, chunk=2), "ring", causal, False)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("P", range(2, 13))
def test_what_a_rank_sees_of_a_block_depends_on_its_kind_and_on_the_blocks_side(name: str, P: int) -> None:
    for S in range(P, 7 * P):
        layout = get_layout(name, S, P)
        made, kinds = plan(layout, Mask(causal=True)), equal_ranks.kinds(layout)
        known: dict[Any, Any] = {}
        for rank in range(P):
            for origin in range(P):
                side = 0 if origin < rank else 1 if origin == rank else 2
                tiles = made.of(rank, origin)
                assert known.setdefault((kinds[rank], kinds[origin], side), tiles) == tiles, (S, rank, origin)


def test_a_rank_that_is_not_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, sizes = zigzag(64, 8), Attention(H=1, K=1, D=4)
    done = simulated(monkeypatch, 2, layout, sizes)
    with pytest.raises(CommError, match=r"ranks among 0, 4, 7.*\n.*rank 1"):
        done.timeline.strip(1)
    with pytest.raises(CommError, match="8 ranks"):
        done.trace()


def _late(ring: Ring) -> None:
    """Send in one exchange, and receive in the next one."""
    x = torch.empty(3, device="meta")
    to, source = (ring.rank + 1) % 4, (ring.rank - 1) % 4
    sent = ring.comm.exchange(send=(x,), to=to)
    ring.comm.exchange(receive=(x,), source=source).wait()
    sent.wait()


def _uneven(ring: Ring) -> None:
    sent, received = (torch.empty(n, device="meta") for n in (3, 2))
    ring.comm.exchange(
        send=(sent,), to=(ring.rank + 1) % 4, receive=(received,), source=(ring.rank - 1) % 4
    ).wait()


def _first_alone(ring: Ring) -> None:
    ring.comm.exchange(send=(torch.empty(3, device="meta"),), to=(ring.rank + 1) % 4).wait()


def _last_alone(ring: Ring) -> None:
    ring.comm.exchange(receive=(torch.empty(3, device="meta"),), source=(ring.rank - 1) % 4).wait()


def evaluated(program: Any) -> Lockstep | None:
    found = ClockedCluster(4).run_some(program)
    return evaluate_alike(found.logs[0], found.forms, 4, Network.uniform(4, 1e9), lambda label: np.zeros(4))


def test_messages_that_are_received_by_another_exchange_are_left_to_the_clock() -> None:
    assert evaluated(_late) is None


def repeated(program: Any) -> None:
    """Run `program` with rank 0 as the model of all ranks."""
    ClockedCluster(4).run_alike(program, [0, 0, 0, 0], lambda rank, labels: np.zeros(len(labels)))


@pytest.mark.parametrize("run", [evaluated, repeated])
@pytest.mark.parametrize(
    ("program", "says"),
    [(_uneven, "same form"), (_first_alone, "as many"), (_last_alone, "as many")],
)
def test_messages_that_do_not_fit_are_refused(
    program: Callable[[Ring], None], says: str, run: Callable[[Any], Any]
) -> None:
    """Messages without a fitting partner are refused: unequal sizes, or only a send or only a receive."""
    with pytest.raises(CommError, match=says):
        run(program)


@pytest.mark.thorough
def test_eight_thousand_ranks_are_simulated_without_their_operations() -> None:
    P = 8192
    done = simulate.simulate(Attention(H=1, K=1, D=4), zigzag(2 * P, P), H100)
    assert done.P == P and len(done.busy_s) == P and len(done.recording.logs[1].codes) == 0
    hop_bytes = 2 * 2 * 4 * 2  # K and V × two tokens × D × bytes of bfloat16
    assert done.bytes_sent == P * (P - 1) * hop_bytes

"""Ranks that go on together have the times, to the last bit, that they have where each runs and is clocked for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.lockstep import Lockstep, evaluate_alike
from ringlab.comm.ring import Ring
from ringlab.cost import equal_ranks, simulate
from ringlab.cost.block_time import PeakTime
from ringlab.cost.full_mesh import FullMesh
from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import Network, Simulation
from ringlab.cost.sizes import Attention
from ringlab.errors import CommError
from ringlab.layout import LAYOUTS, dealt, get_layout, zigzag
from ringlab.mask import Mask
from ringlab.plan import plan

H100 = hardware("h100")


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
    """Prices differ for any two pairs of ranks with other scores; several ranks that are drawn are kept."""
    with monkeypatch.context() as patched:
        patched.setattr(simulate, "FEWEST_IN_LOCKSTEP", fewest)
        patched.setattr(simulate, "shown_ranks", lambda P: [0, P // 2, P - 1])
        return simulate.simulate(sizes, layout, H100, block_time=PeakTime(1e9, 3e8, (4, 4)), **how)


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


@settings(max_examples=200)
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
    """It sends in one exchange, and receives in the next one."""
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


@pytest.mark.parametrize(
    ("program", "says"), [(_uneven, "one form"), (_first_alone, "as many"), (_last_alone, "as many")]
)
def test_messages_that_do_not_fit_are_refused(program: Any, says: str) -> None:
    with pytest.raises(CommError, match=says):
        evaluated(program)


def test_eight_thousand_ranks_are_simulated_without_their_operations() -> None:
    P = 8192
    done = simulate.simulate(Attention(H=1, K=1, D=4), zigzag(2 * P, P), H100)
    assert done.P == P and len(done.busy_s) == P and len(done.recording.logs[1].codes) == 0
    hop_bytes = 2 * 2 * 4 * 2  # K and V, two tokens, D, bfloat16
    assert done.bytes_sent == P * (P - 1) * hop_bytes

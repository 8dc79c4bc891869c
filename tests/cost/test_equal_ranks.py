"""Operations that the simulator repeats from rank to rank are those that each rank records when it runs itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.ring import Ring
from ringlab.cost import equal_ranks, ring_program
from ringlab.cost.block_time import PeakTime
from ringlab.cost.ring_program import RingProgram
from ringlab.cost.shape_block import Prices
from ringlab.cost.sizes import Attention
from ringlab.errors import CommError
from ringlab.layout import Layout, get_layout
from ringlab.mask import Mask

NAMES = ("contiguous", "striped", "zigzag")
PROGRAM = ("starts", "kinds", "refs", "to", "source", "sent_bytes", "received_bytes", "labels")


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, Any]:
    P = draw(st.integers(2, 6))
    heads = draw(st.sampled_from([(1, 1), (4, 2)]))
    return {
        "layout": get_layout(draw(st.sampled_from(NAMES)), draw(st.integers(P, 60)), P),
        "mask": Mask(causal=draw(st.booleans())),
        "schedule": draw(st.sampled_from(equal_ranks.ROTATING)),
        "backward": draw(st.booleans()),
        "sizes": Attention(H=heads[0], K=heads[1], D=4),
    }


def recording(layout: Layout, mask: Mask, schedule: str, backward: bool, sizes: Attention) -> Any:
    """Return the recording; prices differ for any two pairs of ranks with other scores."""
    prices = Prices(PeakTime(1e9, 3e8, (4, 4)), sizes)
    return RingProgram(sizes, layout, prices, schedule, backward, mask).recording()


def each_for_itself(monkeypatch: pytest.MonkeyPatch, **run: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(ring_program, "models_of", lambda layout, *_: [*range(layout.P)])
        return recording(**run)


def sent_forms(found: Any, rank: int) -> list[Any]:
    return [number >= 0 and found.forms[number] for number in found.logs[rank].sent]


def differences(repeated: Any, own: Any) -> list[str]:
    """Return what differs between two recordings: the arrays of their programs, their seconds, their memory."""
    found = [
        name
        for name in PROGRAM
        if not np.array_equal(getattr(repeated.program, name), getattr(own.program, name))
    ]
    found += ["forms"] * any(sent_forms(repeated, rank) != sent_forms(own, rank) for rank in range(own.P))
    found += ["seconds"] * any(a.seconds != b.seconds for a, b in zip(repeated.logs, own.logs, strict=True))
    return found + ["memory"] * (repeated.memory != own.memory)


@pytest.mark.slow
@settings(max_examples=150)
@given(run=settings_of_a_run())
def test_repeated_operations_are_those_of_ranks_that_run_themselves(run: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = each_for_itself(monkeypatch, **run)
        monkeypatch.setattr(equal_ranks, "FEWEST_EQUAL", 0)
        assert differences(recording(**run), own) == []


def _uneven(ring: Ring) -> None:
    sent, received = (torch.empty(n, device="meta") for n in (3, 2))
    work = ring.comm.exchange(
        send=(sent,), to=(ring.rank + 1) % 4, receive=(received,), source=(ring.rank - 1) % 4
    )
    work.wait()


def _first_alone(ring: Ring) -> None:
    ring.comm.exchange(send=(torch.empty(3, device="meta"),), to=(ring.rank + 1) % 4).wait()


def test_a_rank_whose_blocks_have_other_lengths_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes all ranks for equal: messages do not fit, or bytes differ."""
    run = {"layout": get_layout("contiguous", 11, 4), "mask": Mask(), "schedule": "ring", "backward": False}
    run["sizes"] = Attention(H=1, K=1, D=4)
    assert len(set(equal_ranks.models_of(run["layout"], "ring", run["mask"], False))) == 4
    own = each_for_itself(monkeypatch, **run)
    monkeypatch.setattr(equal_ranks, "FEWEST_EQUAL", 0)
    monkeypatch.setattr(ring_program, "models_of", lambda layout, *_: [0] * layout.P)
    try:
        assert differences(recording(**run), own)
    except CommError as error:
        assert "messages" in str(error) or "sends" in str(error)


@pytest.mark.parametrize(
    ("program", "says"),
    [(_uneven, "one form"), (_first_alone, "as many sends as receives")],
    ids=["other lengths", "a rank alone"],
)
def test_models_whose_messages_do_not_fit_are_refused(program: Any, says: str) -> None:
    """Rank 0 as the model of all: it sends three numbers and receives two, or has nobody who receives."""
    with pytest.raises(CommError, match=says):
        ClockedCluster(4).run_alike(program, [0, 0, 0, 0], lambda rank, labels: np.zeros(len(labels)))


def test_few_ranks_run_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a causal mask contiguous shards give no two ranks the same work, and yet one program."""
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

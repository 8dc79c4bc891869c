"""What a learner's ring program may do with tensors on their way, in the notebook; the judge's tests hold the rest."""

from __future__ import annotations

import pytest
import torch

from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.comm.wrappers.strict import Strict
from ringlab.errors import CommError


def run(program, P: int = 3):
    return VirtualCluster(P).run(
        lambda ring: program(Ring(Strict(ring.comm)), torch.full((4,), 1.0 + ring.rank))
    )


def test_a_program_that_keeps_the_rules_notices_nothing() -> None:
    def double_buffered(ring, x):
        spare = torch.empty_like(x)
        for step in range(2):
            work = ring.post(x, into=(spare,))
            ring.compute(f"{step}", torch.sum, x)
            (received,) = work.wait()
            x, spare = received, x
            spare.zero_()  # allowed from here on
        return x

    outcome = run(double_buffered)
    assert [r[0].item() for r in outcome.results] == [2.0, 3.0, 1.0]
    assert outcome.trace.exposed() == 0 and outcome.trace.rounds(0) == 2


def test_a_buffer_on_its_way_holds_nan() -> None:
    def impatient(ring, x):
        buffer = torch.ones_like(x)
        work = ring.post(x, into=(buffer,))
        early = buffer.clone()
        work.wait()
        return early, buffer

    early, late = run(impatient, 2).results[0]
    assert torch.isnan(early).all() and (late == 2).all()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(2, 2).view(4)])
def test_one_buffer_for_both_is_refused(view) -> None:
    with pytest.raises(CommError, match="also sent"):
        run(lambda ring, x: ring.post(x, into=(view(x),)).wait())


def test_writing_what_is_sent_is_refused_through_a_view_too() -> None:
    def hasty(ring, x):
        part, work = x[:2], ring.post(x)
        part.mul_(2)
        return work.wait()

    with pytest.raises(CommError, match="written while it was sent"):
        run(hasty)


def test_collectives_and_empty_tensors_pass() -> None:
    def collective(ring, x):
        ring.barrier()
        empty = ring.shift(x[:0])
        return ring.all_reduce(x), empty

    total, empty = run(collective).results[1]
    assert total[0] == 6 and empty.numel() == 0

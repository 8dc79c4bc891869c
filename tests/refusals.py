"""The check that every refusal has to pass: each rank gets its error, and nothing was sent before it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, RinglabError


def error_of(call: Callable[[], Any]) -> Exception | None:
    """Return the error of a call, or None. A caller's own object may raise a KeyError or an ArithmeticError."""
    try:
        call()
    except (RinglabError, KeyError, ArithmeticError) as error:
        return error
    return None


def errors_on(P: int, call: Callable[[Ring], Any]) -> list[Exception | None]:
    """Return each rank's error of a call, and fail if the ranks sent anything else than their agreement."""
    outcome = VirtualCluster(P, memory=False).run(lambda ring: error_of(lambda: call(ring)))
    assert outcome.trace.bytes_sent() == 0
    return outcome.results


def assert_refused(
    P: int, call: Callable[[Ring, bool], Any], kind: type[Exception], words: str, wrong: Collection[int]
) -> None:
    """Fail unless the ranks in `wrong` get the error, and the others learn which rank is wrong.

    call: takes the ring, and whether this rank calls wrongly.
    """
    for rank, error in enumerate(errors_on(P, lambda ring: call(ring, ring.rank in wrong))):
        assert type(error) is (kind if rank in wrong else AgreementError), error
        assert (words if rank in wrong else f"rank {min(wrong)}: error {kind.__name__}") in str(error), error

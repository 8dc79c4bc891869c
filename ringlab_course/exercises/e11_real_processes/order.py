"""Checks of 11.order: a shift by one blocking send and one blocking receive on every rank.

Virtual ranks and the judge buffer nothing: a send ends only when its receiver receives it. So an order that
can deadlock does deadlock in these checks, every time and for messages of any size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

HOP = 0.5
"""The duration of a message in virtual seconds."""


def _tensors(
    rng: np.random.Generator, P: int, dtype: torch.dtype = torch.float32, most: int = 100_000
) -> list[torch.Tensor]:
    """Return one x per rank, of whole numbers below `most`. No number occurs twice."""
    numbers = rng.permutation(most)[: 2 * P].reshape(P, 2)
    return [torch.from_numpy(row).to(dtype) for row in numbers]


def _run(subject: Any, xs: Sequence[torch.Tensor], text: str) -> Any:
    """Return the outcome of the learner's program.

    Raises: the named mistake if a known mistake kept the ranks from ending.
    """
    try:
        return subject.run_ring(len(xs), xs)
    except Crashed as crash:
        name = reason(crash, len(xs))
        if name is None:
            raise
        # The remedy is cut off, because it suggests calls that this stage forbids.
        stuck, _, _ = crash.counterexample.partition("\nremedy:")
        raise STAGE.misconception(name).failure(f"{text}\n{stuck}") from None


def reason(crash: Crashed, P: int) -> str | None:
    """Return the name of the mistake that kept the ranks from ending, or None if it is unknown."""
    told = crash.counterexample
    if "process group" in told:
        return "asks_torch_itself"
    if "MismatchError" in crash.message:
        return "receives_another_form"
    if "never waited" in told:
        return "posts_and_leaves"
    if "DeadlockError" not in crash.message:
        return "leaves_somebody_waiting" if "ended without it" in told else None
    waiting = [line for line in told.splitlines() if " waits: " in line]
    if P == 1:
        return "sends_to_itself"
    if "cycle: none" in told:
        return "leaves_somebody_waiting"
    if len(waiting) == P and all(" sends " in line for line in waiting):
        return "all_send_first"
    if len(waiting) == P and all(" expects " in line for line in waiting):
        return "all_receive_first"
    ends = [found for line in waiting for found in _EXPECTS.finditer(line)]
    if P > 2 and any(int(source) == (int(rank) + 1) % P for rank, source in (end.groups() for end in ends)):
        return "receives_from_the_next"
    return "order_with_a_circle"


_EXPECTS = re.compile(r"rank (\d{1,4}) expects \S+?\[[^\]]*\] from rank (\d{1,4}) ")


def _verify(subject: Any, xs: Sequence[torch.Tensor], text: str) -> Any:
    """Return the outcome of the program. Raises: Failure unless every rank returns the previous rank's x."""
    outcome, P = _run(subject, xs, text), len(xs)
    whose: list[int | None] = []
    for rank, result in enumerate(outcome.results):
        if not isinstance(result, torch.Tensor):
            raise Failure(f"A tensor is wanted, not a {type(result).__name__}.", f"{text}: rank {rank}")
        same = [o for o, x in enumerate(xs) if result.shape == x.shape and torch.equal(result.to(x.dtype), x)]
        whose.append(same[0] if same else None)
        if result.dtype != xs[0].dtype:
            raise STAGE.misconception("receives_another_form").failure(
                f"{text}: {result.dtype} on rank {rank}"
            )
    if whose != [(rank - 1) % P for rank in range(P)]:
        got = ", ".join(
            f"rank {r} returned the x of {'nobody' if o is None else f'rank {o}'}"
            for r, o in enumerate(whose)
        )
        name = next((name for name, made in _MADE.items() if whose == made(P)), None)
        failure: Callable[[str], Failure] = (
            STAGE.misconception(name).failure
            if name
            else lambda example: Failure("A rank returns another x than the previous rank's.", example)
        )
        raise failure(f"{text}: {got}")
    return outcome


def _passed_on(P: int) -> list[int]:
    """Return the owner of the x that each rank gets, if ranks that receive first send on what they received."""
    sent = list(range(P))
    for rank in range(1, P, 2):
        sent[rank] = rank - 1
    return [sent[(rank - 1) % P] for rank in range(P)]


_MADE: dict[str, Callable[[int], list[int]]] = {
    "returns_its_own": lambda P: list(range(P)),
    "other_direction": lambda P: [(rank + 1) % P for rank in range(P)],
    "passes_on_what_arrived": _passed_on,
    "swaps_with_a_partner": lambda P: [rank ^ 1 if rank ^ 1 < P else rank for rank in range(P)],
}
"""For each common mistake, a function of P that returns the owner of the x that each rank then holds."""


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 3, 4, 5):
        _verify(subject, _tensors(rng, P), f"P={P}")


def _check_alone(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, _tensors(rng, 1), "P=1")


def _check_forms(subject: Any, rng: np.random.Generator) -> None:
    for dtype in (torch.int64, torch.float64, torch.bfloat16):
        xs = [x.reshape(1, 2, 1) for x in _tensors(rng, 3, dtype, most=256)]  # exact in bfloat16
        _verify(subject, xs, f"P=3, {str(dtype).removeprefix('torch.')}")


def _check_one_way(subject: Any, rng: np.random.Generator) -> None:
    for P in (3, 2, 4):
        trace = _verify(subject, _tensors(rng, P), f"P={P}").trace
        for rank in range(P):
            events = trace.exchanges(rank, control=True)
            sends, receives = ([e for e in events if getattr(e, end) is not None] for end in ("to", "source"))
            both = [e for e in events if e.to is not None and e.source is not None]
            example = f"P={P}: rank {rank} made {len(sends)} sends and {len(receives)} receives"
            if len(sends) > 1 or len(receives) > 1:
                raise STAGE.misconception("more_messages_than_needed").failure(example)
            if both:
                raise STAGE.misconception("posts_both_at_once").failure(f"{example}, in one exchange")


def _check_three_hops(subject: Any, rng: np.random.Generator) -> None:
    for P in (8, 9):
        trace = _verify(subject, _tensors(rng, P), f"P={P}").trace
        end = max((e.done for e in trace.exchanges()), default=0.0)
        if end > 3 * HOP + 1e-9:
            example = f"P={P}: the last rank is done after the time of {end / HOP:g} messages, 3 are possible"
            raise STAGE.misconception("one_after_another").failure(example)


HINTS = (
    "If every rank begins with a send, which rank is there to receive? And how many ranks have to begin with a receive, so "
    "that there is no circle, and no long line either?",
    "Let one half of the ranks send first and the other half receive first, so that neighbours differ. If the number of ranks "
    "is odd, two neighbours begin alike: does that make a circle? One rank alone has no other to send to.",
    r"rank $r$ sends first where $r \bmod 2 = 0$; 2 messages' time for even $P$, 3 for odd $P$, against $P$ with a single rank "
    "that receives first",
)

STAGE = Stage(
    id="11.order",
    function="blocking_shift",
    title="An order of sends and receives that cannot deadlock",
    kind="ring",
    helpers=("send", "receive"),
    hints=HINTS,
    misconceptions=misconceptions_of("11.order"),
    checks=(
        Check("values", 3, "visible", "every rank gets its neighbour's x, P = 2 to 5", _check_values),
        Check("alone", 1, "visible", "one rank alone", _check_alone),
        Check(
            "one_way",
            2,
            "visible",
            "one send and one receive on every rank, each an exchange of its own",
            _check_one_way,
            kind="cost",
        ),
        Check("forms", 1, "visible", "tensors of other shapes and dtypes", _check_forms),
        Check(
            "three_hops",
            2,
            "visible",
            "eight and nine ranks are done in three messages' time",
            _check_three_hops,
            kind="speed",
        ),
    ),
)

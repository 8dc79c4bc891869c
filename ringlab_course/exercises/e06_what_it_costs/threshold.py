"""Checks of 06.threshold: the least number of tokens per rank that hides a hop, from a data sheet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import answered_number
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of


@dataclass(frozen=True)
class Sheet:
    """Figures of an accelerator, its link, and the attention that it computes."""

    flops_per_s: float = 312e12
    rate: float = 300.0
    unit: str = "GB/s"
    directions: int = 1
    element_bytes: int = 2
    group: int = 1
    causal: bool = False

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.flops_per_s, self.rate, self.unit, self.directions

    @property
    def keywords(self) -> dict[str, Any]:
        return {name: asdict(self)[name] for name in ("element_bytes", "group", "causal")}

    @property
    def text(self) -> str:
        ways = "in each direction" if self.directions == 1 else "both directions together"
        mask = "causal, balanced" if self.causal else "no mask"
        return (
            f"{self.flops_per_s / 1e12:g} TFLOP/s, {self.rate:g} {self.unit} ({ways}), {self.element_bytes} bytes per element, "
            f"{self.group} query head{'s' * (self.group > 1)} per K/V head, {mask}"
        )


def bytes_per_s(rate: float, unit: str, directions: int) -> float:
    """Return the bytes per second that a link carries in one direction."""
    return rate * 1e9 / (8 if unit == "Gbit/s" else 1) / directions


def least_tokens(
    flops_per_s: float,
    rate: float,
    unit: str,
    directions: int,
    *,
    element_bytes: int = 2,
    group: int = 1,
    causal: bool = False,
) -> float:
    """Return the L for which 4·L²·D·H·(½ if causal)/F = 2·L·K·D·e/β, the right answer of this stage."""
    share = 0.5 if causal else 1.0
    return element_bytes * flops_per_s / (2 * bytes_per_s(rate, unit, directions) * group * share)


def _machine(rng: np.random.Generator, **more: Any) -> Sheet:
    """Return figures of an invented machine whose threshold is not an integer."""
    while True:
        flops, rate = rng.integers(500, 10000) * 1e11, rng.integers(100, 1800) / 2
        sheet = Sheet(float(flops), float(rate), **more)
        if least_tokens(*sheet.inputs, **sheet.keywords) % 1:
            return sheet


def _on(*sheets: dict[str, Any]) -> Any:
    """Return a check of sheets with these fields, after a plain sheet.

    A mistake that shows on the plain sheet is not taken for a mistake about the fields.
    """

    def run(subject: Any, rng: np.random.Generator) -> None:
        _compare(subject, [_machine(rng, **more) for more in ({}, *sheets)])

    return run


def _check_mixed(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on sheets with random figures in which all conditions come together."""
    for _ in range(4):
        link = float(rng.uniform(0.1, 900)), str(rng.choice(["GB/s", "Gbit/s"])), int(rng.integers(1, 3))
        group, element_bytes = int(rng.integers(2, 17)), int(rng.choice([1, 4, 8]))
        sheet = Sheet(float(rng.uniform(1e9, 1e15)), *link, element_bytes, group, True)
        alone = (Sheet(*sheet.inputs), replace(sheet, causal=False), replace(sheet, group=1))
        for given in (*alone, sheet):
            try:
                _compare(subject, (given,))
            except Failure as failure:
                if given is sheet and failure.message.endswith("wrong values."):
                    together = mistakes_of("06.threshold")("one_condition_at_a_time")
                    raise together.failure(failure.counterexample) from None
                raise


def _compare(subject: Any, sheets: Iterable[Sheet]) -> None:
    compare_all(_answered(subject, sheet) for sheet in sheets)


def _answered(subject: Any, sheet: Sheet) -> Answered:
    answer = subject.call(*sheet.inputs, **sheet.keywords)
    truth = least_tokens(*sheet.inputs, **sheet.keywords)
    return answered_number(answer, truth, text=sheet.text, unit="tokens")


HINTS = (
    "Computation and message both grow with L, the tokens per rank: one like L, the other like L². Which is which? What "
    "does that say about a large L?",
    "Write down the seconds of a step, FLOPs over F, and the seconds of a hop, bytes over β. There are H query heads and "
    "H/group K/V heads. Set the two equal: D and H cancel. Then convert the data sheet's rate to bytes per second in one "
    "direction.",
    r"$\dfrac{4L^2DH}{F} \cdot \left(\tfrac12 \text{ if causal}\right) \ge \dfrac{2L\,D\,e\,H/\mathrm{group}}{\beta}$",
)

STAGE = Stage(
    id="06.threshold",
    function="least_tokens",
    title="The tokens per rank that hide a hop",
    hints=HINTS,
    misconceptions=misconceptions_of("06.threshold"),
    checks=(
        Check("plain", 2, "visible", "one direction, GB/s, two bytes, no mask", _on({})),
        Check(
            "sheet",
            2,
            "visible",
            "rates as data sheets state them",
            _on({"directions": 2}, {"unit": "Gbit/s"}, {"unit": "Gbit/s", "directions": 2}),
        ),
        Check("groups", 1, "visible", "fewer K/V heads than query heads", _on({"group": 8}, {"group": 3})),
        Check("causal", 1, "visible", "a balanced causal mask", _on({"causal": True}, {"causal": True})),
        Check(
            "elements",
            1,
            "visible",
            "elements of one and of four bytes",
            _on({"element_bytes": 4}, {"element_bytes": 1}),
        ),
        Check("mixed", 1, "held-out", "everything at once", _check_mixed),
    ),
)

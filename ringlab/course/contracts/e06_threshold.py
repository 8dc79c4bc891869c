"""Checks of 06.threshold: tokens per rank from which a hop hides, out of a data sheet's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ringlab.course.contract import Check, Failure, Misconception, Stage
from ringlab.course.contracts.e06_numbers import NumberCase, compare_numbers


@dataclass(frozen=True)
class Sheet:
    """What is known of an accelerator and its link, and of the attention that it computes."""

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
    """Return what travels in one direction in a second, in bytes."""
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
    """Return c with 4·c²·D·H·(½ if causal)/F = 2·c·K·D·e/B: the truth of this stage."""
    share = 0.5 if causal else 1.0
    return element_bytes * flops_per_s / (2 * bytes_per_s(rate, unit, directions) * group * share)


def _times(factor: Any) -> Any:
    """Return an imitation: the truth times factor(inputs as a Sheet)."""

    def imitate(*inputs: Any, **keywords: Any) -> float:
        sheet = Sheet(*inputs, **keywords)
        return least_tokens(*inputs, **keywords) * factor(sheet)

    return imitate


PLAIN = (
    Misconception(
        "two_flops",
        "The threshold is twice too high: that is what 2·c²·D FLOPs per step and head give. There are two matrix products, "
        "q·kᵀ and weights·V, of c²·D multiply-adds each, and a multiply-add is two FLOPs: 4·c²·D.",
        _times(lambda sheet: 2),
    ),
    Misconception(
        "forgets_values",
        "The threshold is half of what it should be: a block has K and V, and both travel. Count 2·c·D elements per K/V head.",
        _times(lambda sheet: 0.5),
    ),
    Misconception(
        "binary_giga",
        "A giga on a data sheet is 10⁹. You took 2³⁰ bytes for a GB, which makes the link 7% too fast.",
        _times(lambda sheet: 1e9 / 2**30),
    ),
    Misconception(
        "rounds",
        "The result is rounded. Leave it as it is: who asks for a threshold may want to go on computing with it.",
        lambda *inputs, **keywords: math.ceil(least_tokens(*inputs, **keywords)),
    ),
)
SHEET = (
    Misconception(
        "both_directions",
        "Blocks travel in one direction. A rate that counts both directions together, as NVLink's does, offers half of it "
        "to each.",
        _times(lambda sheet: 1 / sheet.directions),
    ),
    Misconception(
        "bits_as_bytes",
        "Networks are sold in bits per second: a Gbit/s is an eighth of a GB/s, so the threshold is eight times as high.",
        _times(lambda sheet: 1 / 8 if sheet.unit == "Gbit/s" else 1),
    ),
)
ELEMENTS = Misconception(
    "ignores_element_bytes",
    "c = F/B holds for elements of two bytes. With e bytes per element a hop takes e/2 times as long.",
    _times(lambda sheet: 2 / sheet.element_bytes),
)
GROUPS = (
    Misconception(
        "ignores_groups",
        "You moved as many K/V heads as there are query heads. With `group` query heads to a K/V head the work stays, and "
        "the bytes are divided by `group`.",
        _times(lambda sheet: sheet.group),
    ),
    Misconception(
        "groups_upside_down",
        "Shared K/V heads make hiding easier, not harder: fewer bytes travel for the same work. Divide by `group`.",
        _times(lambda sheet: sheet.group**2),
    ),
)
CAUSAL = (
    Misconception(
        "ignores_causal",
        "Under a balanced causal mask a rank computes only half of the pairs of a step, yet the whole block travels. "
        "There is half the time to hide the same bytes.",
        _times(lambda sheet: 0.5 if sheet.causal else 1),
    ),
    Misconception(
        "causal_makes_it_easier",
        "A causal mask halves the computation, not the message: it doubles the threshold, you halved it.",
        _times(lambda sheet: 0.25 if sheet.causal else 1),
    ),
)
TOGETHER = Misconception(
    "one_condition_at_a_time",
    "Shared heads alone are right, a causal mask alone is right, both together are not. Every condition is a factor of its "
    "own, and none of them excludes another.",
)
MISTAKES = (*PLAIN, *SHEET, ELEMENTS, *GROUPS, *CAUSAL, TOGETHER)


def _on(*sheets: Sheet, mistakes: tuple[Misconception, ...]) -> Any:
    """Return a check of these sheets, the plainest first: a mistake that shows there is not taken for another."""

    def run(subject: Any, rng: np.random.Generator) -> None:
        _compare(subject, sheets, (*mistakes, *(m for m in PLAIN if m not in mistakes)))

    return run


def _check_mixed(subject: Any, rng: np.random.Generator) -> None:
    """Everything at once, on figures of nobody's data sheet; names no mistake that the other checks tell apart."""
    for _ in range(4):
        link = float(rng.uniform(0.1, 900)), str(rng.choice(["GB/s", "Gbit/s"])), int(rng.integers(1, 3))
        group, element_bytes = int(rng.integers(2, 17)), int(rng.choice([1, 4, 8]))
        sheet = Sheet(float(rng.uniform(1e9, 1e15)), *link, element_bytes, group, True)
        alone = (Sheet(*sheet.inputs), replace(sheet, causal=False), replace(sheet, group=1))
        for given in (*alone, sheet):
            try:
                _compare(subject, (given,), ())
            except Failure as failure:
                if given is sheet and failure.message.endswith("wrong values."):
                    raise TOGETHER.failure(failure.counterexample) from None
                raise


def _compare(subject: Any, sheets: Iterable[Sheet], mistakes: tuple[Misconception, ...]) -> None:
    compare_numbers(
        (
            NumberCase(
                subject.call(*sheet.inputs, **sheet.keywords), least_tokens(*sheet.inputs, **sheet.keywords),
                sheet.inputs, sheet.text, sheet.keywords,
            )
            for sheet in sheets
        ),
        mistakes,
        "tokens",
    )  # fmt: skip


HINTS = (
    "Both sides of the race grow with c, the tokens per rank: one like c, the other like c². Which is which, and what does "
    "that say about large c?",
    "Write down the seconds of a step, FLOPs over F, and the seconds of a hop, bytes over B. Count H query heads and "
    "H/group K/V heads. Set the two equal: D and H cancel. Then turn the data sheet's rate into bytes per second in one "
    "direction.",
    r"$\dfrac{4c^2DH}{F} \cdot \left(\tfrac12 \text{ if causal}\right) \ge \dfrac{2c\,D\,e\,H/\mathrm{group}}{B}$",
)

STAGE = Stage(
    id="06.threshold",
    function="least_tokens",
    title="The tokens per rank that hide a hop",
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check(
            "plain",
            2,
            "visible",
            "one direction, GB/s, two bytes, no mask",
            _on(Sheet(), Sheet(989.4e12, 450.0), mistakes=PLAIN),
            ("two_flops", "forgets_values", "binary_giga", "rounds"),
        ),
        Check(
            "sheet",
            2,
            "visible",
            "rates as data sheets state them",
            _on(Sheet(), Sheet(rate=600.0, directions=2), Sheet(rate=200.0, unit="Gbit/s"), mistakes=SHEET),
            ("both_directions", "bits_as_bytes"),
        ),
        Check(
            "groups",
            1,
            "visible",
            "fewer K/V heads than query heads",
            _on(Sheet(), Sheet(group=8), mistakes=GROUPS),
            ("ignores_groups", "groups_upside_down"),
        ),
        Check(
            "causal",
            1,
            "visible",
            "a balanced causal mask",
            _on(Sheet(), Sheet(causal=True), mistakes=CAUSAL),
            ("ignores_causal", "causal_makes_it_easier"),
        ),
        Check(
            "elements",
            1,
            "stress",
            "elements of one and of four bytes",
            _on(Sheet(), Sheet(element_bytes=4), Sheet(element_bytes=1), mistakes=(ELEMENTS,)),
            ("ignores_element_bytes",),
        ),
        Check("mixed", 1, "held-out", "everything at once", _check_mixed, ("one_condition_at_a_time",)),
    ),
)

"""The speed-up of dynamic context parallelism over one degree for all sequences, for given lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ringlab.cost.sequence_time import SequenceCosts
from ringlab.errors import LayoutError
from ringlab.packing.assigning import assign, least_seconds, static
from ringlab.packing.assignment import Assignment


@dataclass(frozen=True)
class Comparison:
    """The step that `assign` found, the fastest step with one degree for all sequences, and a lower bound.

    >>> from ringlab.packing import Placement
    >>> made = Assignment((4,), P=1, capacity=4, micro_batches=((Placement(0, 4, 0, 1),),))
    >>> Comparison(made, made, dynamic_s=2.0, static_s=3.0, least_s=1.5).speedup
    1.5
    """

    dynamic: Assignment
    static: Assignment
    dynamic_s: float
    static_s: float
    least_s: float

    @property
    def speedup(self) -> float:
        """Return the ratio of the static step's time to the dynamic step's time."""
        return self.static_s / self.dynamic_s

    def table(self) -> str:
        """Return both steps and the bound as lines of text."""
        lines = [f"{'':8} {'seconds':>9} {'of bound':>9} {'batches':>8}  sequences by degree"]
        for name, made, seconds in (
            ("static", self.static, self.static_s),
            ("dynamic", self.dynamic, self.dynamic_s),
        ):
            degrees = Counter(each.degree for batch in made.micro_batches for each in batch)
            said = ", ".join(f"{count} on {degree}" for degree, count in sorted(degrees.items()))
            over = seconds / self.least_s
            lines.append(f"{name:8} {seconds:9.3f} {over:9.3f} {len(made.micro_batches):8}  {said}")
        return "\n".join(
            [*lines, f"{'bound':8} {self.least_s:9.3f}", f"dynamic is {self.speedup:.2f} times as fast"]
        )


def compare(
    lengths: Sequence[int],
    P: int,
    capacity: int,
    costs: SequenceCosts,
    degrees: Sequence[int] | None = None,
) -> Comparison:
    """Return the comparison for sequences of these lengths on P ranks with `capacity` tokens each.

    The seconds come from `costs`, a model of the time. They are not measured.
    Raises: LayoutError as `assign`, for lengths below 0, or if there are no tokens.

    >>> from ringlab.cost.hardware import hardware
    >>> from ringlab.cost.models import model
    >>> costs = SequenceCosts.of(model("llama3-8b"), hardware("h100"))
    >>> found = compare([100_000] + [3_000] * 60, P=16, capacity=8192, costs=costs)
    >>> print(found.table().splitlines()[-1])
    dynamic is 2.18 times as fast
    """
    if min(lengths, default=0) < 0 or not sum(lengths):
        raise LayoutError(
            "lengths in tokens, none below 0 and at least one above 0",
            f"{len(lengths)} lengths, {sum(lengths)} tokens in all, the shortest {min(lengths, default=0)}",
        )
    dynamic = assign(lengths, P, capacity, costs, degrees)
    uniform = static(lengths, P, capacity, costs, degrees)
    return Comparison(
        dynamic,
        uniform,
        dynamic.seconds(costs),
        uniform.seconds(costs),
        least_seconds(lengths, P, capacity, costs, degrees),
    )

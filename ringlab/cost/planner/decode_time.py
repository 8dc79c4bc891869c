"""The time of one new token: weights and K/V cache are read once, partial results are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlab.cost.memory import parameter_bytes
from ringlab.cost.planner.groups import Group, group
from ringlab.cost.sizes import element_bytes

if TYPE_CHECKING:
    from ringlab.cost.planner.degrees import Degrees
    from ringlab.cost.planner.ledger import Ledger
    from ringlab.cost.planner.request import Request


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of one token of every sequence. Reading memory takes longer than computing, which is not counted.

    weights_s, cache_s: reading them. tensor_s: TP's two all-reduces in every layer. merge_s: gathering
    the partial outputs and log-sum-exps of the ranks that share the cache.
    """

    weights_s: float
    cache_s: float
    tensor_s: float
    merge_s: float

    imbalance_s = 0.0

    @property
    def exposed_s(self) -> float:
        """Return the seconds of communication."""
        return self.tensor_s + self.merge_s

    @property
    def total_s(self) -> float:
        """Return the seconds of one token."""
        return self.weights_s + self.cache_s + self.exposed_s

    def as_dict(self) -> dict[str, object]:
        """Return all figures, seconds per token."""
        return {
            "step_s": self.total_s,
            "exposed_s": self.exposed_s,
            "imbalance_s": self.imbalance_s,
            "weights_s": self.weights_s,
            "cache_s": self.cache_s,
            "tensor_s": self.tensor_s,
            "merge_s": self.merge_s,
        }


def decode_time(request: Request, degrees: Degrees, ledger: Ledger) -> DecodeTime:
    """Return the time in which every sequence grows by one token."""
    sizes, machine, sequences = request.sized, request.machine, request.batch // degrees.dp
    row = sequences * sizes.d_model * element_bytes(request.dtype)
    partial = sequences * (sizes.H // degrees.tp) * (sizes.D + 1) * 4
    tensor = group("tp", degrees, machine)
    sharing: Group = group("ring", degrees, machine)
    return DecodeTime(
        weights_s=parameter_bytes(sizes, request.dtype, 1, degrees.tp) / machine.memory_bytes_per_s,
        cache_s=ledger.of("K/V cache") / machine.memory_bytes_per_s,
        tensor_s=2 * sizes.layers * tensor.reduce_s(row),
        merge_s=sizes.layers * sharing.gather_s(partial * degrees.ring),
    )

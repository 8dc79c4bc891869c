"""`ringlab simulate --serve decode|prefill`: the real serving programs, without data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from ringlab.cli.output import ignored
from ringlab.cost.units import nearest
from ringlab.errors import CostError

if TYPE_CHECKING:
    from ringlab.cost.hardware import Hardware
    from ringlab.cost.simulate import Simulation
    from ringlab.cost.sizes import Attention
    from ringlab.layout import Layout

STEPS = ("decode", "prefill")
QUERIES, TRAVELS = ("own", "all"), ("auto", "kv", "q")


@dataclass(frozen=True)
class Serving:
    """One step of serving: a token of `batch` sequences, or a chunk after `prefix` cached tokens of them.

    queries: as in `decode_heads`. travels: as in `prefill`.
    Raises: CostError for an unknown step, or a choice that it does not have.
    """

    step: str
    prefix: int = 0
    queries: str = "own"
    travels: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("step", STEPS), ("queries", QUERIES), ("travels", TRAVELS)):
            value = getattr(self, name)
            if value not in known:
                raise CostError(f"{name} among {', '.join(known)}", repr(value), nearest(value, known))
        if self.step == "decode" and (self.prefix or self.travels != "auto"):
            raise CostError("--prefix and --travels for a chunk: --serve prefill", f"--serve {self.step}")
        if self.step == "prefill" and self.queries != "own":
            raise CostError("--queries for a token: --serve decode", f"--serve {self.step}")

    @property
    def words(self) -> tuple[str, str]:
        """Return the program and its step in words."""
        if self.step == "decode":
            return f"decode_heads(queries={self.queries!r})", "one token of each sequence"
        return f"prefill(travels={self.travels!r})", f"a chunk after {self.prefix:,} tokens"

    def layout_words(self, layout: Layout) -> str:
        """Return where the tokens lie: in pages, or a chunk's under `layout`."""
        from ringlab.cost.simulate_serving import PAGE

        return f"pages of {PAGE} tokens" if self.step == "decode" else repr(layout)

    @property
    def assumed(self) -> str:
        """Return how the cache comes to be, in a sentence."""
        whose = "all tokens" if self.step == "decode" else "a rank's tokens"
        return (
            "one layer's attention; K and V are read at the memory's bandwidth; the cache is filled before, in no time, from K and V "
            f"of {whose}, which count in peak_bytes"
        )

    def run(self, sizes: Attention, tokens: int, P: int, hardware: Hardware, layout: str) -> Simulation:
        """Return the simulation: of sequences of `tokens` each, or of a chunk of `tokens`.

        Raises: CostError for amounts that cannot be simulated; ShapeError for heads that ranks cannot share.
        """
        from ringlab.cost.simulate_serving import simulate_decode, simulate_prefill

        if self.step == "decode":
            one = replace(sizes, B=1)
            return simulate_decode(one, [tokens] * sizes.B, P, hardware, queries=self.queries)
        how: dict[str, Any] = {"travels": self.travels, "layout": layout}
        return simulate_prefill(sizes, self.prefix, tokens, P, hardware, **how)


OF_SERVING = ("prefix", "queries", "travels")
NOT_OF_SERVING = (
    "full",
    "window",
    "documents",
    "slow",
    "jitter",
    "seed",
    "chunk",
    "folded",
    "schedule",
    "backward",
    "tile",
)


def serving_of(
    context: typer.Context, step: str | None, prefix: str | None, queries: str, travels: str
) -> Serving | None:
    """Return the step of serving that was asked for, None for none. Raises: CostError for an option that belongs to the other."""
    from ringlab.cost.units import tokens

    if given := ignored(context, OF_SERVING if step is None else NOT_OF_SERVING):
        beside = f"{given} with --serve" if step is None else f"--serve without {given}"
        raise CostError(
            beside,
            "no --serve" if step is None else "both",
            "leave one of them out" if step else "--serve prefill",
        )
    if step is None:
        return None
    return Serving(step, tokens(prefix, "--prefix") if prefix is not None else 0, queries, travels)

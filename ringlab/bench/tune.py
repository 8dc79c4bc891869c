"""Chooses launch configurations by measuring them, for `ringlab tune` on a GPU.

For each row of the table, every candidate is compiled. Candidates that exceed a budget of
`blocks.triton.offline` are dropped, and the model of `blocks.triton.occupancy` selects the likely ones. Of
these, candidates with wrong results are dropped. The others are timed briefly, and the fastest of them are
timed again for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlab.bench.contenders import one_block, whole
from ringlab.bench.device import Cuda, Device, machine
from ringlab.bench.measure import Bench
from ringlab.bench.problem import Problem
from ringlab.blocks.triton.candidates import Slot, candidates
from ringlab.blocks.triton.configs import Config, Row, choose, table
from ringlab.blocks.triton.occupancy import clocks_per_score
from ringlab.blocks.triton.offline import Compiled, compile_all

PASS = {"forward_step": "forward", "backward_dq": "backward", "backward_dkv": "backward"}
HEAT_ROUNDS = 5
FINALISTS = 5
MOST = 32
"""Configurations of a row that are run."""
TIE = 0.01
"""Medians this close, as a fraction of the fastest, count as equal; the one with least shared memory is chosen."""


Race = Callable[[Slot, Sequence[Config], int], Mapping[Config, float]]
"""(slot, configurations, rounds) → the median seconds of each correct configuration; wrong ones are left out."""


class Gpu:
    """Times configurations on the current CUDA device: one causal block, with new inputs in every round."""

    def __init__(self, tokens: int = 8192, heads: int = 16, device: Device | None = None) -> None:
        self.tokens, self.heads = tokens, heads
        self.device = device or Cuda()

    def race(self, slot: Slot, configs: Sequence[Config], rounds: int) -> Mapping[Config, float]:
        """Return the median seconds of each correct configuration."""
        from ringlab.blocks.triton import TritonBlock

        bench = Bench(Problem(self.heads, self.tokens, slot.head_dim, True, slot.torch_dtype), self.device)
        entrants = {
            str(config): whole(
                one_block(TritonBlock(precision=slot.precision, configs={slot.kernel: config})), causal=True
            )
            for config in configs
        }
        found = bench.measure(PASS[slot.kernel], entrants, {}, rounds)["contenders"]
        return {config: found[str(config)]["median_s"] for config in configs if str(config) in found}


@dataclass(frozen=True)
class Tuned:
    """The row chosen for a slot, or None if no candidate is left, and the numbers of candidates per stage.

    `compiled` candidates were compiled, `kept` of these are within the budgets, `raced` of these were run,
    and `right` of these gave correct results.
    """

    slot: Slot
    row: Row | None
    compiled: int
    kept: int
    raced: int
    right: int

    def as_json(self) -> dict[str, Any]:
        """Return the result as `ringlab tune --json` prints it."""
        counts = {
            "compiled": self.compiled,
            "kept_budgets": self.kept,
            "raced": self.raced,
            "right": self.right,
        }
        chosen = {"config": str(self.row.config), "reason": self.row.reason} if self.row else {}
        return {"kernel": self.slot.kernel, "head_dim": self.slot.head_dim, "dtype": self.slot.dtype} | {
            "precision": self.slot.precision, **chosen, **counts
        }  # fmt: skip


def tune(
    slot: Slot,
    arch: str,
    race: Race,
    rounds: int = 31,
    processes: int = 2,
    where: str = "",
    compiler: Callable[..., list[Compiled]] = compile_all,
    most: int = MOST,
) -> Tuned:
    """Return the fastest correct candidate of `slot` within the budgets.

    The model chooses `most` likely candidates. The configuration that is in the table now is a candidate
    too.
    """
    found = compiler([slot.job(arch, config) for config in candidates(slot, arch)], processes)
    able = {each.job.config: each for each in found if not each.broken()}
    likely = sorted(able, key=lambda config: clocks_per_score(able[config]))[:most]
    now = choose(slot.kernel, arch, slot.head_dim, slot.torch_dtype, slot.precision)
    likely += [now] if now in able and now not in likely else []
    heat = race(slot, likely, HEAT_ROUNDS)
    finalists = sorted(heat, key=lambda config: heat[config])[:FINALISTS]
    final = race(slot, finalists, rounds)
    row = _row(slot, able, final, where) if final else None
    return Tuned(slot, row, len(found), len(able), len(likely), len(heat))


def work(slots: Sequence[Slot], arch: str, processes: int, most: int = MOST) -> str:
    """Return a sentence on how much `tune` compiles and runs for these slots and for the new table."""
    listed = [len(candidates(slot, arch)) for slot in slots]
    runs = sum(min(most + 1, count) for count in listed)
    return (
        f"{sum(listed):,} compilations for {len(slots)} rows, {processes} at a time; then {runs:,} configurations run "
        f"at most, which Triton compiles once more each; then {len(table(arch))} compilations for the table's numbers"
    )


def stamp(tokens: int, heads: int) -> str:
    """Return the problem, GPU, versions and date of a measurement, to be written as the reason of a row."""
    here = machine()
    gpu, versions = _dict(here.get("gpu")).get("name", "no GPU"), _dict(here.get("versions"))
    what = f"{heads} heads, {tokens} tokens, causal"
    return f"{what}, {gpu}, triton {versions.get('triton', '?')}, {str(here['date'])[:10]}"


def merged(old: Sequence[Row], tuned: Sequence[Tuned]) -> list[Row]:
    """Return the rows of a table after tuned rows have replaced the old ones, in the same order."""
    new = {_key(each.row): each.row for each in tuned if each.row}
    return [new.get(_key(row), row) for row in old]


def _row(slot: Slot, able: Mapping[Config, Compiled], final: Mapping[Config, float], where: str) -> Row:
    fastest = min(final.values())
    level = [config for config, seconds in final.items() if seconds <= fastest * (1 + TIE)]
    best = min(level, key=lambda config: (able[config].shared_bytes, final[config]))
    summary = f"{final[best] * 1e3:.3f} ms {PASS[slot.kernel]}, of {len(able)} that keep the budgets"
    rest = sorted((seconds, str(config)) for config, seconds in final.items() if config != best)
    if rest:
        summary += f"; next {rest[0][1]}: {rest[0][0] * 1e3:.3f} ms"
    numbers = able[best]
    return slot.row(
        best,
        f"{summary} ({where})" if where else summary,
        (numbers.registers, numbers.spill_bytes, numbers.shared_bytes),
    )


def _key(row: Row) -> tuple[str, int, str, str, str]:
    return *row.serves, row.scores


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

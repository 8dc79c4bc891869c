"""Tuning chooses the fastest configuration whose results are right and which keeps its budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ringlab.bench.device import Cpu
from ringlab.bench.tune import Gpu, Race, Tuned, merged, tune
from ringlab.blocks.triton import configs
from ringlab.blocks.triton.candidates import Slot, candidates
from ringlab.blocks.triton.configs import Config, choose_row, table
from ringlab.blocks.triton.offline import Compiled, Job

pytestmark = pytest.mark.thorough

SLOT = Slot("forward_step", 128, "16-bit", "ieee")
FAST, SPILLS, LARGE, WRONG = (
    Config(128, 64, 8, 3),
    Config(128, 128, 8, 2),
    Config(128, 128, 8, 4),
    Config(64, 64, 4, 2),
)


def compiler(jobs: Sequence[Job], processes: int) -> list[Compiled]:
    """Compile nothing, but report shared memory that grows with the stages, and two faulty configurations."""
    found = []
    for job in jobs:
        spill = 4 if job.config == SPILLS else 0
        shared = 10**6 if job.config == LARGE else 1000 * job.config.num_stages
        found.append(Compiled(job, 200, spill, shared, "wgmma", 8))
    return found


def race_of(times: Mapping[Config, float], wrong: Sequence[Config] = ()) -> Race:
    """Return a race in which a configuration takes its time in `times`, or 1 s; those in `wrong` get no time."""
    return lambda slot, listed, rounds: {each: times.get(each, 1.0) for each in listed if each not in wrong}


def test_the_fastest_that_is_right_and_keeps_the_budgets_wins() -> None:
    race = race_of({FAST: 0.5, SPILLS: 0.1, LARGE: 0.1, WRONG: 0.2}, wrong=[WRONG])
    tuned = tune(SLOT, "sm_90", race, rounds=31, where="a GPU", compiler=compiler, most=1000)
    assert tuned.row is not None and tuned.row.config == FAST
    assert tuned.row.reason.startswith("500.000 ms forward") and tuned.row.reason.endswith("(a GPU)")
    listed = candidates(SLOT, "sm_90")
    assert {SPILLS, LARGE, WRONG, FAST} <= set(listed)
    assert (tuned.compiled, tuned.kept, tuned.right) == (len(listed), len(listed) - 2, len(listed) - 3)


def test_of_equals_the_one_with_less_shared_memory_is_chosen() -> None:
    frugal = Config(128, 64, 8, 2)
    tuned = tune(SLOT, "sm_90", race_of({FAST: 0.500, frugal: 0.503}), compiler=compiler, most=1000)
    assert tuned.row is not None and tuned.row.config == frugal


def test_where_nothing_is_right_the_old_row_stays() -> None:
    """If no candidate is right, the table keeps its row; only the `most` likeliest candidates and that row are run."""
    tuned = tune(SLOT, "sm_90", race_of({}, wrong=candidates(SLOT, "sm_90")), compiler=compiler, most=6)
    assert tuned.row is None and tuned.right == 0 and tuned.raced in (6, 7)
    assert merged(table("sm_90"), [tuned]) == list(table("sm_90"))


def test_a_tuned_row_takes_its_place_in_the_file_and_nothing_else_changes(tmp_path: Path) -> None:
    new = SLOT.row(Config(64, 32, 4, 1), "0.1 ms forward", (10, 0, 20))
    rows = merged(table("sm_90"), [Tuned(SLOT, new, 3, 2, 2, 1)])
    path = tmp_path / "sm_90.toml"
    path.write_text(configs.render("sm_90", "3.7.1", rows), encoding="utf-8")
    read = configs.read(path)
    changed = [(old, now) for old, now in zip(table("sm_90"), read, strict=True) if old != now]
    assert [now for _, now in changed] == [new]
    assert (changed[0][0].kernel, changed[0][0].head_dim, changed[0][0].dtype) == (
        "forward_step",
        128,
        "16-bit",
    )


@pytest.mark.needs_interpreter
@pytest.mark.parametrize("kernel", ["backward_dq", "backward_dkv"])
def test_a_race_of_backward_kernels_leaves_out_what_is_wrong(monkeypatch, kernel: str) -> None:
    from ringlab.blocks.triton import steps

    launch = steps.Launcher.launch

    def lazy(self, name, config, programs, heads, arguments, **constants) -> None:
        """With 32 keys a tile, do not launch the kernel under test, so that its results are not written."""
        if name != kernel or config.block_n != 32:
            launch(self, name, config, programs, heads, arguments, **constants)

    monkeypatch.setattr(steps.Launcher, "launch", lazy)
    right, wrong = Config(64, 64, 4, 1), Config(32, 32, 4, 1)
    impossible = Config(48, 64, 4, 1)  # no kernel can have tiles of 48 rows
    gpu = Gpu(tokens=40, heads=1, device=Cpu())
    assert [*gpu.race(Slot(kernel, 64, "float32", "ieee"), [right, wrong, impossible], rounds=1)] == [right]


def test_a_tuned_row_leaves_the_row_of_a_score_rule_alone() -> None:
    scored = next(row for row in table("sm_90") if row.scores)
    plain = choose_row(scored.kernel, "sm_90", scored.head_dim, "bfloat16")
    new = replace(plain, config=Config(16, 16, 4, 1))
    slot = Slot(scored.kernel, scored.head_dim, scored.dtype, "ieee")
    assert merged([plain, scored], [Tuned(slot, new, 1, 1, 1, 1)]) == [new, scored]

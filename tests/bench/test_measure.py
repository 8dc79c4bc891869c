"""No kernel is timed before it was found right, on memory that was full of NaN; every way to be wrong is refused.

Waiting for `ringlab plan`: whole processes are timed, and what is no answer is not.

A device that a test writes the script for: no GPU, no clock, and memory that it can hand out again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ringlab.bench import conformance
from ringlab.bench.answers import HELP, PLAN, bench_answers, bench_simulator
from ringlab.bench.contenders import Contender, emulated_ring, one_block, whole
from ringlab.bench.device import fill_with_nan, new_memory_is_nan
from ringlab.bench.interleaved import Turn
from ringlab.bench.measure import Bench
from ringlab.bench.problem import Problem, draw
from ringlab.bench.reference import judge, reference, sample
from ringlab.blocks.naive import Naive
from ringlab.cli import app
from ringlab.conformance.tolerance import relative_error, truth
from ringlab.errors import RinglabError
from ringlab.merge import Partial


class Scripted:
    """Runs what it is given at once; says of each run the next of `times`, one second where there is none."""

    name = "cpu"

    def __init__(self, times: Iterator[float] | None = None, peak: int = 0) -> None:
        self.times, self.peak = times, peak
        self.log: list[str] = []

    def seconds(self, run: Callable[[], Any]) -> float:
        self.log.append("time")
        run()
        return 1.0 if self.times is None else next(self.times)

    def settle(self) -> None:
        self.log.append("settle")

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        self.log.append("poison")
        for output in outputs:
            fill_with_nan(output)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        self.log.append("weigh")
        run()
        return self.peak


class NoPoison(Scripted):
    """A mutant: its poison does nothing."""

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        self.log.append("poison")


WORK = Problem(H=2, S=300, D=16)
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def bench(device: Any = None, **changes: Any) -> Bench:
    return Bench(Problem(**{"H": 2, "S": 300, "D": 16, **changes}), device or Scripted(), seed=1)


RIGHT = whole(one_block("naive"), causal=True)


def changed(change: Change) -> Contender:
    """The right contender with its results changed."""

    def turn(inputs: Any, of: str) -> Turn:
        right = RIGHT.turn(inputs, of)
        return Turn(lambda ready: change(right.run(ready)), right.prepare)

    return Contender(turn)


def in_place(name: str, rows: Any, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(found: dict[str, Tensor]) -> dict[str, Tensor]:
        if name in found:
            found[name] = found[name].clone()
            found[name][:, :, rows] = change(found[name][:, :, rows])
        return found

    return apply


MUTANTS = {
    "one row of out from another": ("forward", in_place("out", 7, lambda x: x.flip(-1))),
    "the last rows are zero": ("forward", in_place("out", slice(-3, None), torch.zeros_like)),
    "out of the second head": ("forward", lambda f: {**f, "out": f["out"][:, [0, 0]]}),
    "lse in base two": ("forward", lambda f: {**f, "lse": f["lse"] * 1.4427}),
    "a stale row that is not a number": ("forward", in_place("out", 99, lambda x: x * float("nan"))),
    "dq without its scale": ("backward", lambda f: {**f, "dq": f["dq"] * 4}),
    "dk of the last key forgotten": ("backward", in_place("dk", -1, torch.zeros_like)),
    "dv and dk swapped": ("backward", lambda f: {**f, "dk": f["dv"], "dv": f["dk"]}),
    "dv infinite": ("backward", in_place("dv", 200, lambda x: x / 0)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_refused_and_not_timed(name: str) -> None:
    of, change = MUTANTS[name]
    case = bench().measure(of, {"wrong": changed(change), "right": RIGHT}, {"wrong": ("right",)}, rounds=2)
    assert set(case["contenders"]) == {"right"} and set(case["not_timed"]) == {"wrong"}
    assert case["speed_ratio"] == {}


@pytest.mark.parametrize("of", ["forward", "backward", "forward_backward"])
def test_nothing_is_timed_before_all_were_checked(of: str) -> None:
    device = Scripted()
    bench(device).measure(of, {"a": RIGHT, "b": RIGHT}, {}, rounds=2)
    first = device.log.index("time")
    assert device.log[:first].count("poison") == 2 and "poison" not in device.log[first:]


class Lazy:
    """A kernel that writes a buffer once and, from its second run on, leaves some rows as they lie there."""

    def __init__(self, rows: slice) -> None:
        self.rows = rows
        self.buffer: Tensor | None = None

    def contender(self) -> Contender:
        def run(found: dict[str, Tensor]) -> dict[str, Tensor]:
            if self.buffer is None:
                self.buffer = found["out"].clone()
                return {"out": self.buffer}
            keep = self.buffer[:, :, self.rows].clone()
            self.buffer.copy_(found["out"])
            self.buffer[:, :, self.rows] = keep
            return {"out": self.buffer}

        return changed(run)


@pytest.mark.parametrize("rows", [slice(None), slice(120, 121), slice(-1, None)], ids=str)
def test_a_kernel_that_does_not_write_is_found_by_the_poison_alone(rows: slice) -> None:
    """What lies in the buffer is the right result of the run before: without poison nobody would notice."""
    refusal = bench().admit(Lazy(rows).contender(), "forward").refusal
    assert refusal is not None and "not written" in refusal
    assert bench(NoPoison()).admit(Lazy(rows).contender(), "forward").refusal is None


class Skips(Naive):
    """A block that makes a new output each time and does not write the last row of a tile."""

    def forward(self, *args: Any, **options: Any) -> Partial:
        right = super().forward(*args, **options)
        out = torch.empty_like(right.out)
        out[:, :, :-1] = right.out[:, :, :-1]
        return Partial(out, right.lse)


@pytest.mark.parametrize("P", [1, 3])
def test_rows_that_no_rank_writes_are_found_on_new_memory(P: int) -> None:
    """On every thread, whatever the allocator hands out; the device's own poison plays no part."""
    contender = emulated_ring(Skips(), P, causal=True)
    with new_memory_is_nan():  # what the memory happens to hold must not decide this test
        assert torch.empty(3).isnan().all()
    assert bench(NoPoison()).admit(contender, "forward").refusal is not None
    assert not torch.are_deterministic_algorithms_enabled()


def test_torchs_own_operators_are_not_run_on_new_memory() -> None:
    strict: list[bool] = []

    def turn(inputs: Any, of: str) -> Turn:
        right = RIGHT.turn(inputs, of)
        return Turn(lambda r: (strict.append(torch.are_deterministic_algorithms_enabled()), right.run(r))[1])

    for torchs in (True, False):
        assert bench().admit(Contender(turn, torchs=torchs), "forward").refusal is None
    assert strict == [False, False, False, False, True]


def test_what_cannot_run_is_told_and_stops_nobody_else() -> None:
    def crash(inputs: Any, of: str) -> Turn:
        def run(_: Any) -> None:
            raise RuntimeError("No available kernel.\n  Aborting execution.")

        return Turn(run)

    case = bench().measure("forward", {"gone": Contender(crash), "right": RIGHT}, {"right": ("gone",)}, 2)
    assert case["not_timed"] == {"gone": "RuntimeError: No available kernel. Aborting execution."}
    assert set(case["contenders"]) == {"right"} and case["speed_ratio"] == {"right": {}}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", ["naive", "blockwise", "native"])
def test_the_blocks_are_right(block: str, causal: bool) -> None:
    found = bench(causal=causal)
    for of in ("forward", "backward", "forward_backward"):
        verdict = found.admit(whole(one_block(block), causal), of)
        assert verdict.refusal is None and verdict.errors


@pytest.mark.needs_interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_triton_is_right_once_and_as_a_ring_on_memory_full_of_nan(causal: bool) -> None:
    found = bench(H=1, S=150, D=32, causal=causal)
    for of in ("forward", "backward"):
        assert found.admit(whole(one_block("triton"), causal), of).refusal is None
    assert found.admit(emulated_ring("triton", 2, causal), "forward_backward").refusal is None


@pytest.mark.parametrize("P", [1, 2, 4])
def test_the_emulated_ring_is_right_and_the_other_mask_is_not(P: int) -> None:
    found = bench(S=301)
    for of in ("forward", "forward_backward"):
        assert found.admit(emulated_ring("native", P, causal=True), of).refusal is None
        assert found.admit(emulated_ring("native", P, causal=False), of).refusal is not None


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_is_the_oracle(causal: bool) -> None:
    inputs = draw(Problem(H=2, S=70, D=16, dtype="float32"), "cpu", torch.Generator().manual_seed(3))
    expected = reference(inputs, causal, torch.arange(70))
    true = truth(*inputs, causal=causal)
    for name, value in expected.true.items():
        assert relative_error(value[None], getattr(true, name)) < 1e-6, name


def test_the_yardstick_is_as_inexact_as_its_dtype() -> None:
    inputs = draw(WORK, "cpu", torch.Generator().manual_seed(3))
    expected = reference(inputs, True, sample(300, torch.Generator().manual_seed(0)))
    bounds = {name: float(bound.median()) for name, bound in expected.bounds.items()}
    assert all(2**-9 < bound < 0.2 for bound in bounds.values()), bounds
    exact = {name: value[None] for name, value in expected.true.items()}
    whole_sample = type(expected)(torch.arange(len(expected.tokens)), expected.true, expected.bounds)
    assert judge(exact, whole_sample).refusal is None


def test_the_sample_has_the_ends_and_the_edges_of_tiles() -> None:
    tokens = sample(1000, torch.Generator().manual_seed(0)).tolist()
    assert tokens == sorted(set(tokens)) and {0, 1, 63, 64, 127, 128, 255, 256, 992, 999} <= set(tokens)
    assert sample(3, torch.Generator()).tolist() == [0, 1, 2]


def test_inputs_are_fresh_in_every_round_and_as_before_afterwards() -> None:
    seen: list[float] = []

    def turn(inputs: Any, of: str) -> Turn:
        right = RIGHT.turn(inputs, of)
        return Turn(lambda ready: (seen.append(float(inputs.q.sum())), right.run(ready))[1], right.prepare)

    found = bench()
    before = [x.clone() for x in found.inputs]
    found.measure("forward", {"spy": Contender(turn)}, {}, rounds=4)
    timed = seen[3:]  # the first three are the check
    assert len(set(timed)) == len(timed) == 4 + 3
    assert all(torch.equal(x, y) for x, y in zip(before, found.inputs, strict=True))


def test_two_benches_draw_other_inputs_and_say_the_seed() -> None:
    one, other = (Bench(WORK, Scripted()) for _ in range(2))
    assert one.seed != other.seed and not torch.equal(one.inputs.q, other.inputs.q)
    again = Bench(WORK, Scripted(), seed=one.seed)
    assert torch.equal(one.inputs.q, again.inputs.q)


RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_the_first_answer_is_not_counted_and_the_others_are() -> None:
    ticks: list[int] = []
    measured = bench_answers(2, progress=lambda: ticks.append(1))
    assert [case["command"].split()[1] for case in measured["cases"]] == ["plan", "--help"] and len(
        ticks
    ) == 6
    for case in measured["cases"]:
        assert len(case["wall_s"]) == 2 and case["slowest_s"] == max(case["wall_s"])
    assert measured["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--model", "nobody", "--tokens", "1M", "--json"),
        ("plan", "--no-such-option", "--json"),
        ("plan", "--no-such-option"),
    ],
)
def test_an_error_is_no_answer(arguments: tuple[str, ...]) -> None:
    with pytest.raises(RinglabError, match="an answer of ringlab plan"):
        bench_answers(1, [arguments])


def test_a_simulation_says_its_memory() -> None:
    words = ("simulate", "--tokens", "64Ki", "--ranks", "8", "--layout", "zigzag", "--json")
    measured = bench_simulator([words])
    (found,) = measured["cases"]
    assert found["simulated"]["ranks"] == 8 and measured["machine"]["torch"]
    assert 2**27 < found["measured"]["peak_rss_bytes"] < 2**29, "that of its own process, not of this one"
    assert 0 < found["measured"]["process_cpu_s"] and found["wall_s"] < found["measured"]["process_wall_s"]


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.json"
    done = CliRunner().invoke(app, ["bench", "answers", "--runs", "1", "--json", "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text()) == json.loads(done.stdout)


def test_the_published_answers_came_within_two_seconds() -> None:
    published = json.loads((RESULTS / "waiting/answers.json").read_text())
    assert [case["command"] for case in published["cases"]] == [
        f"ringlab {' '.join(words)}" for words in (PLAN, HELP)
    ]
    assert all(len(case["wall_s"]) >= 11 and max(case["wall_s"]) < 2.0 for case in published["cases"])


def test_a_wrong_ring_is_timed_until_its_first_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def checked(target: str, options: tuple[str, ...], ok: bool) -> tuple[float, dict[str, object]]:
        asked.append((target, options, ok))
        return float(len(asked)), {"checks": [1, 2]}

    monkeypatch.setattr(conformance, "_checked", checked)
    found = conformance.bench_check(wrong=3)
    assert [case["seconds"] for case in found["cases"]] == [1.0, 2.0, 3.0, 4.0]
    assert found["wrong"]["median_s"] == 6.0 and len(found["wrong"]["seconds"]) == 3
    assert all(options == ("--quick", "--fail-fast") and not ok for _, options, ok in asked[4:])


def test_what_cannot_be_checked_is_no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RinglabError, match="a right ring that passes"):
        conformance.bench_check(right=["ringlab.nowhere:attend"])
    monkeypatch.setattr(conformance, "MUTANTS", ["no_such_ring"])
    with pytest.raises(RinglabError, match="a wrong ring that fails"):
        conformance.bench_check(right=[])

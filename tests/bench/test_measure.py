"""A benchmark of kernels times only kernels whose results, on memory full of NaN, are correct."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab.bench.contenders import Contender, emulated_ring, one_block, whole
from ringlab.bench.device import Cpu, fill_with_nan, new_memory_is_nan
from ringlab.bench.emulated_ring import bench_ring
from ringlab.bench.interleaved import Turn
from ringlab.bench.kernels import _computing, bench_kernels
from ringlab.bench.measure import Bench
from ringlab.bench.problem import Problem, draw
from ringlab.bench.reference import reference, sample
from ringlab.blocks import get_block
from ringlab.blocks.naive import Naive
from ringlab.conformance.tolerance import relative_error, truth
from ringlab.merge import Partial
from tests.blocks.device_calls import flash_attn_packages

pytestmark = pytest.mark.thorough

SMALL = Problem(H=2, S=130, D=16)
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class NoPoison(Cpu):
    """A mutant of the device whose `poison` does nothing."""

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        pass


def bench(device: Any = None, **changes: Any) -> Bench:
    return Bench(Problem(**{"H": 2, "S": 300, "D": 16, **changes}), device or Cpu(), seed=1)


RIGHT = whole(one_block("naive"), causal=True)


def changed(change: Change) -> Contender:
    """Return the correct contender with `change` applied to its results."""

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
    "a stale row that is not a number": ("forward", in_place("out", 99, lambda x: x * float("nan"))),
    "dq without its scale": ("backward", lambda f: {**f, "dq": f["dq"] * 4}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_refused_and_not_timed(name: str) -> None:
    of, change = MUTANTS[name]
    case = bench().measure(of, {"wrong": changed(change), "right": RIGHT}, {"wrong": ("right",)}, rounds=2)
    assert set(case["contenders"]) == {"right"} and set(case["not_timed"]) == {"wrong"}
    assert case["speed_ratio"] == {}


class Lazy:
    """A kernel that writes a buffer once and, from its second run on, leaves some rows unwritten."""

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


def test_a_kernel_that_does_not_write_is_found_by_the_poison_alone() -> None:
    """Only the poison finds this kernel: without it, the buffer still has the result of the previous run."""
    rows = slice(120, 121)
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
    """Unwritten rows are found on every thread and in any memory, without the device's poison."""
    contender = emulated_ring(Skips(), P, causal=True)
    with new_memory_is_nan():  # otherwise the old contents of the memory could decide this test
        assert torch.empty(3).isnan().all()
    assert bench(NoPoison()).admit(contender, "forward").refusal is not None
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poison_is_nan_in_every_dtype_and_covers_what_a_view_hides(dtype: torch.dtype) -> None:
    memory = torch.zeros(3, 4, dtype=dtype)
    fill_with_nan(memory[1:, :2])
    assert memory.isnan().all()


def test_what_cannot_run_is_told_and_stops_nobody_else() -> None:
    def crash(inputs: Any, of: str) -> Turn:
        def run(_: Any) -> None:
            raise RuntimeError("No available kernel.\n  Aborting execution.")

        return Turn(run)

    case = bench().measure("forward", {"gone": Contender(crash), "right": RIGHT}, {"right": ("gone",)}, 2)
    assert case["not_timed"] == {"gone": "RuntimeError: No available kernel. Aborting execution."}
    assert set(case["contenders"]) == {"right"} and case["speed_ratio"] == {"right": {}}


@pytest.mark.needs_interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_triton_is_right_once_and_as_a_ring_on_memory_full_of_nan(causal: bool) -> None:
    found = bench(H=1, S=150, D=32, causal=causal)
    for of in ("forward", "backward"):
        assert found.admit(whole(one_block("triton"), causal), of).refusal is None
    assert found.admit(emulated_ring("triton", 2, causal), "forward_backward").refusal is None


@pytest.mark.parametrize("P", [1, 4])
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


def test_the_sample_has_the_ends_and_the_edges_of_tiles() -> None:
    tokens = sample(1000, torch.Generator().manual_seed(0)).tolist()
    assert tokens == sorted(set(tokens)) and {0, 1, 63, 64, 127, 128, 255, 256, 992, 999} <= set(tokens)
    assert sample(3, torch.Generator()).tolist() == [0, 1, 2]


def test_inputs_are_fresh_in_every_round_and_follow_from_the_seed() -> None:
    seen: list[tuple[float, ...]] = []

    def turn(inputs: Any, of: str) -> Turn:
        right = RIGHT.turn(inputs, of)
        return Turn(
            lambda ready: (seen.append(tuple(inputs.q.flatten()[:8].tolist())), right.run(ready))[1],
            right.prepare,
        )

    found = Bench(SMALL, Cpu())
    found.measure("forward", {"spy": Contender(turn)}, {}, rounds=4)
    timed = seen[3:]  # without the three runs of the check before the timing
    assert len(set(timed)) == len(timed) == 4 + 3
    assert torch.equal(found.inputs.q, Bench(SMALL, Cpu(), seed=found.seed).inputs.q)


@pytest.mark.parametrize(
    ("of", "causal", "products", "tensors"), [("forward", True, 1, 4), ("backward", False, 5, 8)]
)
def test_flops_and_bytes_are_those_of_the_convention(
    of: str, causal: bool, products: float, tensors: int
) -> None:
    """FLOPs are `products` times 2·S²·D·H, halved if causal; each tensor is read or written once."""
    problem = Problem(H=16, S=16384, D=128, causal=causal)
    assert problem.flops(of) == products * 2 * 16384**2 * 128 * 16
    assert problem.least_bytes(of) == tensors * 16 * 16384 * 128 * 2


def test_a_report_of_kernels_has_what_readers_need() -> None:
    report = bench_kernels(SMALL, ("native", "nonesuch"), rounds=2, device=Cpu())
    assert json.loads(json.dumps(report)) == report
    assert [(case["pass"], case["causal"]) for case in report["cases"]] == [
        ("forward", True), ("backward", True), ("forward", False), ("backward", False)
    ]  # fmt: skip
    assert report["ok"] is False, "a report is not ok if a block cannot run"
    assert {"clock", "inputs", "cache", "check", "flops", "speed_ratio"} <= set(report["method"])
    for case in report["cases"]:
        assert set(case["speed_ratio"]) == {"native"}
        # Neither backend was replaced by another one.
        assert {"cudnn", "nonesuch"} <= case["not_timed"].keys()
        found = case["contenders"]["native"]
        assert all(0 < ratio <= 1 for ratio in found["errors_over_bounds"].values())
        assert found["median_s"] > 0 and len(found["times_s"]) == 2


def test_a_block_is_timed_beside_torchs_backend_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(name: str, *args: Any, **options: Any) -> Any:
        return get_block("blockwise" if name == "flash" else name, *args, **options)

    monkeypatch.setattr("ringlab.arguments.get_block", stand_in)
    report = bench_kernels(SMALL, ("flash", "native"), masks=(True,), rounds=1, device=Cpu())
    for case in report["cases"]:
        assert {"flash block", "flash", "native"} <= case["contenders"].keys()
        assert case["speed_ratio"].keys() == {"flash block", "native"}


def test_a_library_that_the_machine_lacks_is_no_failure() -> None:
    """A library that the machine lacks is not replaced by another one, and the result has the reason."""
    report = bench_kernels(SMALL, ("cudnn", "flash", "native"), masks=(True,), rounds=1, device=Cpu())
    assert report["ok"] and report["computed_by"] == {"native": "native"}
    for case in report["cases"]:
        assert {"cudnn block", "flash block"} <= case["not_timed"].keys()
    assert not bench_kernels(SMALL, ("flash",), masks=(True,), rounds=1, device=Cpu())["ok"]


def test_a_report_of_kernels_names_the_version_of_flash_attn_that_computes() -> None:
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    with flash_attn_packages(2, 3):
        assert _computing("flash", q) == "flash-3"
    with flash_attn_packages():
        assert _computing("flash", q) is None


def test_a_report_of_the_ring_has_ratios_to_one_call_and_memory() -> None:
    report = bench_ring(SMALL, P=3, blocks=("native",), rounds=2, device=Cpu())
    assert json.loads(json.dumps(report)) == report
    assert report["ok"] and report["work"]["P"] == 3
    assert [case["pass"] for case in report["cases"]] == ["forward", "forward_backward"]
    for case in report["cases"]:
        assert case["speed_ratio"]["native ring"].keys() == {"native once", "flash"}
    memory = report["memory"]["native"]["forward_backward"]
    assert len(memory["peak_bytes"]) == 3 and memory["peak_shards"] > 4

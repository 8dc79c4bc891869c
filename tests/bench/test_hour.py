"""`ringlab bench hour` runs steps within their limits, continues a run, and prints results beside known figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from ringlab.bench import hour
from ringlab.bench.hour import (
    ABSENT,
    FAILED,
    LATE,
    PASSED,
    STEPS,
    Hour,
    Row,
    Step,
    available,
    expected,
    minutes_for,
)
from ringlab.cli import app
from ringlab.errors import DeviceError

MADE_UP = Path(__file__).parent / "made_up"
HOPPER = "NVIDIA H200"


def python(name: str, code: str, minutes: float = 1.0, wave: int = 1, gpus: int = 1) -> Step:
    """Return a step that runs `code`, in which `out` is the path of its result file.

    A step that needs several GPUs takes all of them.
    """
    return Step(name, ("-c", f"out = '{{out}}'\n{code}"), minutes, wave, gpus, 1 if gpus == 1 else None)


def run(folder: Path, *steps: Step, gpus: int = 1, minutes: float = 5.0) -> dict[str, Any]:
    """Run the steps, and return the result file."""
    Hour(folder / "hour.json", folder / "logs", minutes, steps=steps, gpus=gpus).run()
    found: dict[str, Any] = json.loads((folder / "hour.json").read_text())
    return found


def note(folder: Path, word: str) -> str:
    return f"open({str(folder / 'order')!r}, 'a').write({word!r} + ' ')\n"


def test_steps_run_by_wave_and_one_file_has_their_results(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        python("late", note(tmp_path, "late"), wave=2),
        python("early", note(tmp_path, "early") + "open(out, 'w').write('[1, 2]')"),
        python("wrong", note(tmp_path, "wrong") + "print('why it failed'); raise SystemExit(3)"),
        python("many", "", gpus=2),
    )
    assert (tmp_path / "order").read_text().split() == ["early", "wrong", "late"]
    states = {name: step["state"] for name, step in found["steps"].items()}
    assert states == {"early": PASSED, "wrong": FAILED, "late": PASSED, "many": ABSENT}
    assert found["steps"]["early"]["result"] == [1, 2] and not found["ok"]
    assert found["steps"]["wrong"]["last"] == ["why it failed"]


def test_a_second_run_begins_with_what_has_not_passed(tmp_path: Path) -> None:
    good, bad = (
        python("good", note(tmp_path, "good")),
        python("bad", note(tmp_path, "bad") + "raise SystemExit(1)"),
    )
    run(tmp_path, good, bad)
    mended = python("bad", note(tmp_path, "mended"))
    assert run(tmp_path, good, mended)["ok"]
    assert (tmp_path / "order").read_text().split() == ["good", "bad", "mended"]


def test_another_source_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = python("good", note(tmp_path, "good"))
    run(tmp_path, good)
    monkeypatch.setattr(hour, "source", lambda: "changed")
    run(tmp_path, good)
    assert (tmp_path / "order").read_text().split() == ["good", "good"]


@pytest.mark.parametrize("content", ["", "[]", '{"source": 1}', '{"steps": []}'])
def test_a_file_that_cannot_be_continued_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "hour.json").write_text(content)
    assert run(tmp_path, python("good", ""))["ok"]


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    child = f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    found = run(tmp_path, python("stuck", child, minutes=0.03), python("next", "", wave=2))
    assert {name: step["state"] for name, step in found["steps"].items()} == {"stuck": LATE, "next": PASSED}
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the step's child still runs")


def test_when_the_time_is_over_the_rest_is_left_for_the_next_run(tmp_path: Path) -> None:
    found = run(tmp_path, python("slow", "import time; time.sleep(600)"), python("left", ""), minutes=0.03)
    assert [found["steps"][name]["state"] for name in ("slow", "left")] == [LATE, LATE]
    assert found["steps"]["left"]["why"] == "no time was left; run it again"


def test_steps_of_a_wave_have_a_gpu_each_and_the_next_wave_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    meet = (
        "import os, time, pathlib\nhere = pathlib.Path(out).parent\n"
        "(here / ('gpu' + os.environ['CUDA_VISIBLE_DEVICES'])).touch()\n"
        "while len(list(here.glob('gpu*'))) < 3: time.sleep(0.05)\n"
    )
    everyone = f"import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '4,5,6'; open({str(tmp_path / 'count')!r}, 'w').write('{{gpus}}')"
    steps = [python(f"meet {number}", meet) for number in range(3)]
    found = run(tmp_path, *steps, python("all", everyone, wave=2, gpus=2), gpus=3, minutes=1.0)
    assert found["ok"], found
    assert {path.name for path in (tmp_path / "logs").glob("gpu*")} == {"gpu4", "gpu5", "gpu6"}
    assert (tmp_path / "count").read_text() == "3"


def test_a_step_that_was_out_of_time_has_twice_as_much_in_the_next_run(tmp_path: Path) -> None:
    limits = []
    for _ in range(3):
        (found,) = run(tmp_path, python("slow", "import time; time.sleep(600)", 0.005))["steps"].values()
        limits.append(found["limit"])
        assert found["state"] == LATE and "twice as much" in found["why"]
    assert limits == [0.3, 0.6, 1.2]


def test_a_step_that_could_not_begin_has_its_own_limit_in_the_next_run(tmp_path: Path) -> None:
    slow, left = python("slow", "import time; time.sleep(600)"), python("left", "", minutes=1.0)
    assert run(tmp_path, slow, left, minutes=0.005)["steps"]["left"]["state"] == LATE
    assert run(tmp_path, left)["steps"]["left"]["limit"] == 60.0


@pytest.mark.parametrize("at_once", [True, False])
def test_tests_run_at_once_only_where_they_may(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("sys.executable", "/bin/true")
    step = run(tmp_path, Step("tests", ("-m", "pytest"), 1.0, 1, at_once=at_once))["steps"]["tests"]
    assert ("-n" in step["command"].split()) == at_once


@pytest.mark.parametrize("step", [step for step in STEPS if step.is_test], ids=lambda step: step.name)
def test_timings_and_tests_of_several_gpus_have_their_gpus_for_themselves(step: Step) -> None:
    """Timings and tests of several GPUs run alone: other steps would slow them down, or share GPUs with their groups."""
    (file,) = (word for word in step.words if word.endswith(".py"))
    times = "from ringlab.bench" in (Path(__file__).parents[2] / file).read_text()
    assert step.at_once == (step.gpus == 1 and not times)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "optional", "state"),
    [
        ("pytest.skip('no flash')", True, ABSENT),
        ("pytest.skip('no cloudpickle')", False, FAILED),
        ("assert True", False, PASSED),
        ("assert False", True, FAILED),
    ],
)
def test_tests_that_are_all_skipped_fail_unless_their_library_is_optional(
    code: str, optional: bool, state: str, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    {code}\n")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={tmp_path}", "-c", os.devnull)
    step = Step("tests", (*words, str(tmp_path / "test_it.py")), 1.0, 1, optional=optional)
    assert run(tmp_path, step)["steps"]["tests"]["state"] == state


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="needed: an NVIDIA GPU"):
        Hour(tmp_path / "hour.json", tmp_path, 60.0, gpus=0)


def dry_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, steps: Sequence[Step], gpus: int
) -> tuple[float, dict[str, Any], dict[str, tuple[float, tuple[str, ...]]]]:
    """Run a plan whose steps take all of their limits, on a clock that only `sleep` advances.

    Return the total minutes, the result file, and for each step the minute at which it began and its GPUs.
    """
    now, began = 0.0, {}

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1.0

    class Dry:
        def __init__(self, step: Step, taken: list[str], logs: Path, seconds: float) -> None:
            self.step, self.taken, self.over = step, taken, now + seconds
            self.cut = seconds < 60 * step.minutes
            began[step.name] = now / 60, tuple(taken)

        def ended(self) -> bool:
            return now >= self.over

        def entry(self) -> dict[str, Any]:
            return {"state": LATE if self.cut else PASSED}

        def stop(self) -> None: ...

    monkeypatch.setattr(hour, "_Running", Dry)
    monkeypatch.setattr(hour, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    found = run(folder, *steps, gpus=gpus, minutes=minutes_for(gpus))
    return now / 60, found, began


@pytest.mark.parametrize("gpus", range(1, 9))
def test_every_machine_has_an_hour_that_fits(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 minutes are enough even if every step takes all of its limit; on eight GPUs 30 minutes are enough."""
    minutes, found, began = dry_run(tmp_path, monkeypatch, STEPS, gpus)
    assert minutes <= {1: 60, 8: 30}.get(gpus, 60)
    can, others = available(gpus)
    assert (
        {name for name, step in found["steps"].items() if step["state"] == PASSED}
        == {step.name for step in can}
        == began.keys()
    )
    assert {step.gpus for step in others} == ({2} if gpus == 1 else set())
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in can:
        assert len(began[step.name][1]) == (gpus if step.most is None else min(step.most, gpus)) >= step.gpus


def test_a_plan_that_does_not_fit_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [replace(step, minutes=step.minutes + 1.5) for step in STEPS]
    for gpus in (1, 8):
        found = dry_run(tmp_path / str(gpus), monkeypatch, long, gpus)[1]
        assert LATE in [step["state"] for step in found["steps"].values()]


def test_steps_of_several_gpus_run_side_by_side_and_the_next_waits_for_all_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        replace(python("four", ""), gpus=2, most=4),
        replace(python("two", ""), gpus=2, most=2),
        replace(python("all", ""), gpus=2, most=None),
        python("one", ""),
    ]
    began = dry_run(tmp_path, monkeypatch, steps, 8)[2]
    assert [(name, at, len(taken)) for name, (at, taken) in began.items()] == [
        ("four", 0, 4),
        ("two", 0, 2),
        ("all", 1, 8),
        ("one", 2, 1),
    ]


@pytest.mark.parametrize("step", [step for step in STEPS if not step.is_test], ids=lambda step: step.name)
def test_the_command_of_every_step_has_options_that_exist(step: Step) -> None:
    words = list(step.words)
    if "ringlab_course.cli.lab" in words:
        words = ["lab", *words[words.index("ringlab_course.cli.lab") + 1 :]]
    else:
        words = words[words.index("ringlab") + 1 :]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context(step.name, words)
    assert context.params["output"] == Path("{out}")


COLLECT = """
import json, sys, pytest
class Seen:
    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid for item in session.items]
for words in json.loads(sys.argv[1]):
    seen = Seen()
    pytest.main([*words, "--collect-only", "-q", "-q"], plugins=[seen])
    print("COLLECTED", json.dumps(seen.tests))
"""


@pytest.mark.thorough
def test_every_step_of_tests_has_tests_and_each_test_is_in_one_of_them() -> None:
    words = [list(step.words[2:]) for step in STEPS if step.is_test]
    everything = [*words[0][:4], "tests/gpu"]
    command = [sys.executable, "-c", COLLECT, json.dumps([everything, *words])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    found = [
        json.loads(line.removeprefix("COLLECTED")) for line in done.stdout.splitlines() if "COLLECTED" in line
    ]
    whole, *steps = map(set, found)
    assert len(steps) == len(words) and all(steps), done.stderr
    assert set().union(*steps) == whole
    assert sum(map(len, steps)) == len(whole), "a test is in two steps"
    first = steps[0]
    assert not [name for name in first if "flex" in name or "flash" in name], (
        "what compiles for long comes first"
    )


def figures(name: str, gpu: str = HOPPER) -> dict[str, Row]:
    rows = expected(name, json.loads((MADE_UP / f"{name.split()[0]}.json").read_text()), gpu, 1)
    return {f"{row.name} [{row.source[:4]}]": row for row in rows}


def test_kernels_are_printed_beside_published_figures_and_the_peak() -> None:
    rows = figures("kernels")
    assert rows["flash, forward, full [Flas]"].expected == 370
    peak = rows["triton, forward, causal [peak]"]
    assert peak.expected == pytest.approx(989.5) and peak.unit == "TFLOP/s"
    assert not expected(
        "kernels", json.loads((MADE_UP / "kernels.json").read_text()), "A GPU nobody built", 1
    )
    assert all(row.source == "peak" for row in figures("kernels", "NVIDIA A100-SXM4-80GB").values())


@pytest.mark.parametrize(
    ("gpu", "version", "full", "causal"),
    [
        (HOPPER, "flash-2", 370, 335),
        (HOPPER, "flash-3", 648, 616),
        (HOPPER, "flash-4", None, None),
        ("NVIDIA B200", "flash-4", 1613, 1613),
        ("NVIDIA B200", "flash-2", None, None),
    ],
)
def test_flash_attn_is_printed_beside_the_figure_of_the_version_that_ran(
    gpu: str, version: str, full: float | None, causal: float | None
) -> None:
    case = {"pass": "forward", "contenders": {"flash block": {"tflops": 600.0}}}
    result = {
        "cases": [case | {"causal": False}, case | {"causal": True}],
        "computed_by": {"flash block": version},
    }
    rows = expected("kernels", result, gpu, 1)
    assert all(row.name.startswith(f"flash block ({version}), forward") for row in rows)
    published = [row.expected for row in rows if not row.source.startswith("peak")]
    assert published == [figure for figure in (full, causal) if figure]
    sources = {row.source for row in rows if row.source.startswith("peak")}
    peak = "peak" if full else "peak; no published figure known"
    assert sources == ({peak} if gpu == HOPPER else set())


def test_a_ring_is_printed_beside_one_call_of_its_kernel() -> None:
    rows = list(figures("ring on one GPU").values())
    assert rows and all(row.expected == 1.0 and "once" in row.name for row in rows)


def test_a_link_and_a_scaling_are_printed_beside_what_is_known() -> None:
    cases = [{"case": "bandwidth", "bytes": 2**power, "bytes_per_s": 3e11} for power in (12, 30)]
    (row,) = expected("lab L1", {"cases": cases}, HOPPER, 8)
    assert (row.name, row.measured, row.expected) == (
        "1024 MiB to the next rank",
        300.0,
        450.0,
    ) and not row.odd
    block = {"case": "overlap", "tokens": 8192, "block": "native", "flops_per_s": 4e14}
    rows = expected("lab L1", {"cases": [block, {**block, "tokens": 1024}]}, HOPPER, 8)
    assert [(row.name, row.measured) for row in rows] == [("native, 8192 tokens", 400.0)]
    case = {
        "case": "scaling",
        "P": 8,
        "scaling": "weak",
        "pass": "forward",
        "contenders": {"zigzag": {"efficiency": 0.4}},
    }
    (row,) = expected("lab L2 triton", {"cases": [case, {**case, "P": 2}]}, HOPPER, 8)
    assert row.odd and "look at this" in str(row)
    assert expected("tune", {}, HOPPER, 8) == []


@pytest.mark.parametrize(("measured", "odd"), [(69, True), (71, False), (109, False), (111, True)])
def test_a_figure_is_odd_far_below_and_above_what_is_expected(measured: float, odd: bool) -> None:
    assert Row("x", measured, 100, "TFLOP/s", "peak").odd is odd

"""Commands print one JSON object on stdout, exit with the right status, and report errors with a remedy."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import ringlab.cli.doctor as doctor_module
from ringlab.bench.device import Cpu
from ringlab.blocks import available, known
from ringlab.cli import app, output
from ringlab.conformance import verify as verify_module
from ringlab.conformance.verify import Finding, jobs, summary
from tests import needs
from tests.blocks.device_calls import flash_attn_packages

CHECKOUT = Path(__file__).resolve().parents[2]


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_doctor_prints_one_object_and_knows_this_machine() -> None:
    status, out, _ = call("doctor", "--json")
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert status == 0 and found["ok"] is True
    assert checks["torch"]["state"] == checks["gloo"]["state"] == checks["fonts"]["state"] == "ok"
    assert all(check["remedy"] for check in found["checks"] if check["state"] != "ok")


def test_doctor_says_what_is_broken_and_exits_with_1(monkeypatch) -> None:
    def crash(name: str):
        raise ImportError("libtorch is gone")

    monkeypatch.setattr(doctor_module, "PROBES", {"torch": crash})
    for more in ("_transports", "_contributed"):
        monkeypatch.setattr(doctor_module, more, dict)
    status, out, _ = call("doctor", "--json")
    broken = [check for check in json.loads(out)["checks"] if check["state"] == "broken"]
    assert status == 1 and [check["name"] for check in broken] == ["torch"]
    assert "libtorch is gone" in broken[0]["found"] and broken[0]["remedy"]


def test_doctor_says_what_is_skipped_in_the_words_of_the_tests(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # simulates a machine without Triton
    checks = {check["name"]: check for check in json.loads(call("doctor", "--json")[1])["checks"]}
    assert checks["GPUs"]["found"] == needs.missing_cuda.__wrapped__()
    assert (
        checks["GPUs"]["found"].startswith("needs an NVIDIA GPU: ")
        and "tests/gpu" in checks["GPUs"]["remedy"]
    )
    for name in ("triton", "interpreter of triton", "compiler for absent GPUs"):
        assert (
            checks[name]["found"] == needs.missing_triton.__wrapped__() and checks[name]["state"] == "missing"
        )


def test_doctor_tells_of_blocks_for_gpus_whether_they_can_run(monkeypatch) -> None:
    """Without a GPU, the block's line says so; with one, it has the chosen version, or why the block cannot run."""
    names = {f"block {name}" for name in known() if name not in (*available(), "triton")}
    assert set(doctor_module._blocks()) == names == {"block cudnn", "block flash", "block flex"}
    monkeypatch.setattr("ringlab.bench.device.no_cuda", lambda: "no GPU like that")
    found = doctor_module._block("block flash")
    assert (found.state, found.found) == ("missing", "no GPU like that")
    monkeypatch.setattr("ringlab.bench.device.no_cuda", lambda: None)
    with FakeTensorMode(), flash_attn_packages(3, capability=(9, 0)):
        assert doctor_module._block("block flash").found == "flash-3 can run here"
    with FakeTensorMode(), flash_attn_packages(3, capability=(10, 0)):
        found = doctor_module._block("block flash")
        assert found.state == "missing" and "capability 10.0" in found.found
    with FakeTensorMode(), flash_attn_packages():
        found = doctor_module._block("block flash")
        assert found.state == "missing" and "pip install --no-build-isolation 'ringlab[flash]'" in found.found


@pytest.mark.parametrize("gpus", [1, 8])
def test_doctor_says_which_steps_of_the_gpu_hour_can_run(monkeypatch, gpus: int) -> None:
    from ringlab.bench.hour import STEPS

    monkeypatch.setattr("ringlab.bench.device.no_cuda", lambda: "no GPU like that")
    assert doctor_module._hour("make gpu").found == "no GPU like that"
    monkeypatch.setattr("ringlab.bench.device.no_cuda", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with FakeTensorMode(), flash_attn_packages(2, 3, capability=(10, 0)):
        said = doctor_module._hour("make gpu")
    assert "skipped: flash-4, flash-3, whose libraries" in said.found
    need_two = ", ".join(step.name for step in STEPS if step.gpus == 2)
    assert said.state == "ok" and f"of {len(STEPS)} steps" in said.found
    assert (f"not {need_two}, which need 2 GPUs" in said.found) == (gpus == 1)


@pytest.mark.needs_triton
def test_doctor_tells_what_keeps_the_interpreter_from_working(monkeypatch) -> None:
    monkeypatch.setattr(doctor_module, "INTERPRETER", "raise SystemExit('no interpreter like that')")
    monkeypatch.setattr(doctor_module, "ASSEMBLERS", "raise SystemExit('no ptxas')")
    checks = {check["name"]: check for check in json.loads(call("doctor", "--json")[1])["checks"]}
    for name, found in (
        ("interpreter of triton", "no interpreter like that"),
        ("compiler for absent GPUs", "no ptxas"),
    ):
        assert (checks[name]["state"], checks[name]["found"]) == ("missing", found) and checks[name]["remedy"]


def few(quick: bool = False) -> list:
    return [job for job in jobs(quick) if job.transport == "virtual" and job.case.P == 2][:3]


def test_verify_is_green_on_a_few_cases(monkeypatch) -> None:
    monkeypatch.setattr(verify_module, "jobs", few)
    status, out, _ = call("verify", "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["cases"], found["failed"]) == (0, True, 3, [])
    assert 0 < found["worst"]["ratio"] <= 1
    status, out, _ = call("verify")
    assert status == 0 and "bound" in out and "3 cases, all within their bounds" in out


def test_verify_is_red_when_a_block_is_wrong(monkeypatch) -> None:
    from ringlab.blocks.naive import Naive
    from ringlab.merge import Partial

    right = Naive.forward

    def wrong(self, q, k, v, *, causal, scale, **options):
        part = right(self, q, k, v, causal=causal, scale=scale * 1.01, **options)
        return Partial(part.out, part.lse)

    monkeypatch.setattr(
        verify_module, "jobs", lambda quick: [j for j in jobs() if j.block == "naive" and j.case.P == 3][:2]
    )
    monkeypatch.setattr(Naive, "forward", wrong)
    status, out, _ = call("verify", "--json")
    found = json.loads(out)
    assert status == 1 and found["ok"] is False and len(found["failed"]) == 2


def test_nan_is_never_within_a_bound() -> None:
    job = few()[0]
    names = ("out", "lse", "dq", "dk", "dv")
    finding = Finding(job, dict.fromkeys(names, float("nan")), dict.fromkeys(names, 1.0))
    assert not finding.ok and summary([finding])["ok"] is False


def test_the_quick_selection_meets_every_value_of_every_axis() -> None:
    quick = jobs(quick=True)
    for axis in ("transport", "block", "schedule"):
        assert {getattr(job, axis) for job in quick} == {getattr(job, axis) for job in jobs()}
    for axis in ("layout", "dtype", "mask", "group", "S"):
        assert {getattr(job.case, axis) for job in quick} == {getattr(job.case, axis) for job in jobs()}


@pytest.mark.parametrize("kind", ["emulate", "processes"])
def test_bench_prints_ratios_times_and_the_machine(kind: str, tmp_path: Path) -> None:
    sizes = ("--tokens", "128", "--heads", "1", "--head-dim", "16", "--pairs", "1")
    status, out, _ = call("bench", kind, *sizes, "--json", "--output", str(tmp_path / "result.json"))
    found = json.loads(out)
    assert status == 0 and found["forward_ratio"] > 0 and found["forward_backward_ratio"] > 0
    assert found["machine"]["torch"] and found["work"]["S"] == 128
    assert json.loads((tmp_path / "result.json").read_text())["bench"] == kind


@pytest.mark.parametrize("words", [("kernels",), ("ring", "--emulated", "4")], ids=" ".join)
def test_a_bench_of_gpus_without_one_is_an_error_with_the_remedy_and_status_1(words, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, err = call("bench", *words, "--json")
    error = json.loads(out)["error"]
    assert status == 1 and error["kind"] == "DeviceError" and error["needed"] == "an NVIDIA GPU"
    assert "make gpu" in error["remedy"] and "bench emulate" in error["remedy"]
    assert "remedy" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "cases"), [(("kernels", "--mask", "full"), 2), (("ring", "--emulated", "2"), 2)], ids=str
)
def test_a_bench_of_gpus_reports_and_writes_its_cases(words, cases: int, monkeypatch, tmp_path: Path) -> None:
    """The benches of GPUs print and write one report; the CPU stands in for the GPU."""
    for room in ("kernels", "emulated_ring"):
        monkeypatch.setattr(f"ringlab.bench.{room}.Cuda", Cpu)
    sizes = ("--tokens", "64", "--heads", "2", "--head-dim", "16", "--rounds", "1", "--blocks", "native")
    output = tmp_path / "new folder" / "result.json"
    status, out, _ = call("bench", *words, *sizes, "--json", "--output", str(output))
    found = json.loads(out)
    assert status == 0 and found["ok"] and len(found["cases"]) == cases
    assert json.loads(output.read_text()) == found
    status, out, _ = call("bench", *words, *sizes)
    assert status == 0 and " TFLOP/s" in out and " of flash" in out and "cudnn" in out
    status, out, _ = call("bench", *words, *sizes, "--blocks", "nonesuch")
    assert status == 1 and "not timed: BackendError" in out


def test_results_are_drawn_by_one_command(tmp_path: Path) -> None:
    status, out, _ = call("bench", "draw", "--out", str(tmp_path), "--json")
    figures = json.loads(out)["figures"]
    assert status == 0 and len(figures) >= 2
    assert all(Path(figure["file"]).exists() and figure["alt"] for figure in figures)
    assert call("bench", "draw", str(tmp_path / "none.json"), "--out", str(tmp_path))[0] == 1


def test_a_wrong_call_has_status_2() -> None:
    assert call("verify", "--no-such-option")[0] == 2
    assert call("bench", "kernels", "--mask", "diagonal")[0] == 2
    assert call("bench", "emulate", "--tokens", "0")[0] == 2


def test_a_log_gets_a_line_for_news_and_one_after_silence(monkeypatch, capsys) -> None:
    clock = iter([0.0, 1.0, 2.0, 13.0, 14.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.counted("check", 4) as step:
        for news in ("", "forward failed", "", ""):
            step(news)
    assert capsys.readouterr().err.splitlines() == ["check 2 of 4, 2 s: forward failed", "check 3 of 4, 13 s"]


ODD = "a[hf][/red][bold]b:smile:"
"""A text that would become a style, an error and a picture if it were read as markup."""


def flat(printed: str) -> str:
    """Return the printed text without spaces, line ends and the frames of tables and panels."""
    return re.sub(r"[\s│┃╭╮╰╯─━]+", "", printed)


@pytest.mark.parametrize(
    "words",
    [
        (ODD,),
        ("plan", f"--{ODD}"),
        ("plan", "--tokens", "1Ki", "--hardware", "h100", "--model", ODD),
        ("simulate", "--perfetto", f"{ODD}/file"),
        ("train", "--text", ODD),
        ("check", ODD),
        ("check", f"{ODD}.py:attend"),
        ("tune", "--kernel", ODD),
        ("calibrate", "--hardware", f"{ODD}/file"),
        ("bench", "kernels", "--mask", ODD),
    ],
    ids=" ".join,
)
def test_an_error_shows_a_text_of_the_user_as_it_is(words, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*words)
    assert status in (1, 2) and flat(ODD) in flat(out + err)


def test_doctor_shows_remedies_as_they_are(monkeypatch) -> None:
    probes = {
        ODD: doctor_module.optional("hf", ODD),
        "torch": lambda name: doctor_module.Diagnosis(name, "broken", ODD, ODD),
    }
    monkeypatch.setattr(doctor_module, "PROBES", probes)
    for more in ("_transports", "_contributed"):
        monkeypatch.setattr(doctor_module, more, dict)
    out = flat(call("doctor")[1])
    assert "pipinstall'ringlab[hf]'" in out and out.count(flat(ODD)) >= 4 and "✗" in out


WAITS = """
import pathlib, time
def attend(q, k, v, ring):
    pathlib.Path("called").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_told_to_end_or_killed_leaves_no_folder(
    end: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "ringlab", "check", "waits:attend", "--only", "forward"]
    surroundings = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(command, cwd=tmp_path, env=surroundings, stdout=subprocess.PIPE) as running:
        while not (tmp_path / "called").exists():
            assert running.poll() is None
            time.sleep(0.05)
        assert any(folder.iterdir())
        running.send_signal(end)
    assert running.returncode == (128 + end if end == signal.SIGTERM else -end)
    deadline = time.monotonic() + 60
    while any(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [*folder.iterdir()] == []

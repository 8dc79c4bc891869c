"""The counterexample's script shows the report's error, for many rings, settings and ways of calling."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringlab import VirtualCluster
from ringlab.cli import app
from ringlab.comm.ring import Ring
from ringlab.conformance.mutants import MUTANTS, SOURCE
from ringlab.conformance.report import diagnosis, script
from ringlab.conformance.report.counterexample import located
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.run.loading import load
from ringlab.conformance.run.rank import RankPart
from ringlab.conformance.run.run import VALUES, Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.target.claims import Target

CHECKOUT = Path(__file__).resolve().parents[2]


HERE = "tests.conformance.wrong_values"


LINE = re.compile(r"^rank (\d+) +(\w+): error (\S+), bound (\S+?)(  WRONG)?$", re.MULTILINE)


PLAIN = Run(2, 8, "zigzag", True, H=4, K=2, D=8, B=2)


def started(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=f"{folder}{os.pathsep}{CHECKOUT}")
    return subprocess.run(
        [sys.executable, str(file)], cwd=folder, env=environment, capture_output=True, text=True
    )


def printed(text: str) -> dict[tuple[int, str], float]:
    return {(int(rank), name): float(error) for rank, name, error, *_ in LINE.findall(text)}


def compare(text: str, where: dict[str, Any]) -> None:
    """Check that every result of the report has the same error in the script, rank by rank."""
    errors = printed(text)
    for result in where["results"]:
        for rank, error in enumerate(result["by_rank"]):
            if result["ok"]:
                assert errors[rank, result["name"]] <= result["bound"]
            else:
                assert errors[rank, result["name"]] == pytest.approx(error, rel=0.02, abs=result["bound"])


def reported(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """Return the report on mine:attend, whose script is written to counterexample.py."""
    (folder / "mine.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    quick = [] if "--kind" in options else ["--quick"]
    asked = [
        "check",
        "mine:attend",
        *quick,
        "--script",
        "counterexample.py",
        "--html",
        "report.html",
        *options,
    ]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code in (0, 1), done.output
    import json

    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "only"),
    [("sees_one_too_many", "masks"), ("gradients_stay", "dk"), ("mask_as_if_contiguous", "masks")],
)
def test_a_wrong_ring_fails_in_its_script_and_a_mended_one_passes(
    name: str, only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(tmp_path, MUTANTS[name].source(), monkeypatch, "--only", only)
    text = (tmp_path / "counterexample.py").read_text()
    assert report["script"] == text and "ringlab.conformance" not in text
    assert "The smallest counterexample as a script" in (tmp_path / "report.html").read_text()
    failed = started(tmp_path / "counterexample.py", tmp_path)
    assert failed.returncode == 1, failed.stderr
    compare(failed.stdout, report["checks"][1]["where"]["smallest"])
    (tmp_path / "mine.py").write_text(SOURCE)
    mended = started(tmp_path / "counterexample.py", tmp_path)
    assert mended.returncode == 0 and "WRONG" not in mended.stdout, mended.stdout + mended.stderr
    assert printed(mended.stdout).keys() == printed(failed.stdout).keys()


RIGHT = """
import torch
import torch.distributed as dist
from tests.conformance.bad_targets import ring

def attend(q, k, v):
    P, length = dist.get_world_size(), q.shape[2]
    return ring(q, k, v, causal=False, positions=list(torch.arange(P * length).split(length)))
"""


@pytest.mark.thorough
def test_a_wrong_ring_over_torch_distributed_fails_in_gloo_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "from tests.conformance.bad_targets import gather_and_average as attend\n"
    report = reported(tmp_path, wrong, monkeypatch, "--only", "forward", "--no-ragged", "--ranks", "2")
    text = (tmp_path / "counterexample.py").read_text()
    assert "ringlab" not in text.replace("`ringlab check", "")
    failed = started(tmp_path / "counterexample.py", tmp_path)
    assert failed.returncode == 1 and "WRONG" in failed.stdout, failed.stderr
    compare(failed.stdout, report["checks"][1]["where"]["smallest"])
    (tmp_path / "mine.py").write_text(RIGHT)
    mended = started(tmp_path / "counterexample.py", tmp_path)
    assert mended.returncode == 0 and "WRONG" not in mended.stdout, mended.stdout + mended.stderr


@pytest.mark.thorough
def test_a_right_ring_has_no_script_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(tmp_path, SOURCE, monkeypatch, "--only", "forward")
    assert report["ok"] and report["no_script"] == script.NO_VALUE
    assert not (tmp_path / "counterexample.py").exists()


def made(reference: str, run: Run) -> tuple[Report, dict[str, Any]]:
    """Return a report whose script makes exactly this run, and where the run's values are wrong."""
    ran = on_virtual_ranks(load(reference), run)
    assert ran.trouble is None, ran.trouble
    where: Any = located(ran)
    finding = Finding("masks", "asks", False, "wrong", 0.0, where={"smallest": where, "shown": where})
    report = Report(reference, "ring", "virtual", True, 0, 30.0, [finding])
    script.attach(report, lambda: load(reference))
    return report, where


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("values_with_keys", {}),
        ("values_with_keys", {"scale": 0.3, "causal": False}),
        ("values_with_keys", {"window": 3}),
        ("values_with_keys", {"window": 2, "causal": False}),
        ("values_with_keys", {"softcap": 0.5}),
        ("values_with_keys", {"documents": (3, 1, 4)}),
        ("values_with_keys", {"layout": "chunk-3"}),
        ("values_with_keys", {"strided": "heads"}),
        ("values_with_keys", {"strided": "dims", "strict": True}),
        ("values_with_keys", {"strided": "offset"}),
        ("values_with_keys", {"strided": "one buffer"}),
        ("values_with_keys", {"strided": "expanded", "values": "equal heads"}),
        ("values_with_keys", {"moved": ("token", 3)}),
        ("values_with_keys", {"moved": ("dout", 5)}),
        ("values_with_keys", {"dtype": "bfloat16", "use": "loss scale", "dout": "large"}),
        ("values_with_keys", {"use": "summed loss", "dout": "ones"}),
        ("values_with_keys", {"use": "loss of the last token", "dout": "last token"}),
        ("values_with_keys", {"use": "loss of the second half", "dout": "second half"}),
        ("values_with_keys", {"use": "backward again"}),
        ("values_with_keys", {"use": "no_grad"}),
        ("values_with_keys", {"use": "inference_mode"}),
        ("values_with_keys", {"use": "q and v trained"}),
        ("values_with_keys", {"use": "k trained"}),
        *(("values_with_keys", {"values": values}) for values in VALUES if not values.startswith("NaN")),
        ("values_with_keys", {"backward": False}),
        ("loss_on_lse", {"use": "loss on lse", "dlse": True}),
        ("documents", {"documents": (3, 1, 4), "layout": "contiguous"}),
        ("tokens_first_target", {}),
        ("tokens_before_batch_target", {"S": 6, "P": 3}),
        ("no_batch_target", {"B": 1}),
        ("packed", {"K": 4}),
        ("own_gradients", {}),
        ("with_options", {}),
        ("half_of_dk", {"P": 3, "S": 7}),
    ],
)  # fmt: skip
def test_the_script_makes_the_same_run(
    name: str,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "_lacks", lambda text: "")  # keeps the report from trying the script
    run = Run(**{**asdict(PLAIN), **changes})
    report, where = made(f"{HERE}:{name}", run)
    assert report.no_script == "" and any(not each["ok"] for each in where["results"])
    (tmp_path / "it.py").write_text(report.script)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "it.py"), run_name="__main__")
    assert ended.value.code == 1
    compare(capsys.readouterr().out, where)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use": "five in flight"}, "“five in flight”"),
        ({"use": "two rings", "P": 4}, "“two rings”"),
        ({"use": "recomputed"}, "“recomputed”"),
    ],
)
def test_a_run_that_no_script_can_make_is_named(changes: dict[str, Any], said: str) -> None:
    report, _ = made(f"{HERE}:values_with_keys", Run(**{**asdict(PLAIN), **changes}))
    assert report.script == "" and said in report.no_script


def test_other_transports_and_targets_without_a_name_have_no_script() -> None:
    report, _ = made(f"{HERE}:values_with_keys", PLAIN)
    report.script, report.transport = "", "gloo"
    script.attach(report, lambda: load(report.target))
    assert "gloo" in report.no_script
    local = Report("attend", "ring", "virtual", True, 0, 30.0, report.findings)
    script.attach(local, lambda: load("attend"))
    assert "package.module:name" in local.no_script and diagnosis.first(local.findings)


def test_a_script_has_an_expression_for_each_argument_that_the_suite_passes() -> None:
    run = Run(**{**asdict(PLAIN), "window": 3, "softcap": 0.5, "documents": (3, 5)})
    target = load(f"{HERE}:values_with_keys")
    assert isinstance(target, Target)

    def names(ring: Ring) -> set[str]:
        return {*RankPart(target, run, ring.rank, ring)._known()}

    assert VirtualCluster(2, memory=False).run(names).results[0] == {*script.known(run, target, "t")}


def test_a_script_that_shows_nothing_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No script is offered if it shows no wrong value: this fault appears only in a process's second call."""
    again = (
        "\n\n_first = attend\n_calls = []\n\n\ndef attend(ring, q, k, v, *, causal, positions, scale=None):\n"
    )
    again += "    _calls.append(1)\n    out, lse = _first(ring, q, k, v, causal=causal, positions=positions, scale=scale)\n"
    again += "    return out * (1 if len(_calls) <= ring.world_size else 2), lse\n"
    report = reported(tmp_path, SOURCE + again, monkeypatch, "--only", "forward", "--ranks", "2")
    assert not report["ok"] and report["script"] == "" and not (tmp_path / "counterexample.py").exists()
    assert "run on its own, it shows no wrong value" in report["no_script"]


def test_a_script_that_cannot_run_is_not_offered() -> None:
    assert script._lacks("raise SystemExit('no such file')").startswith(
        "run on its own, it ends with status 1"
    )
    assert script._lacks("print('WRONG'); raise SystemExit(1)") == ""


STEP = """
from ringlab.plain_step import step

def attend(ring, tokens, labels, *, micro_batches=1):
    loss, model = step(ring, tokens, labels, micro_batches=micro_batches)
    return FACTOR * loss, model
"""
DECODE = "from tests.conformance.test_decoding import all_slots_if_several, over_a_ring\n"
SLOTS = """
def attend(ring, q, k, v, lengths, positions):
    return over_a_ring()(ring, q, k, v, len(positions), lengths, positions)[0]
"""
IN_ONE_GO = "from tests.conformance.test_merging import in_one_go as attend"
OTHER_KINDS = {
    "merge": (["merge"], "from tests.conformance.test_report import half_a_merge as attend", IN_ONE_GO, "values"),
    "merge of blind rows": (["merge"], "def attend(outs, lses):\n    return (lses.softmax(0)[..., None] * outs).sum(0)", IN_ONE_GO, "unwritten"),
    "decode": (["decode", "--ranks", "2"], DECODE + "attend = over_a_ring(lambda outs, lses: outs.mean(0))", DECODE + "attend = over_a_ring()", "values"),
    "decode of slots": (["decode", "--ranks", "2"], DECODE + "attend = all_slots_if_several", DECODE + SLOTS, "uncleared, new tokens"),
    "decode in half": (["decode", "--ranks", "2"], DECODE + "attend = over_a_ring(lambda outs, lses: outs.mean(0))", DECODE + "attend = over_a_ring()", "dtypes"),
    "step": (["step", "--ranks", "2"], STEP.replace("FACTOR", "ring.world_size"), STEP.replace("FACTOR", "1"), "loss"),
    "step in parts": (["step", "--ranks", "2"], STEP.replace("FACTOR", "micro_batches"), STEP.replace("FACTOR", "1"), "micro-batches"),
}  # fmt: skip
"""The kind with its options, a wrong program, a right one, and the check that fails."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_a_wrong_call_of_another_kind_fails_in_its_script_and_a_mended_one_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, *options), wrong, right, check = OTHER_KINDS[name]
    report = reported(tmp_path, wrong, monkeypatch, "--kind", kind, "--only", check, *options)
    script_of(report, tmp_path, right)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "step"])
def test_a_wrong_call_over_torch_distributed_fails_in_gloo_processes_of_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"decode": ("right_decodes", "reduced"), "step": ("right_steps", "gathered")}[kind]
    source = "import inspect\nfrom tests.conformance.{} import {} as right\n\n\n".format(*right)
    source += "def attend(*args, **named):\n    made = right(*args, **named)\n    return CHANGED\n\n\nattend.__signature__ = inspect.signature(right)\n"
    changed = {"decode": "made * 1.01", "step": "(made[0] * named['world_size'], made[1])"}[kind]
    only = {"decode": "values", "step": "loss"}[kind]
    wrong = source.replace("CHANGED", changed)
    report = reported(tmp_path, wrong, monkeypatch, "--kind", kind, "--only", only, "--ranks", "2")
    script_of(report, tmp_path, source.replace("CHANGED", "made"))
    assert "ringlab" not in report["script"].replace("`ringlab check", "")


def script_of(report: dict[str, Any], folder: Path, right: str) -> None:
    """Check that the report's script fails, and passes once mine.py has the right program."""
    text = (folder / "counterexample.py").read_text()
    assert report["script"] == text and report["no_script"] == "" and "ringlab.conformance" not in text
    failed = started(folder / "counterexample.py", folder)
    assert failed.returncode == 1 and "WRONG" in failed.stdout, failed.stdout + failed.stderr
    (folder / "mine.py").write_text(right)
    mended = started(folder / "counterexample.py", folder)
    assert mended.returncode == 0 and "error" in mended.stdout, mended.stdout + mended.stderr
    assert "WRONG" not in mended.stdout


@pytest.mark.parametrize(
    ("kind", "target", "only", "reason"),
    [
        ("merge", "tests.conformance.test_merging:in_one_go", "values", script.NO_VALUE),
        ("decode", "tests.conformance.test_decoding:scales_its_queries", "side effects", "and the check “side effects” compares arguments"),
        ("step", f"{HERE}:own_loss", "equal ranks", "on one rank, and the check “equal ranks” does not"),
    ],
)  # fmt: skip
def test_a_report_says_why_a_call_has_no_script(
    kind: str, target: str, only: str, reason: str, tmp_path: Path
) -> None:
    asked = ["check", target, "--kind", kind, "--only", only, "--script", str(tmp_path / "it.py")]
    done = CliRunner().invoke(app, asked)
    assert not (tmp_path / "it.py").exists(), done.output
    assert reason in " ".join(done.output.split())

"""A report names faults and known remedies, and has its verdict in JSON, Markdown, JUnit XML and pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import ringlab
from ringlab import conformance, plain_ring
from ringlab.cli import app
from ringlab.cli.check import _table
from ringlab.conformance.kinds.decode import check_decode
from ringlab.conformance.kinds.merge import check_merge
from ringlab.conformance.kinds.step import check_step
from ringlab.conformance.report.diagnosis import GAVE_UP, NOT_ASKED, first, sentences, wrong_values
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.report.html import html
from ringlab.conformance.report.junit import junit
from ringlab.conformance.report.text import badge, evidence, markdown, summary
from ringlab.conformance.run.run import Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.suite import check
from ringlab.conformance.target.claims import as_target
from ringlab.layout import get_layout
from ringlab.plain_step import step

CHECKOUT = Path(__file__).resolve().parents[2]


SPLIT, WHOLE = "claim Target(split_heads=True)", "claim Target(grouped=False) or --no-grouped"


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({}, [SPLIT, WHOLE]),
        ({"grouped": False}, [SPLIT]),
        ({"split_heads": True, "schedule": "any"}, [WHOLE]),
    ],
)
def test_the_claims_that_help_a_target_which_refuses_heads_are_named(claims: Any, says: list[str]) -> None:
    def attend(q: Any, k: Any, v: Any, *, ring: Any, positions: Any, causal: bool) -> Any:
        H, K = q.shape[1], k.shape[1]
        if H != K or K % (2 * ring.world_size):
            raise ValueError(f"{H} query heads and {K} key/value heads")
        return plain_ring.attend(ring, q, k, v, positions=positions, causal=causal)

    given = {"ranks": (4,), "layouts": ("zigzag",), "isolate": False, **claims}
    found = check(attend, only=["forward", "dq", "masks", "ragged"], **given).sentences
    advice = " ".join(each for each in found if each.startswith("It refuses heads in "))
    assert [each for each in (SPLIT, WHOLE) if each in advice] == says
    assert not any("It refuses heads" in each for each in check(attend, only=["forward"], **given).sentences)


RIGHT, WRONG = "ringlab.plain_ring:attend", "ringlab.conformance.mutants:no_scale"


def made() -> Report:
    findings = [
        Finding("forward", "out", True, "10 runs", 0.5),
        Finding("dq", "its gradient", False, "dq is wrong | \x00 <here>", 0.25, counterexample="P=1 S=1"),
        Finding("scale", "its own", True, "does not apply: no parameter scale", 0.0, applies=False),
    ]
    return Report("a:b", "ring", "virtual", True, 7, 30.0, findings, 12, 1.0)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv = ['ringlab', *{arguments!r}]; from ringlab.cli import main; main()"
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )


def test_json_has_the_verdict_and_the_evidence() -> None:
    data = json.loads(json.dumps(made().as_dict()))
    assert data["ok"] is False
    assert [each["ok"] for each in data["checks"]] == [True, False, True]
    assert {"name", "ok", "evidence", "seconds"} <= data["checks"][0].keys()
    assert (data["target"], data["seed"], data["quick"]) == ("a:b", 7, True)


def test_an_empty_report_is_not_ok() -> None:
    assert not Report("a:b", "ring", "virtual", True, 0, 30.0).ok


def test_markdown_is_a_table() -> None:
    rows = [line for line in markdown(made()).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    assert "dq is wrong \\|" in rows[3] and "Smallest counterexample: P=1 S=1" in rows[3]
    assert "does not apply" in rows[4]


def test_junit_can_be_read() -> None:
    suite = ElementTree.fromstring(junit(made()))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert [[child.tag for child in case] for case in suite] == [["system-out"], ["failure"], ["skipped"]]


def test_the_summary_counts_what_applies() -> None:
    assert summary(made()) == "2 checks of the quick tier, 12 runs, seed 7, 1 s: 1 failed: dq"


def half_a_merge(outs, lses):  # type: ignore[no-untyped-def]
    return outs.mean(0)


def tokens_before_heads(ring, q, k, v, *, causal, positions):  # type: ignore[no-untyped-def]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)
    return out.transpose(1, 2), lse


def zigzag(ring, q, k, v, *, causal):  # type: ignore[no-untyped-def]
    layout = get_layout("zigzag", q.shape[2] * ring.world_size, ring.world_size)
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(ring.world_size)]
    return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


def zigzag_of_tokens_before_heads(ring, q, k, v, *, causal):  # type: ignore[no-untyped-def]
    out, lse = zigzag(ring, *(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return out.transpose(1, 2), lse


def refuses(ring, q, k, v, *, causal):  # type: ignore[no-untyped-def]
    raise ValueError(f"{q.shape[2]} tokens are too many")


def raises_a_surrogate(ring, q, k, v, *, causal):  # type: ignore[no-untyped-def]
    raise ValueError("not text: \udcff")


def always_causal(ring, q, k, v):  # type: ignore[no-untyped-def]
    positions = [torch.arange(q.shape[2]) + rank * q.shape[2] for rank in range(ring.world_size)]
    return plain_ring.attend(ring, q, k, v, causal=True, positions=positions)


@pytest.mark.parametrize(
    ("function", "claims", "said"),
    [
        (tokens_before_heads, {}, "right for q as (B, L, H, D). If that is meant, say --axes BLHD, or Target(…, axes="),
        (tokens_before_heads, {"axes": "BLHD"}, ""),
        (zigzag, {"ragged": False}, "right in the layout zigzag. If that is meant, say --layouts zigzag, or Target("),
        (zigzag, {"ragged": False, "layouts": ("zigzag",)}, ""),
        (
            zigzag_of_tokens_before_heads,
            {"ragged": False},
            "for q as (B, L, H, D), in the layout zigzag. If that is meant, say --axes BLHD --layouts zigzag, or",
        ),
        (always_causal, {"ragged": False}, "with a causal mask on every call. If that is meant, say Target(…, causal=(True,))."),
        (always_causal, {"ragged": False, "causal": (True,)}, ""),
    ],
)  # fmt: skip
def test_another_way_to_call_a_target_is_named_if_it_is_right(
    function: Any, claims: dict[str, Any], said: str
) -> None:
    report = check(function, quick=True, only=("types", "forward", "masks", "dk"), isolate=False, **claims)
    assert said in report.right_if and bool(report.right_if) is bool(said) is not report.ok
    assert report.right_if in markdown(report) and report.right_if in html(report).replace("&quot;", '"')
    assert report.as_dict()["right_if"] == report.right_if and (report.right_if in str(report))


def test_other_axes_are_tried_in_a_child_of_their_own() -> None:
    report = check(f"{__name__}:tokens_before_heads", quick=True, only=("types",), ranks=(2,))
    assert "--axes BLHD" in report.right_if


@pytest.mark.parametrize("target", [WRONG, "ringlab.conformance.mutants:sees_one_too_many"])
def test_no_other_way_is_named_where_none_is_right(target: str) -> None:
    report = check(target, quick=True, only=("types", "forward", "masks"), isolate=False)
    assert report.failed and report.right_if == "" and made().right_if == ""


@pytest.mark.parametrize(
    ("option", "known"), [("--layouts", "contiguous, striped, zigzag, token-fold"), ("--dtypes", "float16, bfloat16")]
)  # fmt: skip
def test_a_claim_that_nobody_knows_is_refused_before_the_import(option: str, known: str) -> None:
    done = CliRunner().invoke(app, ["check", "no_such_module:f", option, "zigzag,float32,zagzig"])
    assert done.exit_code == 2 and f"{option} among {known}" in done.stderr and "zagzig" in done.stderr


def test_lone_surrogates_in_an_error_can_be_reported(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    asked = [
        "check",
        f"{__name__}:raises_a_surrogate",
        "--only",
        "types",
        "--ranks",
        "1",
        "--markdown",
        str(file),
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and "not text: \\udcff" in done.stdout and "\\udcff" in file.read_text()


def test_a_ring_that_is_wrong_by_chance_is_not_called_otherwise() -> None:
    calls: list[int] = []

    def by_chance(ring, q, k, v, *, causal, positions):  # type: ignore[no-untyped-def]
        calls.append(1)
        out, lse = plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)
        guessed = positions[0].tolist() == [*range(8)]  # the first guess is wrong too
        return (out * 2 if len(calls) == 1 or guessed else out), lse

    report = check(by_chance, quick=True, only=("forward",), isolate=False)
    assert report.failed == ["forward"] and report.right_if == ""
    assert wrong_values(report.findings) is not None


def test_a_wrong_form_of_a_result_is_told_to_its_end() -> None:
    def in_float32(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        return 2 * (lses.softmax(0).unsqueeze(-1) * outs.float()).sum(0)

    (others,) = [each for each in check_merge(in_float32).sentences if each.startswith("Other faults")]
    assert "“dtypes”: out is to be a tensor (2, 3, 5, 8) of torch.bfloat16, and is (2, 3, 5, 8) of" in others
    assert "P=" not in others


def test_a_target_that_is_called_wrongly_is_asked_no_more() -> None:
    report = check(zigzag, quick=True, isolate=False, ragged=False)
    left = [each.name for each in report.findings if each.evidence == NOT_ASKED]
    assert "zigzag" in report.right_if and report.runs < 30 and len(left) > 10 and not report.ok
    assert f"{len(left)} other checks were not run." in report.sentences
    assert _table(report, evidence(report)).row_count == len(report.findings) - len(left)


def rounds_float64(ring, q, k, v, *, causal, positions):  # type: ignore[no-untyped-def]
    """Compute in float32 for all inputs, give twice the right dv, and ignore a window."""
    doubled = 2 * v - v.detach()
    floats = (x.float() for x in (q, k, doubled))
    out, lse = plain_ring.attend(ring, *floats, causal=causal, positions=positions)
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def ignores_a_window(ring, q, k, v, *, causal, positions, window=None):  # type: ignore[no-untyped-def]
    return rounds_float64(ring, q, k, v, causal=causal, positions=positions)


def test_rounding_does_not_hide_a_fault_and_other_faults_are_named_too() -> None:
    names = ("forward", "dv", "precision", "window")
    report = check(ignores_a_window, quick=True, only=names, isolate=False)
    assert report.failed == list(names)
    first, float64, beside, others = report.sentences
    assert first.startswith("dv is wrong")
    assert float64.startswith(
        "In float64 it gives the digits of float32. If float64 is not meant, name the dtypes"
    )
    assert "dv is 2 times the true one" in beside
    assert others == "Other faults: “window”: window, accepted and ignored: no result changes."
    report = check(rounds_float64, quick=True, only=("forward", "dv", "precision"), isolate=False)
    assert report.sentences[0].startswith("dv is wrong")
    assert str(report).startswith(report.sentences[0]) and "\nforward: out wrong in " in str(report)


def test_a_result_that_only_another_check_finds_wrong_is_named() -> None:
    """A wrong dk hides neither a wrong out under a window nor its cause, a backward that sends nothing."""

    def keeps_gradients(q, k, v, *, ring, positions, causal, window=None):
        class Attend(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
                with torch.enable_grad():
                    ctx.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                    ctx.out = alone(*ctx.leaves)
                whole = plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)[0]
                return whole if window is None else 2 * whole

            @staticmethod
            def backward(ctx: Any, dout: Any) -> Any:
                return torch.autograd.grad(ctx.out, ctx.leaves, dout)

        def alone(q: Any, k: Any, v: Any) -> Any:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return Attend.apply(q, k, v)

    only = ("forward", "dk", "dv", "bytes", "window", "second derivatives")
    report = check(keeps_gradients, quick=True, only=only, isolate=False, layouts=("contiguous",))
    said = report.sentences
    assert "Its backward sends nothing" in " ".join(said)
    (others,) = [each for each in said if each.startswith("Other faults")]
    assert "“window”: out is wrong too" in others and "(rank" not in others


def test_the_same_error_is_shown_once() -> None:
    report = check(refuses, quick=True, only=("types", "forward", "long shards"), isolate=False)
    shown = evidence(report)
    assert shown["long shards"] == shown["forward"] == "raised as in “types”"
    assert shown["types"] == report.findings[1].evidence and "as in “types”" in markdown(report)
    assert report.findings[3].evidence.startswith("raised: ValueError: ")


def test_without_a_target_the_table_says_so_once() -> None:
    report = check("ringlab.no_such_module:ring", quick=True, only=("forward", "dq"))
    assert _table(report, evidence(report)).row_count == 1
    assert report.sentences[-1] == "2 other checks were not run."


def test_only_the_named_checks_are_made() -> None:
    report = check(RIGHT, quick=True, only=("lse",), isolate=False)
    assert [finding.name for finding in report.findings] == ["loads", "lse"]


def test_a_wrong_ring_gets_a_small_counterexample() -> None:
    report = check(WRONG, quick=True, only=("forward", "strided"), isolate=False)
    assert report.failed == ["forward", "strided"]
    assert "(P=1 S=2 " in report.findings[1].counterexample


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((RIGHT, "--only", "strided"), 0),
        ((WRONG, "--only", "strided"), 1),
        (("ringlab.conformance.no_such_module:ring", "--only", "strided"), 2),
        (("no colon", "--only", "strided"), 2),
    ],
)
def test_the_exit_status(arguments: tuple[str, ...], status: int) -> None:
    done = CliRunner().invoke(app, ["check", *arguments, "--quick", "--json"])
    assert done.exit_code == status, done.output
    assert json.loads(done.stdout)["ok"] is (status == 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--only", "nonsense"),
        ("--limit", "0"),
        ("--ranks", "two"),
        ("--transport", "pigeon"),
        ("--device", "abacus"),
        ("--axes", "HDLB"),
        ("--markdown", "no_such_folder/report.md"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_run(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["check", RIGHT, *arguments, "--quick", "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["needed"]


def test_the_command_writes_its_reports(tmp_path: Path) -> None:
    files = tmp_path / "report.md", tmp_path / "report.xml"
    done = command(
        "check", RIGHT, "--quick", "--only", "strided", "--markdown", str(files[0]), "--junit", str(files[1])
    )
    assert done.returncode == 0, done.stderr
    assert "all passed" in done.stdout and "✓" in done.stdout
    assert "| strided |" in files[0].read_text()
    assert ElementTree.fromstring(files[1].read_text()).find(".//testcase[@name='strided']") is not None


def pytest_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(folder), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.thorough
def test_the_plugin_makes_a_test_of_each_check(tmp_path: Path) -> None:
    done = pytest_of(
        tmp_path, "--ringlab-target", WRONG, "-k", "strided or causality or (scale and not loss)"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 failed" in done.stdout.splitlines()[-1] or "2 failed, 1 passed" in done.stdout.splitlines()[-1]
    assert "inputs that do not lie densely in memory" in done.stdout
    assert re.search(r"wrong in (\d+) of \1 runs", done.stdout)
    assert "Traceback" not in done.stdout


@pytest.mark.thorough
def test_the_plugin_skips_what_does_not_apply_and_stays_out_of_other_runs(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    assert "1 passed" in pytest_of(tmp_path).stdout
    target = "tests.conformance.bad_targets:returns_text"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), "--rootdir", str(tmp_path),
         "--ringlab-target", target, "-k", "own or (scale and not loss) or strided"],
        cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr


def test_a_badge_says_version_verdict_and_date() -> None:
    drawn = json.loads(badge(made()))
    assert drawn["label"] == f"ringlab {ringlab.__version__}" and drawn["color"] == "red"
    assert re.fullmatch(r"1 of 2 quick checks · \d{4}-\d\d-\d\d", drawn["message"])
    right = made()
    right.findings = right.findings[:1]
    assert json.loads(badge(right))["color"] == "brightgreen"


def test_a_test_of_ones_own_ring_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_ring.py"
    asked = ["check", RIGHT, "--init", str(file), "--ranks", "2", "--layouts", "zigzag"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0 and f"pytest {file}" in " ".join(done.output.split()), done.output
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    assert (space["target"].ranks, space["target"].layouts) == ((2,), ("zigzag",))
    assert check(space["target"], only=["forward", "masks"], quick=True, isolate=False).ok
    monkeypatch.setattr(conformance, "check", lambda target, quick: made(), raising=False)
    with pytest.raises(AssertionError, match="dq: dq is wrong"):
        space["test_it_is_attention"]()
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 2 and str(file) in "".join(again.stderr.split())  # without line breaks
    for target in ("peer:ring-flash-attn", "ringlab.conformance.mutants:no_scale"):
        assert CliRunner().invoke(app, ["check", target, "--init", str(tmp_path / "no.py")]).exit_code == 2
    assert not (tmp_path / "no.py").exists()


@pytest.mark.parametrize(("name", "status", "failed"), [("right", 0, set()), ("in_base_2", 1, {"values"})])
def test_a_merge_is_checked_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, failed: set[str]
) -> None:
    (tmp_path / "merges.py").write_text(MERGES)
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(app, ["check", f"merges:{name}", "--kind", "merge", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == status and failed <= {
        each["name"] for each in report["checks"] if not each["ok"]
    }
    assert CliRunner().invoke(app, ["check", f"merges:{name}", "--kind", "no"]).exit_code == 2


MERGES = """
import math

import torch

def right(outs, lses, base=2.718281828459045):
    lses = lses * math.log(base)
    total = lses.logsumexp(0)
    weights = torch.exp(lses - total.masked_fill(total == -math.inf, 0.0)).unsqueeze(-1)
    return (weights * outs.to(lses.dtype)).sum(0).to(outs.dtype)

def in_base_2(outs, lses):
    return right(outs, lses, 2.0)
"""


def test_parameters_that_no_run_gives_a_value_are_named_everywhere() -> None:
    def attend(
        ring: Any,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool,
        positions: Any,
        rope_scale: Any = None,
        scale: Any = None,
        **more: Any,
    ) -> Any:
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    found = check(attend, quick=True, only=("forward",), isolate=False, ranks=(2,))
    assert found.ok and found.not_asked == ("rope_scale", "scale", "**more")
    words = "not asked: rope_scale, scale, **more"
    assert found.as_dict()["not_asked"] == found.not_asked
    assert all(
        words in text for text in (summary(found), markdown(found), html(found), badge(found), repr(found))
    )
    assert "<h1>" in html(found) and f"All checks passed; {words}" in html(found)
    (element,) = ElementTree.fromstring(junit(found)).iter("property")
    assert (element.get("name"), element.get("value")) == ("not asked", "rope_scale, scale, **more")
    asked = check(attend, quick=True, only=("scale", "window"), isolate=False, ranks=(2,))
    assert asked.not_asked == ("rope_scale", "**more")
    fixed = conformance.Target(attend, options={"rope_scale": None, "scale": None})
    assert check(fixed, quick=True, only=("forward",), isolate=False, ranks=(2,)).not_asked == ("**more",)


def test_parameters_that_nobody_asks_are_named_for_every_kind_of_target() -> None:
    def merge(outs: Any, lses: Any, sinks: Any = None) -> Any:
        return (lses.softmax(0).unsqueeze(-1) * outs).sum(0)

    def decode(ring: Any, q: Any, k: Any, v: Any, sinks: Any = None, sliding_window: int = 0) -> Any:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def train(
        ring: Any, tokens: Any, labels: Any, attention_mask: Any = None, cu_seqlens: Any = None, **more: Any
    ) -> Any:
        return step(ring, tokens, labels)

    assert check_merge(merge, only=["values"]).not_asked == ("sinks",)
    assert check_decode(decode, only=["values"], ranks=[1]).not_asked == ("sinks", "sliding_window")
    assert check_step(train, only=["loss"], ranks=[2]).not_asked == ("attention_mask", "cu_seqlens", "**more")
    assert check_step(train, only=["packed"], ranks=[2]).not_asked == ("attention_mask", "**more")


def _leaves_early(ring: Any, q: Any, k: Any, v: Any, *, causal: bool, positions: Any) -> Any:
    """Return zeros on rank 1 without an exchange, and attention on the other ranks."""
    if ring.rank == 1:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])
    return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


def test_a_hang_is_named_before_the_errors_of_the_rank_that_others_wait_for() -> None:
    """The report begins with the rank that waits and its messages, not with the missing gradient of rank 1."""
    ran = on_virtual_ranks(as_target(_leaves_early), Run(2, 8, "contiguous", False))
    assert ran.trouble is not None and ran.failed == 0
    told = ran.trouble.text
    assert told.startswith("DeadlockError: rank 0 waits: rank 0 sends float32") and "to rank 1" in told
    assert told.index("the call has returned on rank 1") < told.index("autograd")
    where = {"trouble": {"kind": ran.trouble.kind, "text": told}, "rank": 0, "run": ran.run.__dict__}
    said = first([Finding("forward", "out", False, str(ran.trouble), 0.0, where=where)])
    assert said.startswith("The target hangs on rank 0, with P = 2, S = 8")


def test_a_hang_beside_another_fault_is_told_to_its_last_rank_and_once() -> None:
    places = "; ".join(
        f"rank {rank} waits in hop (mine.py, line 73), called by forward (mine.py, line 48)"
        for rank in range(4)
    )
    hung = f"the limit of 8 s for one run (--limit) was reached; {places}"
    run = Run(4, 48, "contiguous", False)
    where = {"trouble": {"kind": "hung", "text": hung}, "rank": None, "run": run.__dict__}
    raised = {
        "trouble": {"kind": "raised", "text": "ValueError: no"},
        "rank": 0,
        "run": Run(2, 48, "contiguous", False).__dict__,
    }
    findings = [
        Finding("types", "shapes", False, f"raised: ValueError: no ({run})", 0.0, where=raised),
        Finding("forward", "out", False, f"hung: {hung} ({run})", 0.0, where=where),
        Finding("masks", "masks", False, f"{GAVE_UP}: 2 runs, P = 4; hung: {hung} ({run})", 0.0),
    ]
    (others,) = [each for each in sentences(findings, "") if each.startswith("Other faults")]
    assert others.count("the limit of 8 s") == 1 and "rank 3 waits in hop" in others and "(P = 4)" in others

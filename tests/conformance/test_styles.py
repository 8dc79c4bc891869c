"""The suite accepts right rings of ten styles, and finds a fault that is put into one of them.

A style lists checks that its ring may fail. The ring does fail them, so no style lists more than necessary.

A style is read from its entry in styles.md. If the entry's edit does not apply, the error names the style.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringlab import edits
from ringlab.conformance import checks
from ringlab.conformance.checks.check import Plan
from ringlab.conformance.report.findings import ALLOWED
from ringlab.conformance.styles import STYLES, read
from ringlab.conformance.suite import check
from ringlab.errors import EditError

MESSAGES_AND_MEMORY = {"rounds", "bytes", "gather", "peak memory", "work"}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "half"), [(name, n % 2) for n, name in enumerate(STYLES)], ids=[*STYLES])
def test_a_style_passes(name: str, half: int) -> None:
    """A style passes half of the checks, and fails exactly the checks that it is allowed to fail."""
    quick = [each.name for each in checks.CHECKS if each.tier == "quick"]
    names = {*quick[half::2], *STYLES[name].allow}
    report = check(f"ringlab.conformance.styles:{name}", quick=True, only=[*names], isolate=False)
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}
    allowed = [each.name for each in report.findings if each.evidence.startswith(ALLOWED)]
    assert sorted(allowed) == sorted(STYLES[name].allow)
    left_out = {each.name for each in report.findings if not each.applies} & MESSAGES_AND_MEMORY
    assert left_out == (MESSAGES_AND_MEMORY & names if STYLES[name].target().schedule == "any" else set())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "right", "wrong", "found_by"),
    [
        ("travelling_queries", "out, lse = hop(call, step, out, lse)", "hop(call, step, out, lse)", "forward"),
        ("both_directions", "stride=-far", "stride=far", "dk"),
        ("float64_accumulators", "wire = torch.promote_types(k.dtype, torch.float32)", "wire = torch.bfloat16", "dk"),
        ("bfloat16_on_the_wire", "return high, (x - high).bfloat16()", "return high, torch.zeros_like(high)", "error growth"),
        ("recomputes_the_forward", "forward(ctx.call, q, k, v)", "forward(ctx.call, q, k, k)", "dq"),
        ("odd_ranks_receive_first", "if self.rank % 2 == 0 else", "if self.rank < 0 else", "forward"),
        ("two_hops_ahead", "call.length(step + 2)", "call.length(step + 1)", "ragged"),
        ("two_hops_ahead", "        yield k, v\n", "        kept = [*(kept if step else []), k]\n        yield k, v\n", "peak memory"),
    ],
)  # fmt: skip
def test_a_fault_in_a_style_is_found(name: str, right: str, wrong: str, found_by: str) -> None:
    source = STYLES[name].source()
    assert source.count(right) >= 1
    module = edits.as_module(source.replace(right, wrong), f"ringlab_wrong_style_{name}")
    faulty = replace(STYLES[name].target(), function=module.attend, ranks=(1, 2, 3, 4, 8))
    assert check(faulty, quick=True, only=(found_by,), isolate=False).failed == [found_by]


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_a_target_is_given_the_heads_that_it_claims(split: bool, grouped: bool) -> None:
    style = STYLES["ulysses" if split else "all_gather"].target()
    plan = Plan(replace(style, grouped=grouped).claims(), quick=False, seed=0)
    asked = {each.name: each.runs(plan) for each in checks.CHECKS if each.needs(plan) is None}
    uneven = asked.pop("uneven heads", [])
    runs = [run for each in asked.values() for run in each]
    assert {run.P for run in runs} == {1, 2, 3, 4, 8, 16}
    assert grouped == any(run.K < run.H for run in runs) and not any(run.H % run.K for run in runs)
    assert not split or [run for run in runs if run.H % run.P or run.K % run.P] == []
    assert split == any(run.H % run.P for run in uneven)
    assert grouped or not any(run.K < run.H for run in uneven)


def test_ranks_that_share_out_heads_are_asked_about_other_heads_in_one_check() -> None:
    plan = Plan(STYLES["ulysses"].target().claims(), quick=True, seed=0)
    (check_of_heads,) = [each for each in checks.CHECKS if each.name == "uneven heads"]
    runs = check_of_heads.runs(plan)
    heads = {(run.P, run.H, run.K) for run in runs}
    assert {(4, 5, 5), (4, 20, 5), (4, 8, 2), (4, 8, 1)} < heads


def test_an_entry_is_read_with_all_that_it_claims() -> None:
    (style,) = read(
        "## mine\ndtypes bfloat16 float32 · ranks 2 4 · allow bytes, error growth\n\nit does\n\nit lacks"
    )
    assert (style.does, style.lacks, style.allow) == ("it does", "it lacks", ("bytes", "error growth"))
    target = style.target()
    assert (target.dtypes, target.ranks) == (("bfloat16", "float32"), (2, 4))
    assert dict(target.allow) == {"bytes": "it lacks", "error growth": "it lacks"}
    with pytest.raises(EditError, match=r"style 'mine', hunk 1(.|\n)*got: 0 times"):
        replace(style, hunks="-nothing like this").source()

"""Whole training steps: right ones of three styles pass every check, wrong ones fall to the check that they name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.conformance.mutants import MUTANTS, STEPS
from ringlab.conformance.runner import Report
from ringlab.conformance.step_cases import IGNORE, Case, Result, batch
from ringlab.conformance.stepping import CHECKS, check_step
from ringlab.errors import BackendError
from ringlab.plain_step import Model, step
from tests.laws.draw import SEEDS

EVERY = {check.name for check in CHECKS}


def failures(report: Report) -> dict[str, str]:
    return {each.name: each.evidence for each in report.findings if not each.ok}


def does_not_apply(report: Report) -> set[str]:
    return {each.name for each in report.findings if not each.applies}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_plain_step_passes(seed: int) -> None:
    report = check_step(step, seed=seed)
    assert failures(report) == {} and does_not_apply(report) == set()


@pytest.mark.parametrize("name", STEPS)
def test_a_wrong_step_is_found(name: str) -> None:
    wrong = STEPS[name]
    report = check_step(wrong.module().step, only=[wrong.found_by], ranks=(2, 3))
    assert report.failed == [wrong.found_by]


def test_every_check_finds_a_step_that_is_named_for_it() -> None:
    assert {wrong.found_by for wrong in STEPS.values()} == EVERY
    assert MUTANTS.keys().isdisjoint(STEPS)
    assert len({wrong.source() for wrong in STEPS.values()}) == len(STEPS)
    kinds = Counter(wrong.kind for wrong in STEPS.values())
    assert set(kinds) == {"labels", "gradients", "meshes", "positions", "packed", "behaviour"}


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("counted_without_the_context", "loss", "the loss on rank 0 is 7.49283, and 3.74774 on one rank: 2 times as much (P=2)"),
        ("reported_by_rank", "loss", "the sum over ranks would be right (P=2)"),
        ("gradients_averaged", "gradients", "on one rank: 1/2 of it (P=2)"),
        ("gradient_of_the_embedding_left_out", "gradients", "the gradient of embedding.weight["),
        ("labels_never_shifted", "look-ahead", "label 1 alone counts, and token 1 moves the loss (P=1, labels (1,))"),
        ("packing_ignored_everywhere", "other documents", "token 0, of document 0, moves the loss of label 47, of document 1 (P=1"),
        ("repeats_with_dropout", "repeatable", "in the call before"),
        ("mean_over_all_tokens", "mean of labels", "as the mean of each label's"),
    ],
)  # fmt: skip
def test_the_evidence_says_where(name: str, check: str, says: str) -> None:
    report = check_step(STEPS[name].module().step, only=[check], ranks=(2,))
    assert says in failures(report)[check]


def test_a_model_of_transformers_passes() -> None:
    report = check_step("tests.conformance.right_steps:of_transformers", ranks=(2, 3))
    assert failures(report) == {}
    options = {"micro-batches", "recomputation", "replicas", "empty documents"}
    assert does_not_apply(report) == options


@pytest.mark.slow
def test_a_step_over_torch_distributed_passes_on_processes() -> None:
    report = check_step("tests.conformance.right_steps:gathered", ranks=(2, 4), ragged=False)
    assert failures(report) == {} and report.transport == "gloo"
    assert EVERY - does_not_apply(report) == {
        "repeatable", "loss", "gradients", "every label", "uneven labels", "mean of labels", "look-ahead",
    }  # fmt: skip


@pytest.mark.slow
def test_the_rank_that_failed_is_quoted_and_the_other_runs_are_made() -> None:
    report = check_step("tests.conformance.right_steps:fails_on_three", only=["loss", "ragged"], ranks=(2, 3))
    found = failures(report)
    assert found["loss"] == "raised: ValueError: three is one too many (P=3)"
    assert found["ragged"].startswith("raised: ValueError") and report.runs == 9


@settings(max_examples=30)
@given(seed=SEEDS, lengths=st.lists(st.integers(0, 9), min_size=2, max_size=5))
def test_documents_alone_have_the_tokens_and_labels_that_they_have_packed(
    seed: int, lengths: list[int]
) -> None:
    packed = Case(2, sum(lengths), 1, documents=tuple(lengths))
    whole = batch(packed, seed)
    alone = [
        batch(Case(1, packed.S, 1, documents=packed.documents, document=d), seed) for d in range(len(lengths))
    ]
    for place, wanted in enumerate(whole):
        assert torch.equal(torch.cat([each[place] for each in alone], dim=1), wanted)
    counts = int((whole[1] != IGNORE).sum())
    assert counts == sum(length - 1 for length in lengths if length)


def wrong_answer(value: Any) -> Callable[..., Any]:
    return lambda ring, tokens: value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("text", "needed: a loss, or (loss, gradients)"),
        (torch.zeros(2), "needed: a loss, or (loss, gradients)"),
        ((1.0, 2), "needed: gradients as a mapping, a sequence or a model"),
        ((1.0, [torch.zeros(1, dtype=torch.bfloat16)]), "needed: gradients in float32 or float64"),
    ],
    ids=["text", "two numbers", "no gradients", "bfloat16"],
)
def test_what_is_no_result_is_named(value: Any, says: str) -> None:
    report = check_step(wrong_answer(value), only=["loss"], ranks=(2,))
    assert says in " ".join(failures(report)["loss"].split())


def test_a_missing_gradient_and_one_of_another_shape_are_named() -> None:
    def some(ring: Any, tokens: Tensor) -> Any:
        return 1.0, {"a": torch.ones(1), **({"b": torch.ones(1)} if ring.world_size == 1 else {})}

    def shaped(ring: Any, tokens: Tensor) -> Any:
        return 1.0, {"a": torch.ones(ring.world_size)}

    only = {"only": ["gradients"], "ranks": (2,)}
    assert (
        "b has a gradient on rank 0 or on one rank, and not on both"
        in failures(check_step(some, **only))["gradients"]
    )
    assert "the gradient of a on rank 0 is (2,) for (1,)" in failures(check_step(shaped, **only))["gradients"]


def test_nan_is_never_within_the_bound() -> None:
    def attempt(ring: Any, tokens: Tensor) -> Any:
        bad = float("nan") if ring.world_size > 1 else 1.0
        return bad, [torch.tensor([bad])]

    assert set(failures(check_step(attempt, only=["loss", "gradients"], ranks=(2,)))) == {"loss", "gradients"}


def test_a_loss_within_half_the_digits_is_equal() -> None:
    true = Result(4.0, epsilon=2.0**-52)
    assert true.room == pytest.approx(4.0 * 2.0**-26)


def test_required_documents_are_given_for_whole_sequences() -> None:
    def attempt(ring: Any, tokens: Tensor, labels: Tensor, position_ids: Tensor) -> Any:
        assert position_ids.shape == tokens.shape
        return step(ring, tokens, labels)

    assert failures(check_step(attempt, only=["loss"], ranks=(2,))) == {}


def test_weights_are_the_same_at_each_call_and_the_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert all(map(torch.equal, Model(recompute=False).parameters(), Model(recompute=True).parameters()))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_invalid_requests_are_refused() -> None:
    with pytest.raises(BackendError, match="checks among repeatable"):
        check_step(step, only=["lse"])
    with pytest.raises(BackendError, match="at least 2"):
        check_step(step, ranks=(1, 2))
    with pytest.raises(BackendError, match="a parameter tokens or input_ids"):
        check_step(len)


def test_the_command_checks_a_step() -> None:
    done = CliRunner().invoke(
        app,
        ["check", "ringlab.plain_step:step", "--kind", "step", "--ranks", "2", "--only", "loss", "--json"],
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["ok"]
    wrong = [
        "check",
        "ringlab.conformance.mutants:gradients_averaged",
        "--kind",
        "step",
        "--ranks",
        "2",
        "--json",
    ]
    done = CliRunner().invoke(app, [*wrong, "--only", "gradients"])
    assert done.exit_code == 1
    for refused in (["--quick"], ["--layouts", "zigzag"], ["--lse-base", "2"]):
        assert CliRunner().invoke(app, [*wrong, *refused]).exit_code == 2
    assert CliRunner().invoke(app, [*wrong, "--only", "lse"]).exit_code == 2

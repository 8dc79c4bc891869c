"""Checks of training steps: correct steps of three styles pass, and named checks find wrong steps."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from ringlab import edits
from ringlab.cli import app
from ringlab.conformance.checks.measuring import Measured
from ringlab.conformance.kinds.step import CHECKS, check_step
from ringlab.conformance.kinds.step_cases import IGNORE, Case, Result, batch
from ringlab.conformance.mutants import MUTANTS, STEPS
from ringlab.conformance.report import diagnosis
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.run import Run
from ringlab.errors import BackendError
from ringlab.plain_step import Model, step
from tests.conformance.reports import failed
from tests.conformance.right_steps import trained
from tests.laws.draw import SEEDS

pytestmark = pytest.mark.thorough

EVERY = {check.name for check in CHECKS}


FOLDER = Path(__file__).parent
EDITS = {each.name: each for each in edits.read(FOLDER / "wrong_steps.md", required=("found_by",))}


def edited(name: str) -> Callable[..., Any]:
    """Return the wrong step that an entry of wrong_steps.md makes of the one with an optimizer."""
    source = edits.apply(EDITS[name].hunks, (FOLDER / "right_steps.py").read_text("utf-8"), name)
    wrong: Callable[..., Any] = edits.as_module(source, f"ringlab_wrong_step_{name}").trained
    return wrong


def does_not_apply(report: Report) -> set[str]:
    return {each.name for each in report.findings if not each.applies}


OF_TRAINED = {"metrics", "attention mask", "second step", "resumption", "other ranks", "packed rows"}
"""The checks that ask for parameters, or for results, that the plain step does not have."""


def test_the_plain_step_passes() -> None:
    report = check_step(step)
    assert failed(report) == {} and does_not_apply(report) == OF_TRAINED


def test_a_step_with_an_optimizer_passes() -> None:
    report = check_step(trained, seed=random.randrange(100))
    assert failed(report) == {} and does_not_apply(report).isdisjoint(OF_TRAINED)


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_step_with_an_optimizer_is_found(name: str) -> None:
    check = EDITS[name].fields["found_by"]
    assert check_step(edited(name), only=[check], ranks=(2, 3)).failed == [check]


@pytest.mark.parametrize("name", STEPS)
def test_a_wrong_step_is_found(name: str) -> None:
    wrong = STEPS[name]
    report = check_step(wrong.module().step, only=[wrong.found_by], ranks=(2, 3))
    assert report.failed == [wrong.found_by]


def test_every_check_finds_a_step_that_is_named_for_it() -> None:
    found_by = {each.fields["found_by"] for each in EDITS.values()}
    assert {wrong.found_by for wrong in STEPS.values()} | found_by == EVERY
    assert MUTANTS.keys().isdisjoint(STEPS)
    assert len({wrong.source() for wrong in STEPS.values()}) == len(STEPS)
    kinds = Counter(wrong.kind for wrong in STEPS.values())
    assert set(kinds) == {"labels", "gradients", "meshes", "positions", "packed", "behaviour"}


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("counted_without_the_context", "loss", "on one rank: 2 times as much; "),
        ("reported_by_rank", "loss", "the sum over ranks would be right; "),
        ("gradients_averaged", "gradients", "on one rank: 1/2 of it; "),
        ("gradient_of_the_embedding_left_out", "gradients", "the gradient of embedding.weight["),
        ("labels_never_shifted", "look-ahead", "label 1 alone counts, and token 1 moves the loss (P=1, labels (1,))"),
        ("packing_ignored_everywhere", "other documents", "token 0, of document 0, moves the loss of label 47, of document 1 (P=1"),
        ("mean_over_all_tokens", "mean of labels", "; the law is for a loss that is the mean over all labels"),
        ("repeats_with_dropout", "repeatable", "in the call before"),
        ("mean_over_all_tokens", "mean of labels", "as the mean over all labels, each label alone"),
        ("packing_ignored_everywhere", "documents", "as the mean over the documents, each alone; "),
    ],
)  # fmt: skip
def test_the_evidence_says_where(name: str, check: str, says: str) -> None:
    report = check_step(STEPS[name].module().step, only=[check], ranks=(2,))
    assert says in failed(report)[check]


def test_a_mean_over_sequences_is_named_as_such() -> None:
    """The report names a mean over sequences, as in GRPO and DPO, which the law of token means forbids."""

    def by_sequence(ring: Any, tokens: Tensor, labels: Tensor) -> float:
        rows = [row for row in range(len(tokens)) if (labels[row, 1:] != IGNORE).any()]
        each = [float(step(ring, tokens[[row]], labels[[row]], evaluate=True)[0]) for row in rows]
        return sum(each) / len(each)

    told = failed(check_step(by_sequence, only=["mean of labels"], ranks=(2,)))["mean of labels"]
    assert (
        "the law is for a loss that is the mean over all labels, and this one is the mean over sequences"
        in told
    )
    packed = failed(
        check_step(STEPS["mean_over_all_tokens"].module().step, only=["mean of labels"], ranks=(2,))
    )
    assert "over sequences" not in packed["mean of labels"]


def mean_of_sequences(of: str) -> Callable[..., Any]:
    """Return a step whose loss is a mean over sequences, or over documents if they are packed.

    of: whether a sequence's own loss is a sum over its labels ("sums") or, otherwise, a mean.
    """

    def loss(ring: Any, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> float:
        rows = [(tokens[[row]], labels[[row]]) for row in range(len(tokens))]
        if cu_seqlens is not None:
            bounds = [slice(*pair) for pair in pairwise(cu_seqlens.tolist())]
            rows = [(tokens[:, own], labels[:, own]) for own in bounds]
        counts = [int((labels[0, 1:] != IGNORE).sum()) for _, labels in rows]
        own = [
            float(step(ring, *row, evaluate=True)[0]) * (count if of == "sums" else 1)
            for row, count in zip(rows, counts, strict=True)
            if count
        ]
        return sum(own) / len(own)

    return loss


@pytest.mark.parametrize("of", ["sequences", "sums"])
def test_a_loss_of_sequences_is_checked_by_its_own_law(of: str) -> None:
    only: dict[str, Any] = {"only": ["mean of labels", "odd documents", "padded batch"], "ranks": (2,)}
    assert failed(check_step(mean_of_sequences(of), loss=of, **only)) == {}
    told = failed(check_step(mean_of_sequences(of), **only))
    assert f"(--loss {of})" in told["mean of labels"] and {"odd documents", "padded batch"} <= told.keys()
    other = failed(check_step(step, loss=of, **only))
    assert "and this one is the mean over all labels (--loss tokens)" in other["mean of labels"]


@pytest.mark.parametrize(
    ("sums", "divided_by", "said"),
    [
        (False, "sequences", "the sum over sequences of their own means, divided by a constant"),
        (True, "sequences with labels", "the mean over sequences of their own sums"),
        (True, "sequences", "the sum over labels, divided by a constant"),
    ],
)
def test_another_mean_or_sum_is_named_by_its_weights(sums: bool, divided_by: str, said: str) -> None:
    def loss(ring: Any, tokens: Tensor, labels: Tensor) -> float:
        counts = [int((row[1:] != IGNORE).sum()) for row in labels]
        rows = [row for row, count in enumerate(counts) if count]
        each = [float(step(ring, tokens[[row]], labels[[row]], evaluate=True)[0]) for row in rows]
        total = sum(one * (counts[row] if sums else 1) for one, row in zip(each, rows, strict=True))
        return total / (len(counts) if divided_by == "sequences" else len(rows))

    told = failed(check_step(loss, only=["mean of labels"], ranks=(2,)))["mean of labels"]
    assert f"and this one is {said}" in told


def test_numbers_of_a_failure_never_look_alike() -> None:
    def nearly(loss: float, gradient: float) -> Callable[..., Any]:
        def train(ring: Any, tokens: Tensor) -> Any:
            more = 1.0 if ring.world_size > 1 else 0.0
            found = torch.tensor([1.0 + gradient * more], dtype=torch.float64)
            return 3.7477381 + loss * more, {"a": found}

        return train

    for wrong, check in ((nearly(1e-9, 0.0), "loss"), (nearly(0.0, 1e-7), "gradients")):
        told = failed(check_step(wrong, only=[check], ranks=(2,)))[check]
        one, other = re.findall(r"is (\S+), and (\S+) on one rank", told)[0]
        assert one != other and " apart, " in told and " is allowed" in told
    close = Measured("out", 1.04e-7, 1.03e-7, "batch 0", Run(1, 2, "", True))
    assert str(close).startswith("out error 1.04e-07 beyond 1.03e-07")


def test_a_call_that_fails_is_said_to_be_one_and_not_to_break_a_law() -> None:
    """A failed call is reported as such and not as a broken law, here with messages of unequal dtypes."""

    def mismatched(ring: Any, tokens: Tensor, labels: Tensor) -> float:
        if ring.world_size > 1:
            ring.shift(tokens if ring.rank == 0 else tokens.float())
        return float(step(ring, tokens, labels, evaluate=True)[0])

    report = check_step(mismatched, only=["look-ahead"], ranks=(2,))
    first = diagnosis.first(report.findings)
    assert first.startswith("The target raises, in a call of the check 'look-ahead': MismatchError")
    assert "ragged" not in first and "must post the same tensors" in first


def test_a_model_of_transformers_passes() -> None:
    report = check_step("tests.conformance.right_steps:of_transformers", ranks=(2, 3))
    assert failed(report) == {}
    options = {"micro-batches", "recomputation", "recomputed documents", "recomputed parts"}
    options |= {"replicas", "replicas and parts", "empty documents", "large ids"} | OF_TRAINED - {
        "packed rows"
    }
    assert does_not_apply(report) == options
    packed = next(each for each in report.findings if each.name == "packed rows")
    assert packed.evidence.startswith("refused: raised: MaskError: needed: rows that are packed alike")


@pytest.mark.slow
def test_a_step_over_torch_distributed_passes_on_processes() -> None:
    report = check_step("tests.conformance.right_steps:gathered", ranks=(2, 4), ragged=False)
    assert failed(report) == {} and report.transport == "gloo"
    assert EVERY - does_not_apply(report) == {
        "repeatable", "loss", "gradients", "equal ranks", "side effects", "every label", "uneven labels",
        "mean of labels", "look-ahead", "every token", "long sequences", "padded batch", "large ids", "large batches", "every id",
        "strided", "pairs",
    }  # fmt: skip


@pytest.mark.slow
def test_processes_share_the_folder_for_checkpoints() -> None:
    report = check_step("tests.conformance.right_steps:counted", only=["resumption"], ranks=(3,))
    assert failed(report) == {} and does_not_apply(report) == set()


@pytest.mark.slow
def test_the_rank_that_failed_is_quoted_and_the_other_runs_are_made() -> None:
    report = check_step("tests.conformance.right_steps:fails_on_three", only=["loss", "ragged"], ranks=(2, 3))
    found = failed(report)
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
        batch(Case(1, packed.S, 1, documents=packed.documents, alone=d), seed) for d in range(len(lengths))
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
        ((1.0, [torch.zeros(1)], 3), "needed: metrics as a mapping of names to numbers"),
    ],
    ids=["text", "two numbers", "no gradients", "bfloat16", "no metrics"],
)
def test_what_is_no_result_is_named(value: Any, says: str) -> None:
    report = check_step(wrong_answer(value), only=["loss"], ranks=(2,))
    assert says in " ".join(failed(report)["loss"].split())


def test_a_missing_gradient_and_one_of_another_shape_are_named() -> None:
    def some(ring: Any, tokens: Tensor) -> Any:
        return 1.0, {"a": torch.ones(1), **({"b": torch.ones(1)} if ring.world_size == 1 else {})}

    def shaped(ring: Any, tokens: Tensor) -> Any:
        return 1.0, {"a": torch.ones(ring.world_size)}

    def unused(ring: Any, tokens: Tensor) -> Any:
        return 1.0, {"a": torch.ones(1), "b": None if ring.world_size == 1 else torch.zeros(1)}

    only: dict[str, Any] = {"only": ["gradients"], "ranks": (2,)}
    assert (
        "the gradient of b[0] on rank 0 is 0, and 1 on one rank"
        in failed(check_step(some, **only))["gradients"]
    )
    assert "the gradient of a on rank 0 is (2,) for (1,)" in failed(check_step(shaped, **only))["gradients"]
    assert failed(check_step(unused, **only)) == {}


def test_a_step_without_gradients_is_never_said_to_have_right_ones() -> None:
    def cleared(ring: Any, tokens: Tensor, labels: Tensor) -> Any:
        loss, model = step(ring, tokens, labels)
        model.zero_grad()
        return loss, model

    def weights(ring: Any, tokens: Tensor, labels: Tensor) -> Any:
        loss, model = step(ring, tokens, labels)
        return loss, dict(model.named_parameters())

    def alone(ring: Any, tokens: Tensor, labels: Tensor) -> Any:
        return step(ring, tokens, labels)[0]

    only: dict[str, Any] = {"only": ["gradients"], "ranks": (2,)}
    assert "leave out zero_grad() before the return" in failed(check_step(cleared, **only))["gradients"]
    assert "embedding.weight as a weight" in failed(check_step(weights, **only))["gradients"]
    assert does_not_apply(check_step(alone, **only)) == {"gradients"}


def test_a_step_that_takes_packed_batches_only_passes() -> None:
    def packed(ring: Any, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Any:
        assert tokens.shape == labels.shape == (1, int(cu_seqlens[-1]))
        return step(ring, tokens, labels, cu_seqlens=cu_seqlens)

    report = check_step(packed, ranks=(2,))
    assert failed(report) == {}


def test_a_step_that_demands_even_shards_passes_without_ragged() -> None:
    def even(ring: Any, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Any:
        ends = [tokens.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert all(end % (2 * ring.world_size) == 0 for end in ends)
        return step(ring, tokens, labels, cu_seqlens=cu_seqlens)

    some = ["loss", "gradients", "ragged", "packed", "odd documents"]
    report = check_step(even, only=some, ranks=(2, 5), ragged=False)
    assert failed(report) == {} and does_not_apply(report) == {"ragged", "odd documents"}


@pytest.mark.parametrize("ranks", [(32,), (7,)])
def test_many_ranks_have_tokens_each(ranks: tuple[int, ...]) -> None:
    for check in CHECKS:
        assert all(
            case.S >= 2 * case.P or check.name in ("ragged", "odd documents") for case in check.cases(ranks)
        )


def test_what_a_step_prints_and_sets_does_not_reach_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(ring: Any, tokens: Tensor) -> float:
        print("step 0")
        torch.set_default_dtype(torch.float64)
        return 1.0

    assert failed(check_step(loud, only=["loss"], ranks=(2,))) == {}
    out, err = capfd.readouterr()
    assert out == "" and "step 0" in err
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "hangs_on_two",
            "over the limit: the limit of 3 s for one call (--limit) was reached; rank 0 is in hangs_on_two (right_steps.py, line ",
        ),
        ("dies_on_two", "crashed: rank 1: its process ended with status 3"),
    ],
)
def test_a_hang_and_a_death_are_named_and_end_the_calls_on_as_many_ranks(name: str, says: str) -> None:
    report = check_step(
        f"tests.conformance.right_steps:{name}", only=["loss", "ragged"], ranks=(2,), limit=3.0
    )
    found = failed(report)
    assert says in found["loss"] and set(found) == {"loss", "ragged"}
    assert report.seconds < 60.0


def test_nan_is_never_within_the_bound() -> None:
    def attempt(ring: Any, tokens: Tensor) -> Any:
        bad = float("nan") if ring.world_size > 1 else 1.0
        return bad, [torch.tensor([bad])]

    assert set(failed(check_step(attempt, only=["loss", "gradients"], ranks=(2,)))) == {"loss", "gradients"}


def test_the_room_of_a_loss_is_64_roundings() -> None:
    true = Result(4.0, epsilon=2.0**-52)
    assert true.room == pytest.approx(4.0 * 64 * 2.0**-52)


def test_required_documents_are_given_for_whole_sequences() -> None:
    def attempt(ring: Any, tokens: Tensor, labels: Tensor, position_ids: Tensor) -> Any:
        assert position_ids.shape == tokens.shape and len(tokens) == 1
        cu_seqlens = torch.tensor([*(position_ids[0] == 0).nonzero()[:, 0], tokens.shape[1]])
        return step(ring, tokens, labels, cu_seqlens=cu_seqlens)

    assert failed(check_step(attempt, only=["loss"], ranks=(2,))) == {}


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
    with pytest.raises(BackendError, match="one of the losses tokens, sequences, sums"):
        check_step(step, loss="mean")
    with pytest.raises(BackendError, match="a function with parameters among"):
        check_step(len)
    with pytest.raises(BackendError, match="one that requires config"):
        check_step(lambda ring, tokens, config: 0.0)


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
    for refused in (["--fail-fast"], ["--layouts", "zigzag"], ["--lse-base", "2"]):
        assert CliRunner().invoke(app, [*wrong, *refused]).exit_code == 2
    quick = CliRunner().invoke(app, [*wrong, "--only", "gradients", "--quick"])
    assert quick.exit_code == 1 and json.loads(quick.stdout)["quick"]
    assert CliRunner().invoke(app, [*wrong, "--only", "mean of labels", "--loss", "sums"]).exit_code == 1
    assert CliRunner().invoke(app, [*wrong, "--only", "lse"]).exit_code == 2


class _States(torch.autograd.Function):
    """The states of all ranks; backward gives each rank the sum of all ranks' gradients of its state."""

    @staticmethod
    def forward(ctx: Any, ring: Any, state: Tensor) -> Tensor:
        ctx.ring = ring
        return torch.stack(ring.all_gather(state))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.ring.all_reduce(gradient)[ctx.ring.rank]


def test_linear_attention_whose_states_have_gradients_passes() -> None:
    """The reported fault is that gradients of states do not reach earlier ranks; once they do, it passes."""
    wrong = STEPS["state_without_its_gradient"]
    source = wrong.source()
    for fault, right in (
        ("ring.all_gather((k.mT @ v).detach())", "_States.apply(ring, k.mT @ v)"),
        ("torch.zeros_like(states[0])", "0 * states[0]"),
    ):
        assert source.count(fault) == 1
        source = source.replace(fault, right)
    space = {"__name__": wrong.module().__name__, "_States": _States}
    exec(compile(source, "<mended>", "exec"), space)
    only = ("loss", "gradients", "equal ranks", "every label", "look-ahead", "ragged", "recomputation")
    assert failed(check_step(space["step"], only=only, ranks=(2, 3))) == {}
    found = check_step(wrong.module().step, only=("loss", "gradients"), ranks=(3,))
    assert found.failed == ["gradients"]

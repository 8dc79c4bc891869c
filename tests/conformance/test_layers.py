"""`ringlab diff` names the layer that differs first: its module, rank and token; right steps show no difference."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from ringlab import contiguous, hf, ring_attention
from ringlab.cli import app
from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.layer_comparison import Difference, LayerReport
from ringlab.conformance.kinds.layers import first_differences
from ringlab.conformance.kinds.recording import _InReverse
from ringlab.conformance.mutants import STEPS
from ringlab.errors import RinglabError, WorldSizeError
from ringlab.hf import attention
from ringlab.layout import get_layout
from ringlab.mask import Mask
from ringlab.nn import Context, ModelConfig, Transformer, loss_share, next_tokens, sum_gradients, valid_tokens
from ringlab.nn.loss import summed
from ringlab.plain_step import step as plain_step
from tests.conformance.right_steps import gathered
from tests.hf.models import build, gpt_oss, llama, qwen2, qwen3

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
S, P = 48, 2
# Under zig-zag rank 0 has tokens 0 to 11 and 36 to 47, and rank 1 tokens 12 to 35.


def of_transformers(
    ring: Ring, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, *,
    config: Callable[..., Any] = llama, dtype: torch.dtype = torch.float32, fault: str = "",
) -> tuple[Tensor, nn.Module]:  # fmt: skip
    """Run a user's step, with a fault if the ring has several ranks."""
    model = build(config(vocab_size=32), "ringlab", dtype)
    wrong = fault if ring.world_size > 1 else ""
    if wrong in MODELS:
        MODELS[wrong](model, ring.rank)
    if wrong == "dropped last token":
        tokens, labels = tokens[:, :-1], labels[:, :-1]
    mask = None if cu_seqlens is None else Mask(documents=tuple(cu_seqlens.diff().tolist()))
    with hf.context(ring, get_layout("zigzag", tokens.shape[1], ring.world_size), mask) as context:
        batch = hf.shard_batch(context, tokens, labels=labels)
        if wrong == "label shift":
            batch["labels"] = batch["shift_labels"] = next_tokens(context.shard(labels))
        loss = model(**batch).loss
    loss.backward()
    sum_gradients(model, ring)
    return ring.all_reduce(loss.detach()), model


def counts_positions_by_rank(model: Any, rank: int) -> None:
    rotary = model.model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(x, torch.arange(x.shape[1])[None])


def has_another_epsilon(model: Any, rank: int) -> None:
    if rank == 1:
        model.model.layers[0].post_attention_layernorm.variance_epsilon = 1e-5


def has_a_stale_weight(model: Any, rank: int) -> None:
    if rank == 1:
        model.model.layers[1].self_attn.v_proj.weight.data[3, 5] += 1e-3


def computes_in_bfloat16(model: Any, rank: int) -> None:
    if rank == 1:
        layer = model.model.layers[1].mlp.down_proj
        layer.forward = lambda x: F.linear(x.bfloat16(), layer.weight.bfloat16()).float()


MODELS: dict[str, Callable[[Any, int], None]] = {
    "RoPE position": counts_positions_by_rank,
    "epsilon": has_another_epsilon,
    "stale weight": has_a_stale_weight,
    "dtype": computes_in_bfloat16,
}


def in_a_group_of_its_own(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, layout: Any, **options: Any) -> Any:
    """Attend in a group of one rank, where two ranks should form the group."""
    if ring.world_size == 1:
        return ring_attention(q, k, v, ring=ring, layout=layout, **options)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def wider_in_layer_1(module: nn.Module, asked: Any, more: dict[str, Any]) -> Mask:
    mask = _MASK(module, asked, more)
    ring = asked.held.context.ring
    return replace(mask, window=mask.window + 1) if module.layer_idx == 1 and ring.world_size > 1 else mask


_MASK = attention._mask
PLANTED = [
    ("RoPE position", "forward", "model.rotary_emb", 1, 12, "on rank 1 and on rank 0 from token 12 on, 24 of the 24 tokens of rank 1"),
    ("label shift", "backward", "lm_head", 0, 11, "its shift_labels is "),
    ("epsilon", "forward", "model.layers.0.post_attention_layernorm", 1, 12, "its variance_epsilon is 1e-05 there, and 1e-06 on one process"),
    ("dropped last token", "tokens", "model.embed_tokens", 0, 47, "Token 47 is on no rank"),
    ("wrong group", "forward", "model.layers.0.self_attn.o_proj", 1, 12, "LlamaAttention (model.layers.0.self_attn) computes between model.layers.0.self_attn.v_proj and"),
    ("stale weight", "forward", "model.layers.1.self_attn.v_proj", 1, 12, "its weight differs there"),
    ("window", "forward", "model.layers.1.self_attn.o_proj", 0, 5, "Qwen2Attention (model.layers.1.self_attn) computes between"),
    ("dtype", "forward", "model.layers.1.mlp.down_proj", 1, 12, "look at Linear itself"),
]  # fmt: skip


def the(stage: str, report: LayerReport) -> Difference:
    (found,) = [each for each in report.differences if each.stage == stage]
    return found


@pytest.mark.parametrize(("fault", "stage", "module", "rank", "token", "says"), PLANTED)
def test_a_planted_difference_is_named(
    fault: str, stage: str, module: str, rank: int, token: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "wrong group":
        monkeypatch.setattr(attention, "ring_attention", in_a_group_of_its_own)
    if fault == "window":
        monkeypatch.setattr(attention, "_mask", wider_in_layer_1)
    config = qwen2 if fault == "window" else llama
    report = first_differences(partial(of_transformers, config=config, fault=fault), ranks=P)
    found = the(stage, report)
    assert (found.module, found.rank, found.token) == (module, rank, token), str(report)
    assert says in found.text and found.ratio > 5, str(report)


def test_a_stale_weight_is_named_before_its_output() -> None:
    found = the("weights", first_differences(partial(of_transformers, fault="stale weight"), ranks=P))
    assert (found.module, found.rank) == ("model.layers.1.self_attn.v_proj", 1)
    assert (
        "model.layers.1.self_attn.v_proj.weight differs before the first call on rank 1" in found.text
        and "[3, 5]" in found.text
    )


def test_one_wrong_layer_makes_no_later_one_wrong() -> None:
    (found,) = [
        each
        for each in first_differences(partial(of_transformers, fault="dtype"), ranks=P).differences
        if each.stage == "forward"
    ]
    assert "too" not in found.text


def of_ringlab(
    ring: Ring, tokens: Tensor, labels: Tensor, *, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[Tensor, nn.Module]:
    model = Transformer(ModelConfig(vocabulary=32, width=16, hidden=24, **sizes)).to(dtype)
    context = Context(ring, get_layout("striped", tokens.shape[1], ring.world_size))
    mine, after = context.shard(tokens), context.shard(next_tokens(labels))
    loss = loss_share(model(mine, context), after, valid_tokens(after, ring))
    loss.backward()
    sum_gradients(model, ring)
    return summed(loss.detach(), ring), model


RIGHT = {
    "llama": partial(of_transformers, config=llama), "qwen3": partial(of_transformers, config=qwen3),
    "gpt-oss": partial(of_transformers, config=partial(gpt_oss, num_local_experts=4)), "ringlab.nn": of_ringlab,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_shows_no_difference(name: str, dtype: torch.dtype) -> None:
    report = first_differences(partial(RIGHT[name], dtype=dtype), ranks=P)
    assert report.ok and report.compared > 100, str(report)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_shows_no_difference_for_other_tokens(name: str, dtype: torch.dtype, seed: int) -> None:
    report = first_differences(partial(RIGHT[name], dtype=dtype), ranks=3, seed=seed)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_packed_documents_show_no_difference(name: str) -> None:
    report = first_differences(RIGHT[name], ranks=P, documents=(13, 1, 18))
    assert report.ok and "32 tokens in documents of 13, 1, 18" in str(report), str(report)


def test_packed_documents_may_have_more_tokens_than_the_smallest_vocabulary() -> None:
    documents = (70, 1, 41, 90)
    assert first_differences(plain_step, ranks=3, documents=documents).ok
    wrong = first_differences(
        STEPS["positions_of_the_first_document"].module().step, ranks=3, documents=documents
    )
    assert not wrong.ok and "of document 3" in str(wrong), str(wrong)


def test_the_terms_of_products_are_added_up_in_reverse() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 5, 300), (7, 300), (7,)))
    found = []
    for mode in (nullcontext(), _InReverse()):
        with mode:
            results = F.linear(x, weight, bias), x @ weight.mT, torch.matmul(x, weight.mT)
        found.append(
            [*results, *torch.autograd.grad(sum(y.square().sum() for y in results), (x, weight, bias))]
        )
    for right, other in zip(*found, strict=True):
        torch.testing.assert_close(other, right, rtol=1e-4, atol=1e-3)
    assert not all(map(torch.equal, *found))


def test_a_token_of_a_packed_document_has_its_place_there() -> None:
    report = first_differences(partial(of_transformers, fault="dtype"), ranks=P, documents=(13, 19))
    assert the("forward", report).token == 8 and "token 8 (position 8 of document 0)" in str(report)
    report = first_differences(partial(of_transformers, fault="RoPE position"), ranks=P, documents=(5, 27))
    assert the("forward", report).token == 5 and "token 5 (position 0 of document 1)" in str(report)


def test_a_step_in_float64_is_held_to_roundings_of_float64() -> None:
    report = first_differences(plain_step, ranks=3)
    assert report.ok and report.dtype == "float64"
    wrong = partial(Odd.run, fault="adds 1e-13", dtype=torch.float64)
    assert the("forward", first_differences(wrong, ranks=2)).module == "twice"


class Parts(nn.Module):
    """Returns a mapping, with tuples, None and a tensor that has no token axis."""

    def forward(self, x: Tensor, mean: Tensor) -> dict[str, Any]:
        return {"both": (x, None, 2 * x), "nothing": None, "mean": mean}


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class Odd(nn.Module):
    """A model whose modules are called twice, return things other than tensors, or have no token axis."""

    def __init__(self, dtype: torch.dtype, fault: str, rank: int, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.twice = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.parts, self.nothing, self.drop = Parts(), Nothing(), nn.Dropout(dropout)
        self.head = nn.Linear(8, 32)
        self.to(dtype)
        self.fault, self.on = fault, rank == 1

    def forward(self, tokens: Tensor, ring: Ring) -> Tensor:
        x = self.twice(self.embedding(tokens))
        if self.fault == "second call" and self.on:
            x = x + 1e-3
        if self.fault == "recomputed":
            x = checkpoint(self.twice, x, use_reentrant=False)
        else:
            x = self.twice(x + 1e-13 * (self.fault == "adds 1e-13" and self.on))
        if self.fault == "conditioned":
            x = x + self.twice(torch.ones(3, 8, dtype=x.dtype)).mean(0)  # on every rank
        mean = x.sum((0, 1)).detach()
        mean = mean if self.fault == "mean of a rank" and self.on else ring.all_reduce(mean)
        if self.fault == "beside an infinite entry":
            mean = torch.where(torch.arange(8) == 0, -torch.inf, mean + (torch.arange(8) == 1) * self.on)
        parts = self.parts(x, mean)
        self.nothing(x)
        x = parts["both"][0] + parts["both"][2] * (1 + 1e-3 * (self.fault == "after a mapping" and self.on))
        logits: Tensor = self.head(self.drop(x).flatten(0, 1))
        return logits

    @staticmethod
    def run(
        ring: Ring,
        tokens: Tensor,
        labels: Tensor,
        *,
        fault: str = "",
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
    ) -> tuple[Tensor, nn.Module]:
        model = Odd(dtype, fault, ring.rank if ring.world_size > 1 else 0, dropout)
        layout = contiguous(tokens.shape[1], ring.world_size)
        mine, after = (layout.shard(x, ring.rank, 1) for x in (tokens, next_tokens(labels)))
        times = ring.world_size if fault == "mean afterwards" else 1
        share = times * loss_share(
            model(mine, ring)[None], after.flatten()[None], int((next_tokens(labels) >= 0).sum())
        )
        share.backward()
        if fault == "no sum" and ring.world_size > 1:
            return share.detach(), {name: 2 * p.grad for name, p in model.named_parameters()}
        if fault == "summed later":
            return ring.all_reduce(share.detach()), model
        own = model.head.bias.grad
        own = None if own is None else own.clone()
        sum_gradients(model, ring)
        if fault == "a weight left out":
            model.head.bias.grad = own
        if fault == "averaged" and ring.world_size > 1:
            return ring.all_reduce(share.detach()), {name: p.grad / 2 for name, p in model.named_parameters()}
        for weight in model.parameters():
            weight.grad = None if weight.grad is None else weight.grad / times
        return ring.all_reduce(share.detach()) / times, model


@pytest.mark.parametrize("fault", ["", "recomputed", "mean afterwards", "conditioned", "summed later"])
def test_odd_modules_show_no_difference(fault: str) -> None:
    report = first_differences(partial(Odd.run, fault=fault), ranks=P)
    assert report.ok and not any("not compared" in note for note in report.notes), str(report)
    assert ("gradients are 2 times" in str(report)) == (fault == "mean afterwards")
    assert ("still to be summed over ranks" in str(report)) == (fault == "summed later")


@pytest.mark.parametrize(
    ("fault", "module", "token", "says"),
    [
        ("second call", "twice", 24, "The argument input of twice, in call 2,"),
        (
            "mean of a rank",
            "parts",
            None,
            "The argument mean of parts is the first that differs: on rank 1, ",
        ),
        ("beside an infinite entry", "parts", None, "The argument mean of parts is the first that differs"),
        ("after a mapping", "drop", 24, "Look at what Odd (Odd) computes between parts and drop"),
    ],
)
def test_odd_modules_are_named(fault: str, module: str, token: int | None, says: str) -> None:
    report = first_differences(partial(Odd.run, fault=fault), ranks=P)
    found = the("forward", report)
    assert (found.module, found.rank, found.token) == (module, 1, token) and says in found.text, str(report)


@pytest.mark.parametrize(
    ("fault", "what", "says"),
    [
        ("no sum", "embedding.weight", "the sum over ranks differs too"),
        ("averaged", "embedding.weight", "it is the same on all ranks, the true one divided by 2"),
        ("a weight left out", "head.bias", "it is each rank's share, and that of embedding.weight is whole"),
    ],
)
def test_weights_gradients_that_are_summed_wrongly_are_named(fault: str, what: str, says: str) -> None:
    found = the("weight gradients", first_differences(partial(Odd.run, fault=fault), ranks=P))
    assert (found.what, found.token) == (what, None)
    assert says in found.text and "how gradients are summed" in found.text


def test_experts_in_one_call_of_torch_are_compared() -> None:
    """torch's product of rows by expert has no kernel in float64, the dtype of the truth."""
    config = partial(gpt_oss, num_local_experts=4, num_experts_per_tok=2, experts_implementation="grouped_mm")
    assert first_differences(partial(of_transformers, config=config), ranks=P).ok


def unseeded(ring: Ring, tokens: Tensor) -> None:
    nn.Embedding(32, 4)(tokens)


def random_step(ring: Ring, tokens: Tensor) -> None:
    torch.manual_seed(0)
    x = nn.Embedding(32, 4)(tokens)
    nn.Identity()(x + torch.randn(x.shape, generator=_DRAW))


_DRAW = torch.Generator()


def without_modules(ring: Ring, tokens: Tensor) -> Tensor:
    return tokens.double().mean()


def without_tokens(ring: Ring, tokens: Tensor) -> None:
    torch.manual_seed(0)
    mine = contiguous(tokens.shape[1], ring.world_size).shard(tokens, ring.rank, 1)
    nn.Linear(8, 8)(torch.ones(32, 8)[mine])


def fails(ring: Ring, tokens: Tensor) -> None:
    torch.manual_seed(0)
    x = nn.Embedding(32, 4)(contiguous(tokens.shape[1], ring.world_size).shard(tokens, ring.rank, 1))
    nn.Linear(4, 4)(x[..., ring.rank :])
    ring.all_reduce(torch.ones(1))  # rank 0 waits here, because rank 1 has failed


def shares_rows(ring: Ring, tokens: Tensor) -> None:
    torch.manual_seed(0)
    nn.Embedding(32, 4)(tokens.chunk(ring.world_size)[ring.rank])


def never_runs(ring: Ring, tokens: Tensor) -> None:
    raise ValueError("no such file")


def unknown_parameter(ring: Ring, tokens: Tensor, config: str) -> None:
    return None


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        (partial(Odd.run, dropout=0.1), {}, ["drop, p=0.1", "model.eval()"]),
        (unseeded, {}, ["different values of weight in a second call", "torch.manual_seed(0)"]),
        (random_step, {}, ["argument input of Identity differs in a second call", "attention_dropout=0.0"]),
        (without_modules, {}, ["a step that calls no module", "--layout"]),
        (without_tokens, {}, ["none in the inputs of 1 modules", "--layout"]),
        (shares_rows, {}, ["in all 2 rows", "none on ranks 0, 1"]),
        (never_runs, {}, ["runs on one process", "ValueError: no such file"]),
        (unknown_parameter, {}, ["requires config"]),
        (plain_step, {"documents": (3000, 3000)}, ["at most 4096 tokens", "(3000, 3000)"]),
        (RIGHT["llama"], {"documents": (30, 30)}, ["runs on one process", "give the model 60 token ids"]),
        (plain_step, {"tokens": 20_000}, ["from 1 to 16384 tokens", "20000"]),
        (plain_step, {"transport": "pigeon"}, ["one of the transports"]),
        (plain_step, {"layout": "spiral"}, ["one of the layouts"]),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(step: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RinglabError) as caught:
        first_differences(step, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_comparison_needs_two_ranks() -> None:
    with pytest.raises(WorldSizeError):
        first_differences(plain_step, ranks=1)


def test_a_layout_takes_the_place_of_token_ids() -> None:
    assert first_differences(without_tokens, layout="contiguous").ok


def test_an_error_of_a_rank_is_reported_with_what_came_before() -> None:
    report = first_differences(fails)
    assert [each.stage for each in report.differences] == ["error"], str(report)
    assert "Rank 1 ended" in str(report) and "mat1 and mat2" in str(report)


def has_half_a_loss(ring: Ring, tokens: Tensor) -> Tensor | None:
    torch.manual_seed(0)
    x = nn.Embedding(32, 4)(contiguous(tokens.shape[1], ring.world_size).shard(tokens, ring.rank, 1))
    return None if ring.rank else x.mean()


def cuts_nothing(ring: Ring, tokens: Tensor) -> None:
    torch.manual_seed(0)
    nn.Embedding(32, 4)(tokens)


def test_tensors_that_a_rank_lacks_and_sequences_that_are_not_cut_are_noted() -> None:
    assert "the loss of the step (none on rank 1)" in first_differences(has_half_a_loss).notes[0]
    assert "each rank has all tokens" in first_differences(cuts_nothing).notes[0]
    assert not first_differences(plain_step).notes


def test_another_number_of_calls_is_told() -> None:
    report = first_differences(by_blocks)
    assert report.ok and "Linear (4 calls on one process, 2 on rank 0)" in str(report), str(report)


def by_blocks(ring: Ring, tokens: Tensor) -> None:
    torch.manual_seed(0)
    mine = contiguous(tokens.shape[1], ring.world_size).shard(tokens, ring.rank, 1)
    x, layer = nn.Embedding(32, 8)(mine), nn.Linear(8, 8)
    torch.cat([layer(part) for part in x.split(12, dim=1)], dim=1)


def test_processes_and_torch_distributed_give_the_same() -> None:
    """Steps over torch.distributed run in gloo processes."""
    assert first_differences("tests.conformance.right_steps:gathered", ranks=2).ok
    assert gathered is not None


def asked(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["diff", *arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


def wrong_step(ring: Ring, tokens: Tensor, labels: Tensor) -> tuple[Tensor, nn.Module]:
    return of_transformers(ring, tokens, labels, fault="epsilon")


def test_the_command() -> None:
    status, found = asked("tests.conformance.test_layers:wrong_step")
    (first, *_) = found["differences"]
    assert (status, found["ok"]) == (1, False)
    assert (first["module"], first["rank"], first["token"]) == (
        "model.layers.0.post_attention_layernorm",
        1,
        12,
    )
    status, found = asked("ringlab.plain_step:step", "--ranks", "2", "--documents", "20,12")
    assert (status, found["ok"], found["plan"]["documents"]) == (0, True, [20, 12])
    status, found = asked("ringlab.plain_step:step", "--documents", "20,x")
    assert status == 2 and found["error"]["got"] == "'20,x'"
    said = CliRunner().invoke(app, ["diff", "tests.conformance.test_layers:wrong_step"])
    assert "first that differs: on rank 1 from token 12 on" in " ".join(said.stdout.split())


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the factors by which errors exceed bounds are not compared; they depend on the machine."""
    page = (CHECKOUT / "docs/first-layer.md").read_text(encoding="utf-8")
    found = re.search(
        r"```py\n# (\w+)\.py\n(.*?)```.*?```sh\nringlab (.*?)\n```.*?```text\n(.*?)```", page, re.DOTALL
    )
    assert found is not None
    module, source, command, printed = found.groups()
    (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    said = CliRunner().invoke(app, command.split()).stdout
    said, shown = (re.sub(r"[\d.]+e\+\d+", "…", text).split() for text in (said, printed))
    assert said == shown


def test_processes_that_the_command_starts() -> None:
    status, found = asked("tests.conformance.test_layers:wrong_step", "--transport", "gloo")
    assert (status, found["transport"], found["differences"][0]["rank"]) == (1, "gloo", 1)


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("tests.conformance.test_layers:wrong_step", "model.layers.0.post_attention_layernorm"),
        ("tests.conformance.test_layers:fails", "Linear"),
        ("tests.conformance.right_steps:gathered", ""),
    ],
)
def test_under_torchrun(target: str, module: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, "-m", "ringlab", "diff", target, "--json", "--limit", "30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert (found["transport"], found["ok"], bool(done.returncode)) == (
        "torchrun",
        not module,
        bool(module),
    ), done.stderr
    assert [(each["module"], each["rank"]) for each in found["differences"][:1]] == (
        [(module, 1)] if module else []
    )

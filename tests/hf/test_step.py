"""One training step of a transformers model over a ring has the loss and gradients of one process.

The same step also runs on two gloo processes, and the script of docs/huggingface.md runs under torchrun.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster, contiguous, per_document, zigzag
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from tests.hf.models import (
    FAMILIES,
    IGNORE,
    Batch,
    batch_of,
    bounds,
    errors,
    exact_step_over,
    llama,
    over,
    qwen2,
    run,
    truth,
)
from tests.laws.draw import MAKERS, SEEDS

DOCUMENTS = (7, 5, 1, 8)
S = sum(DOCUMENTS)
ROUNDINGS = 5000 * torch.finfo(torch.float64).eps
"""The roundings of two layers in float64 with large gradients. One key more or less changes 10⁹ times as much."""


def beyond(config, layout: Layout, batch: Batch, **options) -> list[str]:
    """Return the values, on all ranks, whose errors are beyond the bounds."""
    true = truth(config, batch)
    allowed = bounds(true)
    found = [errors(step, true) for step in over(config, layout, batch, **options)]
    return [
        f"rank {rank}: {name} {error:.2e}, allowed {allowed[name]:.2e}"
        for rank, each in enumerate(found)
        for name, error in each.items()
        if not error <= allowed[name]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_one_process_up_to_roundings(family: str) -> None:
    """Float32 equals one process up to roundings, for grouped heads, windows, norms of heads, caps and sinks."""
    assert beyond(FAMILIES[family](), zigzag(S, 3), batch_of(S, rows=2)) == []


def test_packed_batches() -> None:
    assert beyond(qwen2(), per_document(DOCUMENTS, 3), batch_of(S, documents=DOCUMENTS)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other_in_one_process(family: str) -> None:
    """In the reference, a packed batch has the loss of its documents, each computed alone."""
    packed, config = batch_of(S, documents=DOCUMENTS), FAMILIES[family]()
    pieces = [x.split(DOCUMENTS, 1) for x in (packed.input_ids, packed.labels)]
    sums = [
        (truth(config, Batch(ids, labels)).loss * count, count)
        for ids, labels in zip(*pieces, strict=True)
        if (count := int((labels[:, 1:] != IGNORE).sum()))
    ]
    wanted = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert abs(truth(config, packed).loss - wanted) <= ROUNDINGS * (1 + wanted)


@settings(max_examples=12)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    seed=SEEDS,
    documents=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    packed=st.booleans(),
    make=st.sampled_from([*MAKERS, None]),
    P=st.integers(1, 4),
)
@example("gpt-oss", 0, [1, 2], True, contiguous, 1)
def test_float64_equals_one_process(
    family: str,
    seed: int,
    documents: list[int],
    packed: bool,
    make: Callable[[int, int], Layout] | None,
    P: int,
) -> None:
    """In float64 the step equals that of one process. If `make` is None, each document is dealt on its own."""
    layout = make(sum(documents), P) if make else per_document(documents, P)
    batch = batch_of(layout.S, 1, seed, tuple(documents) if packed else ())
    assume(min(layout.lengths) > 0 and bool((batch.labels[:, 1:] != IGNORE).any()))
    law_equals_one_process(FAMILIES[family](), layout, batch)


def law_equals_one_process(config, layout: Layout, batch: Batch, given: Batch | None = None) -> None:
    """Check that the ring's step on `batch` equals one process's step on `given` (None: on `batch`)."""
    true = truth(config, given or batch)
    for step in run(partial(exact_step_over, config=config, layout=layout, batch=batch), layout.P):
        for name, error in errors(step, true).items():
            assert error <= ROUNDINGS * (1 + float(true.values()[name].abs().max())), name


def test_models_that_are_not_causal() -> None:
    config = llama()
    config.is_causal = False
    law_equals_one_process(config, zigzag(S, 3), batch_of(S))


@pytest.mark.parametrize("schedule", ["allgather", "ulysses"])
def test_other_schedules(schedule: str) -> None:
    assert beyond(qwen2(), zigzag(S, 2), batch_of(S), schedule=schedule) == []


def test_recomputed_layers_keep_the_context_they_ran_under() -> None:
    """Recomputed layers keep their context, though backward computes them again outside of the context."""
    assert beyond(qwen2(), zigzag(S, 3), batch_of(S, documents=DOCUMENTS), recompute=True) == []


def padded() -> Batch:
    """Return a batch of two rows, the second of which ends in padding."""
    batch = batch_of(S, rows=2)
    batch.attention_mask = torch.ones_like(batch.input_ids)
    batch.attention_mask[1, -6:] = 0
    batch.labels[batch.attention_mask == 0] = IGNORE
    return batch


def test_padding_at_the_end() -> None:
    assert beyond(qwen2(), zigzag(S, 3), padded()) == []


def test_dropout_draws_alike_however_the_sequence_lies() -> None:
    config, batch = llama(attention_dropout=0.4), batch_of(S)
    [one, two, three] = (
        over(config, layout, batch, seed=11)[0]
        for layout in (contiguous(S, 1), contiguous(S, 2), zigzag(S, 3))
    )
    true, allowed = truth(llama(), batch), bounds(truth(llama(), batch))
    # Dropout multiplies kept weights by up to 1 / (1 − 0.4).
    scale = {name: 4 * bound for name, bound in allowed.items()}
    for other in (two, three):
        assert all(error <= scale[name] for name, error in errors(other, one).items())
    [another] = (over(config, contiguous(S, 2), batch, seed=12)[0],)
    assert errors(another, one)["loss"] > 1000 * allowed["loss"] < errors(one, true)["loss"]


CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    name: text
    for text, name in re.findall(
        r"```py\n(# (train|trainer|accelerated)\.py.*?)```",
        (CHECKOUT / "docs/huggingface.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
}
SCRIPT = SCRIPTS["train"]


@pytest.mark.thorough
def test_the_script_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script of the page prints falling losses, equal under torchrun on two processes and on one rank."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    two = losses(under_torchrun(script, 2))

    def alone(ring: Ring) -> None:
        monkeypatch.setattr("ringlab.connect", lambda _: nullcontext(ring))
        exec(compile(SCRIPT, "train.py", "exec"), {})

    VirtualCluster(1).run(alone)
    one = losses(capsys.readouterr().out)
    assert len(two) == len(one) == 5 and two[-1] < two[0]
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(two, one, strict=True))


TO_TRAINER_ALONE = {"(hf.OverRing, Trainer)": "(Trainer)", '"ringlab"': '"sdpa"'}
RINGS_OF_TWO = {
    "trainer.train()": "from torch.distributed import init_device_mesh\n"
    "from ringlab import Ring\n"
    "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'cp'))\n"
    "trainer.ring = Ring.of_group(mesh['cp'])\n"
    "trainer.train()",
    "train_batch_size=2": "train_batch_size=1",
}


def changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


PADDED = {
    "data = [": "kept = (torch.arange(48) < torch.randint(20, 49, (32, 1))).long()\n"
    "labels = labels.masked_fill(kept == 0, -100)\n"
    "data = [",
    '"labels": y} for x, y in zip(ids, labels, strict=True)]': '"labels": y, "attention_mask": m} for x, y, m in zip(ids, labels, kept, strict=True)]',
}
"""Changes after which the rows of a batch end in padding."""
ENCODER = {
    "import Qwen3Config, Qwen3ForCausalLM,": "import BertConfig, BertForMaskedLM,",
    "    pass\n": '    causal, options = False, {"models": ("bert",)}\n',
    "Qwen3ForCausalLM._from_config": "BertForMaskedLM._from_config",
    "    Qwen3Config(\n": "    BertConfig(\n        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,\n",
    " head_dim=16,": "",
    " num_key_value_heads=2,": "",
    # transformers adds the means of micro-batches of such a model.
    "gradient_accumulation_steps=2": "gradient_accumulation_steps=1",
    '"labels": y': '"labels": y, "token_type_ids": (x % 2)',
}
"""Changes that make the model an encoder, whose batches have an entry for each token beside ids and labels."""


def printed_by(
    tmp_path: Path, script: str, changes: dict[str, str], processes: int
) -> list[tuple[float, ...]]:
    """Return the loss and the gradient's norm of each step of a changed script of the page, under torchrun."""
    file = tmp_path / f"{script}-{processes}.py"
    file.write_text(changed(SCRIPTS[script], changes), encoding="utf-8")
    said = under_torchrun(file, processes)
    steps = re.findall(r"step \d+: loss ([\d.]+), norm ([\d.]+)", said)
    return [tuple(map(float, step)) for step in steps]


def same(found: list[tuple[float, ...]], true: list[tuple[float, ...]], steps: int) -> bool:
    return len(found) == len(true) == steps and all(
        abs(a - b) <= 1e-5 * b
        for mine, right in zip(found, true, strict=True)
        for a, b in zip(mine, right, strict=True)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "rings"),
    [({}, 1), (PADDED | ENCODER, 2)],
    ids=["as on the page", "padded encoder"],
)
def test_the_trainer_of_the_page(tmp_path: Path, changes: dict[str, str], rings: int) -> None:
    """Trainer has the same losses and norms on one process, over a ring of two and over two such rings."""
    one = printed_by(tmp_path, "trainer", changes | TO_TRAINER_ALONE, 1)
    for more, processes in (({}, 2), (RINGS_OF_TWO, 4))[:rings]:
        assert same(printed_by(tmp_path, "trainer", changes | more, processes), one, steps=5)


TO_ACCELERATE_ALONE = {
    "ring = Ring.of_group()": "ring = type('Alone', (), {'world_size': 1})",
    '"ringlab"': '"sdpa"',
    "with hf.context(ring, layout, packing.mask()) as context:": "if True:",
    'hf.shard_batch(context, packing.pack(batch["input_ids"]), labels=packing.pack(batch["labels"]))': "batch",
}


@pytest.mark.thorough
def test_the_loop_of_accelerate_on_the_page(tmp_path: Path) -> None:
    """A loop of accelerate has the same losses and norms on one process without a ring and over a ring of two."""
    one = printed_by(tmp_path, "accelerated", TO_ACCELERATE_ALONE, 1)
    assert same(printed_by(tmp_path, "accelerated", {}, 2), one, steps=8)


def under_torchrun(script: Path, processes: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script)],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]

"""Options that ringlab cannot honour raise an error that names them and a remedy, on every rank."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, PreTrainedConfig

from ringlab import VirtualCluster, hf, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    BackendError,
    DeviceError,
    LayoutError,
    MaskError,
    MissingExtraError,
    RinglabError,
    ShapeError,
    TrainingError,
    WorldSizeError,
)
from ringlab.hf import trainer
from ringlab.mask import Mask
from ringlab.nn import Context, loss_share, valid_tokens
from tests.hf.models import (
    IGNORE,
    VOCABULARY,
    batch_of,
    build,
    gpt_oss,
    llama,
    qwen2,
    run,
)

S, P = 12, 2
BATCH = batch_of(S)
WHOLE = {"input_ids": BATCH.input_ids, "use_cache": False}


def forward(
    ring: Ring, config: PreTrainedConfig, change: Callable[..., dict[str, Any]], **options: Any
) -> RinglabError | None:
    """Return the error of a forward whose arguments are changed by `change`, or None."""
    model = build(config, "ringlab")
    try:
        with hf.context(ring, zigzag(S, P), **options) as context:
            given = hf.shard_batch(context, BATCH.input_ids)
            model(**given | change(given, config))
    except RinglabError as error:
        return error
    return None


def hidden_keys(given: dict[str, Any], _: Any) -> dict[str, Any]:
    mask = given["attention_mask"].clone()
    mask[:, 2] = 0
    return {"attention_mask": mask}


def custom_mask(given: dict[str, Any], _: Any) -> dict[str, Any]:
    L = given["input_ids"].shape[1]
    return {"attention_mask": torch.ones(1, 1, L, L, dtype=torch.bool)}


def with_(**more: Any) -> Callable[..., dict[str, Any]]:
    return lambda *_: more


CASES: dict[str, tuple[PreTrainedConfig, Callable[..., dict[str, Any]], type[RinglabError], str]] = {
    "padding with holes": (llama(), hidden_keys, MaskError, "hides keys"),
    "custom 4-d mask": (llama(), custom_mask, MaskError, "a tensor of shape"),
    "a cache": (llama(), with_(use_cache=True), MaskError, "use_cache"),
    "sinks of other heads": (llama(), with_(s_aux=torch.zeros(5)), ShapeError, "sinks"),
    "head mask": (llama(), with_(head_mask=torch.ones(4)), MaskError, "head_mask"),
    "documents by cu_seq_lens": (llama(), with_(cu_seq_lens_q=torch.tensor([0, 6])), MaskError, "mask_of"),
    "dropout without a seed": (llama(attention_dropout=0.1), with_(), MaskError, "seed="),
    "a window that is not causal": (qwen2(), with_(is_causal=False), MaskError, "a part sliding_window_bi"),
    "another window in the layer": (llama(), with_(sliding_window=3), MaskError, "one sliding window"),
    "no position ids": (llama(), with_(position_ids=None), RinglabError, "position"),
    "rows of other positions": (
        llama(),
        with_(input_ids=BATCH.input_ids[:, :6].expand(2, -1), position_ids=torch.arange(12).view(2, 6), attention_mask=None),
        MaskError,
        "alike in all rows",
    ),
    "the whole sequence on each rank": (
        llama(),
        with_(**WHOLE, attention_mask=None, position_ids=torch.arange(S)[None]),
        MaskError,
        "shard_batch",
    ),
    "an auxiliary loss of experts": (
        gpt_oss(output_router_logits=True),
        with_(),
        BackendError,
        "mixture of experts",
    ),
    "an auxiliary loss that the call wants": (
        gpt_oss(),
        with_(output_router_logits=True),
        MaskError,
        "output_router_logits",
    ),
    "rope by length": (
        llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        with_(),
        BackendError,
        "by its own shard",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_on_every_rank(name: str) -> None:
    config, change, kind, match = CASES[name]
    errors = run(partial(forward, config=config, change=change), P)
    assert all(isinstance(error, kind) for error in errors), errors
    assert all(match in str(error) and "remedy" in str(error) for error in errors), errors[0]


def test_nothing_is_refused_that_is_right() -> None:
    assert run(partial(forward, config=llama(), change=with_()), P) == [None, None]


def test_a_rank_that_is_wrong_alone_hangs_nobody() -> None:
    """If only one rank is wrong, it gets its own error and the others get AgreementError, before any data moves."""

    def program(ring: Ring) -> Any:
        return forward(ring, llama(), hidden_keys if ring.rank == 1 else with_())

    first, second = VirtualCluster(P).run(program).results
    assert isinstance(first, AgreementError) and "rank 1" in str(first)
    assert isinstance(second, MaskError)


def test_positions_that_count_from_zero_are_refused() -> None:
    """Each rank's positions must be those of its own tokens. Rank 0 may have them by chance."""
    local = {"position_ids": torch.arange(S // P)[None]}
    errors = run(partial(forward, config=llama(), change=with_(**local)), P)
    assert {type(error) for error in errors} <= {LayoutError, AgreementError}


def test_models_that_were_never_compared_must_be_asked_for() -> None:
    class OfAnotherType(LlamaConfig):
        model_type = "llama-with-memory"

    errors = run(partial(_built_as, kind=OfAnotherType), P)
    assert all(
        isinstance(error, BackendError) and "models=('llama-with-memory',)" in str(error) for error in errors
    )
    assert run(partial(_built_as, kind=OfAnotherType, models=("llama-with-memory",)), P) == [None, None]


def _built_as(ring: Ring, kind: type, **options: Any) -> RinglabError | None:
    model = build(llama(), "ringlab")
    model.config.__class__ = kind
    try:
        with hf.context(ring, zigzag(S, P), **options) as context:
            model(**hf.shard_batch(context, BATCH.input_ids))
    except RinglabError as error:
        return error
    return None


def _called_as(ring: Ring, kind: str, labels: bool, shifted: bool = False) -> RinglabError | None:
    """Return the error of a model of class "Llama" + `kind`. labels: give it the labels of its shard."""
    config = llama(attn_implementation="ringlab")
    model = getattr(transformers, f"Llama{kind}")(config)
    try:
        with hf.context(ring, zigzag(S, P)) as context:
            given = hf.shard_batch(context, BATCH.input_ids, labels=BATCH.input_ids if shifted else None)
            if labels:
                given = {k: v for k, v in given.items() if k != "shift_labels"} | {
                    "labels": given["input_ids"]
                }
            model(**given)
    except RinglabError as error:
        return error
    return None


BERT = transformers.BertConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def bert(kind: str, attention: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)._from_config(BERT, attn_implementation=attention, **options)


def as_close(found: torch.Tensor, true: torch.Tensor) -> bool:
    """Return whether two results agree up to float32 rounding; one token more or less changes more."""
    return bool((found - true).abs().max() <= 1e-5)


def test_a_loss_of_the_models_own_is_refused_and_its_remedy_is_the_loss() -> None:
    """A model's own loss is refused: shard_batch shifts labels, and the model averages only its own tokens."""

    def program(ring: Ring) -> Any:
        model = bert("BertForMaskedLM", "ringlab")
        with hf.context(ring, zigzag(S, P), models=("bert",)) as context:
            with pytest.raises(TrainingError, match="BertForMaskedLM") as refused:
                model(**hf.shard_batch(context, BATCH.input_ids, labels=BATCH.labels))
            assert "context.shard(labels)" in refused.value.remedy and "loss_share" in refused.value.remedy
            labels = context.shard(BATCH.labels)
            logits = model(**hf.shard_batch(context, BATCH.input_ids)).logits
        return ring.all_reduce(loss_share(logits, labels, valid_tokens(labels, ring)).detach())

    true = bert("BertForMaskedLM", "eager")(BATCH.input_ids, labels=BATCH.labels).loss
    assert all(as_close(found, true) for found in run(program, P))


def test_weights_without_data_are_refused() -> None:
    def program(ring: Ring) -> Any:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM._from_config(llama(), attn_implementation="ringlab")
        with (
            hf.context(ring, zigzag(S, P)) as context,
            pytest.raises(DeviceError, match="on the device meta"),
        ):
            model(**hf.shard_batch(context, BATCH.input_ids))

    run(program, P)


def test_a_group_or_mesh_in_place_of_a_ring_is_told_how_to_make_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
        x = torch.zeros(1, 1, 4, 4)
        for group in (mesh["cp"], dist.group.WORLD):
            for call in (
                lambda group: hf.context(group, zigzag(S, 1)).__enter__(),
                lambda group: Context(group, zigzag(S, 1)),
                lambda group: ring_attention(x, x, x, ring=group, layout=zigzag(4, 1)),
            ):
                with pytest.raises(WorldSizeError, match=r"Ring\.of_group"):
                    call(group)
    finally:
        dist.destroy_process_group()


def test_labels_that_the_model_would_shift_inside_a_shard_are_refused() -> None:
    errors = run(partial(_called_as, kind="ForCausalLM", labels=True), P)
    assert all(isinstance(each, TrainingError) and "shard_batch" in str(each) for each in errors), errors
    outside = build(llama(), "eager")(**WHOLE, labels=BATCH.input_ids)
    alone = run(lambda ring: _called_as(ring, "ForCausalLM", labels=ring.rank == 1, shifted=True), P)
    assert [type(each) for each in alone] == [AgreementError, TrainingError]
    assert outside.loss is not None


def _with_attention(ring: Ring, *attentions: str, labels: bool = True) -> RinglabError | None:
    """Return the error of a rank that runs a model with each of these attentions in one context."""
    try:
        with hf.context(ring, zigzag(S, P)) as context:
            given = hf.shard_batch(context, BATCH.input_ids, labels=BATCH.labels if labels else None)
            for attention in attentions:
                build(llama(), attention)(**given)
    except RinglabError as error:
        return error
    return None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_attends_within_its_shard_is_refused(attention: str) -> None:
    """A model that attends within its shard is refused, because its wrong output would otherwise go unnoticed."""
    errors = run(lambda ring: _with_attention(ring, attention), P)
    assert all(isinstance(error, BackendError) for error in errors), errors
    assert all(
        f"{attention!r}" in str(each) and "set_attn_implementation('ringlab')" in str(each) for each in errors
    )
    beside_another = run(lambda ring: _with_attention(ring, attention, "ringlab"), P)
    assert beside_another == [None, None]  # allowed, because a teacher model may have the whole sequence


def test_one_rank_that_attends_within_its_shard_hangs_nobody() -> None:
    """A rank that attends within its shard makes no rank hang, since ranks meet in the loss or at the end."""

    def program(ring: Ring, labels: bool) -> RinglabError | None:
        return _with_attention(ring, "sdpa" if ring.rank else "ringlab", labels=labels)

    assert [type(each) for each in run(partial(program, labels=True), P)] == [AgreementError, AgreementError]
    assert [type(each) for each in run(partial(program, labels=False), P)] == [AgreementError, BackendError]


def test_an_error_inside_of_a_context_is_not_replaced() -> None:
    def program(ring: Ring) -> bool:
        with pytest.raises(ZeroDivisionError), hf.context(ring, zigzag(S, P)) as context:
            build(llama(), "sdpa")(**hf.shard_batch(context, BATCH.input_ids))
            raise ZeroDivisionError
        return True

    assert run(program, P) == [True, True]


def test_outside_of_a_context() -> None:
    with pytest.raises(BackendError, match=r"ringlab\.hf\.context"):
        build(llama(), "ringlab")(**WHOLE)


# Tests of shard_batch: every rank gets the whole batch, so one rank is enough.


def sharding(mask: Mask | None = None, **changed: Any) -> Any:
    def program(ring: Ring) -> Any:
        with hf.context(ring, zigzag(S, P), mask) as context:
            try:
                return hf.shard_batch(context, **{"input_ids": BATCH.input_ids, **changed})
            except RinglabError as error:
                return error

    return run(program, P)[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"input_ids": BATCH.input_ids + 1},
        {"position_ids": torch.arange(S)[None]},
        {"labels": torch.full((1, S), IGNORE)},
        {"input_ids": BATCH.input_ids.to("meta")},
    ],
)
def test_another_batch_on_a_rank_of_a_ring_is_told_to_all(changed: dict[str, Any]) -> None:
    """All ranks refuse a batch that differs between ranks, because it would give plausible but wrong losses."""

    def program(ring: Ring, **options: Any) -> Any:
        with hf.context(ring, zigzag(S, P), **options) as context:
            given = {"input_ids": BATCH.input_ids, "labels": BATCH.labels}
            try:
                hf.shard_batch(context, **given | (changed if ring.rank else {}))
            except RinglabError as error:
                return error

    first, second = run(program, P)
    assert isinstance(first, AgreementError), (first, second)
    if isinstance(second, AgreementError):
        assert "give all ranks of a ring the same batch" in first.remedy == second.remedy
    else:
        assert isinstance(second, TrainingError | DeviceError) and "the rank that differs" in first.remedy
    quiet, _ = run(partial(program, validate=False), P)
    assert quiet is None


ONES = torch.ones(1, S, dtype=torch.long)
HOLE = ONES.index_fill(1, torch.tensor([4]), 0)
LEFT = ONES.index_fill(1, torch.tensor([0, 1]), 0)
RIGHT = ONES.index_fill(1, torch.tensor([10, 11]), 0)
PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None]


@pytest.mark.parametrize(
    ("kind", "match", "mask", "changed"),
    [
        (MaskError, "holes", None, {"attention_mask": HOLE}),
        (MaskError, "at the beginning", None, {"attention_mask": LEFT}),
        (MaskError, "lets tokens see it", Mask(causal=False), {"attention_mask": RIGHT}),
        (MaskError, "no documents in the mask", None, {"position_ids": PACKED}),
        (MaskError, "mask_of", Mask(documents=(6, 6)), {"position_ids": PACKED}),
        (MaskError, "packed alike", None, {"position_ids": torch.stack([PACKED[0], torch.arange(S)])}),
        (ShapeError, "12 position ids", None, {"position_ids": torch.arange(6)[None]}),
        (ShapeError, "tokens", None, {"input_ids": BATCH.input_ids[:, :6]}),
        (TrainingError, "at least one label", None, {"labels": torch.full((1, S), IGNORE)}),
    ],
)  # fmt: skip
def test_batches_that_are_refused(
    kind: type[RinglabError], match: str, mask: Mask | None, changed: dict[str, Any]
) -> None:
    error = sharding(mask, **changed)
    assert isinstance(error, kind) and match in str(error), error


@pytest.mark.parametrize("ids", [torch.arange(S)[None], PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("offset", [0, 5])
def test_the_remedy_for_position_ids_can_be_followed(ids: Tensor, offset: int) -> None:
    """Each remedy that the error names is needed, and together they make the batch right."""
    error, mask = sharding(Mask(documents=(6, 6)) if ids is PACKED else None, position_ids=ids + offset), None
    if ids is PACKED or offset:
        assert (f"pass position_ids - {offset}" in str(error)) == (offset > 0), error
        if "mask_of(" in str(error):
            assert ids is PACKED and f"mask_of(position_ids{' - 5' * (offset > 0)})" in str(error)
            mask = hf.mask_of(ids)
    assert not isinstance(sharding(mask, position_ids=ids), Exception)


def test_what_a_rank_is_given() -> None:
    given = sharding(hf.mask_of(PACKED), labels=BATCH.input_ids, attention_mask=RIGHT)
    mine = zigzag(S, P).positions(0)
    assert given["position_ids"].tolist() == [PACKED[0, mine].tolist()]
    after = [*BATCH.input_ids[0, 1:10].tolist(), IGNORE, IGNORE, IGNORE]  # tokens 10 and 11 are padding
    after[4] = IGNORE  # token 5 begins another document
    assert given["labels"].tolist() == given["shift_labels"].tolist() == [[after[i] for i in mine]]
    assert given["num_items_in_batch"] == 8 and given["attention_mask"].all() and not given["use_cache"]


WITH_LABELS = {"input_ids": BATCH.input_ids, "labels": BATCH.labels}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": BATCH.input_ids}, "batches with labels"),
        ({"prompt_input_ids": BATCH.input_ids}, "batches with input_ids and labels"),
        (WITH_LABELS | {"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values of shape (1, 3, 4, 4)"),
        (WITH_LABELS | {"return_loss": True}, "return_loss=True"),
    ],
)
def test_batches_of_which_a_trainer_over_a_ring_would_drop_something_are_refused(
    batch: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainingError) as refused:
        trainer._packed(batch)
    assert words in str(refused.value)


def test_entries_with_a_value_for_each_token_stay_beside_the_tokens() -> None:
    batch = WITH_LABELS | {"attention_mask": ONES, "token_type_ids": ONES, "position_ids": None}
    packing, beside = trainer._packed(batch)
    assert packing.documents == (S,) and beside == ["token_type_ids"]


def test_masks_of_packed_batches() -> None:
    assert hf.mask_of(PACKED) == hf.mask_of(PACKED[0]) == Mask(documents=(5, 7))
    assert hf.mask_of(PACKED.expand(3, -1), prefix=2) == Mask(documents=(5, 7), prefix=2)
    with pytest.raises(MaskError, match="packed alike"):
        hf.mask_of(torch.stack([PACKED[0], torch.arange(S)]))
    with pytest.raises(MaskError, match="ascend by one"):
        hf.mask_of(torch.tensor([0, 1, 5]))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.split(".")[:2] == ["ringlab", "hf"]]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"pip install 'ringlab\[hf\]'"):
        importlib.import_module("ringlab.hf")

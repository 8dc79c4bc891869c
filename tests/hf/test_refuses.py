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
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig, StaticCache

from ringlab import VirtualCluster, contiguous, hf, ring_attention, zigzag
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
from ringlab.packing import Packing
from tests.hf.models import (
    IGNORE,
    VOCABULARY,
    batch_of,
    build,
    counted_from_the_ranks_before,
    counted_from_zero,
    gemma2,
    gpt_oss,
    llama,
    qwen2,
    run,
)
from tests.schedules.problems import Plain

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


def mask_by_layer(given: dict[str, Any], _: Any) -> dict[str, Any]:
    return {"attention_mask": {"full_attention": None, "sliding_attention": None}}


def static_cache(given: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    return {"past_key_values": StaticCache(config=config, max_cache_len=32), "use_cache": True}


def filled_cache(given: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
    return {"past_key_values": cache}


def with_(**more: Any) -> Callable[..., dict[str, Any]]:
    return lambda *_: more


CASES: dict[str, tuple[PreTrainedConfig, Callable[..., dict[str, Any]], type[RinglabError], str]] = {
    "padding with holes": (llama(), hidden_keys, MaskError, "hides keys"),
    "custom 4-d mask": (llama(), custom_mask, MaskError, "a tensor of shape"),
    "masks by layer type that are none": (qwen2(), mask_by_layer, MaskError, "NoneType"),
    "a cache": (llama(), with_(use_cache=True), MaskError, "use_cache"),
    "static cache": (llama(), static_cache, MaskError, "32 keys"),
    "a cache that is filled": (llama(), filled_cache, MaskError, "cache"),
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


@pytest.mark.parametrize("change", [hidden_keys, custom_mask])
def test_a_rank_that_is_wrong_alone_hangs_nobody(change: Callable[..., dict[str, Any]]) -> None:
    """If only one rank is wrong, it gets its own error and the others get AgreementError, before any data moves."""

    def program(ring: Ring) -> Any:
        return forward(ring, llama(), change if ring.rank == 1 else with_())

    first, second = VirtualCluster(P).run(program).results
    assert isinstance(first, AgreementError) and "rank 1" in str(first)
    assert isinstance(second, MaskError)


@pytest.mark.parametrize("positions", [counted_from_zero, counted_from_the_ranks_before])
def test_local_positions_are_refused(positions: Callable[..., dict[str, Any]]) -> None:
    def program(ring: Ring) -> Any:
        with hf.context(ring, zigzag(S, P)) as context:
            given = positions(context, BATCH)
            try:
                build(llama(), "ringlab")(**given)
            except RinglabError as error:
                return type(error)

    assert set(run(program, P)) <= {LayoutError, ShapeError, AgreementError}
    assert AgreementError not in run(program, P) or run(program, P).count(AgreementError) == 1


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


def test_heads_that_take_tokens_together_are_refused() -> None:
    """Heads that combine tokens are refused, because they would combine the tokens of one shard only."""
    errors = run(partial(_called_as, kind="ForSequenceClassification", labels=False), P)
    assert all(isinstance(each, BackendError) and "ForSequenceClassification" in str(each) for each in errors)
    for kind in ("Model", "ForCausalLM"):
        assert run(partial(_called_as, kind=kind, labels=False), P) == [None, None]


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


def test_a_pooler_is_refused_and_its_remedy_runs() -> None:
    """A pooler is refused because it reads the first token, which only one rank has; its remedy runs."""

    def program(ring: Ring) -> Any:
        with hf.context(ring, zigzag(S, P), models=("bert",)) as context:
            batch = hf.shard_batch(context, BATCH.input_ids)
            with pytest.raises(BackendError, match="BertPooler") as refused:
                bert("BertModel", "ringlab")(**batch)
            assert "add_pooling_layer=False" in refused.value.remedy
            return bert("BertModel", "ringlab", add_pooling_layer=False)(**batch).last_hidden_state

    true = bert("BertModel", "eager", add_pooling_layer=False)(BATCH.input_ids).last_hidden_state
    assert as_close(zigzag(S, P).unshard(run(program, P), dim=1), true)


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


def test_padding_in_a_model_that_is_not_causal_is_refused_and_its_remedy_runs() -> None:
    """Padding is refused in a model that is not causal, because every token would see it; the remedy runs."""
    ids, mask = BATCH.input_ids.expand(2, -1), torch.cat([ONES, RIGHT])
    packing = Packing.of_batch({"input_ids": ids, "attention_mask": mask})
    layout = packing.layout("per_document", P)

    def program(ring: Ring) -> Any:
        model = bert("BertModel", "ringlab", add_pooling_layer=False)
        with hf.context(ring, zigzag(S, P), models=("bert",)) as context:
            with pytest.raises(MaskError, match="no padding") as refused:
                model(**hf.shard_batch(context, ids, attention_mask=mask))
            assert "packing.mask(causal=False)" in refused.value.remedy
            model(**hf.shard_batch(context, ids, attention_mask=torch.ones_like(mask)))
        with hf.context(ring, layout, packing.mask(causal=False), models=("bert",)) as context:
            return model(**hf.shard_batch(context, packing.pack(ids))).last_hidden_state

    found = packing.restore(layout.unshard(run(program, P), dim=1))
    true = bert("BertModel", "eager", add_pooling_layer=False)(ids, attention_mask=mask).last_hidden_state
    assert as_close(found[mask == 1], true[mask == 1])


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


def test_a_bidirectional_gemma_is_refused_by_the_part_of_its_mask() -> None:
    """A Gemma with bidirectional attention, as in EmbeddingGemma, is refused; the error names the part."""
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, use_bidirectional_attention=True,
    )  # fmt: skip

    def program(ring: Ring) -> Any:
        model = transformers.Gemma3TextModel._from_config(config, attn_implementation="ringlab")
        with (
            hf.context(ring, zigzag(S, P), models=("gemma3_text",)) as context,
            pytest.raises(MaskError, match="a part"),
        ):
            model(**hf.shard_batch(context, BATCH.input_ids))

    run(program, P)


def test_a_head_that_one_rank_alone_has_hangs_nobody() -> None:
    def program(ring: Ring) -> RinglabError | None:
        return _called_as(ring, "ForSequenceClassification" if ring.rank else "Model", labels=False)

    assert [type(each) for each in run(program, P)] == [AgreementError, BackendError]


def test_labels_that_the_model_would_shift_inside_a_shard_are_refused() -> None:
    errors = run(partial(_called_as, kind="ForCausalLM", labels=True), P)
    assert all(isinstance(each, TrainingError) and "shard_batch" in str(each) for each in errors), errors
    outside = build(llama(), "eager")(**WHOLE, labels=BATCH.input_ids)
    alone = run(lambda ring: _called_as(ring, "ForCausalLM", labels=ring.rank == 1, shifted=True), P)
    assert [type(each) for each in alone] == [AgreementError, TrainingError]
    assert outside.loss is not None


def test_a_layer_that_is_not_causal_under_a_causal_mask() -> None:
    def program(ring: Ring) -> Any:
        model = build(llama(), "ringlab")
        model.model.layers[1].self_attn.is_causal = False
        with hf.context(ring, zigzag(S, P)) as context:
            try:
                model(**hf.shard_batch(context, BATCH.input_ids))
            except RinglabError as error:
                return error

    assert all(isinstance(error, MaskError) and "is_causal=False" in str(error) for error in run(program, P))


def test_soft_caps_need_a_block_that_has_them() -> None:
    errors = run(partial(forward, config=gemma2(), change=with_(), block=Plain()), P)
    assert all(isinstance(error, BackendError) and "softcap" in str(error) for error in errors), errors


def test_outside_of_a_context() -> None:
    with pytest.raises(BackendError, match=r"ringlab\.hf\.context"):
        build(llama(), "ringlab")(**WHOLE)


def test_generation_with_a_cache() -> None:
    def program(ring: Ring) -> Any:
        with hf.context(ring, contiguous(S, 1)):
            try:
                build(llama(), "ringlab").eval().generate(BATCH.input_ids, max_new_tokens=2, do_sample=False)
            except RinglabError as error:
                return error

    [error] = run(program, 1)
    assert isinstance(error, MaskError) and "cache" in str(error)


def test_a_layout_that_cannot_be() -> None:
    def program(ring: Ring, layout: Any) -> Any:
        try:
            with hf.context(ring, layout):
                return None
        except RinglabError as error:
            return type(error)

    assert run(partial(program, layout=contiguous(2, P + 2)), P) == [WorldSizeError] * P
    assert run(partial(program, layout=contiguous(1, P)), P) == [LayoutError] * P


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
        {"labels": BATCH.labels + 1},
        {"attention_mask": torch.ones(1, S, dtype=torch.long)},
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
        (MaskError, "lets tokens see it", Mask(prefix=11), {"attention_mask": RIGHT}),
        (MaskError, "no documents in the mask", None, {"position_ids": PACKED}),
        (MaskError, "mask_of", Mask(documents=(6, 6)), {"position_ids": PACKED}),
        (MaskError, "packed alike", None, {"position_ids": torch.stack([PACKED[0], torch.arange(S)])}),
        (ShapeError, "12 position ids", None, {"position_ids": torch.arange(6)[None]}),
        (ShapeError, "tokens", None, {"input_ids": BATCH.input_ids[:, :6]}),
        (ShapeError, "input_ids", None, {"input_ids": BATCH.input_ids[0]}),
        (ShapeError, "labels", None, {"labels": BATCH.labels[:, :6]}),
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

"""A model that attends within its shard, although it should attend over the ring, is refused on all ranks."""

from __future__ import annotations

from functools import partial

import pytest

from ringlab import hf, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, BackendError, RinglabError
from tests.hf.models import batch_of, build, llama, run

S, P = 12, 2
BATCH = batch_of(S)


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

"""Linear attention refuses impossible calls by name, on every rank, before any data moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    BackendError,
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    RinglabError,
    ShapeError,
    WorldSizeError,
)
from ringlab.layout import contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.scan.attention import linear_attention
from tests.scan.calls import attend


def ones(*shape: int, **other: Any) -> torch.Tensor:
    return torch.ones(*shape, **other)


def call(ring: Ring, change: dict[str, Any]) -> Any:
    """Call linear attention on two ranks of two tokens, with four heads of v over two of q and k."""
    given: dict[str, Any] = {"q": ones(1, 2, 2, 3), "k": ones(1, 2, 2, 3), "v": ones(1, 4, 2, 5)}
    given |= {"ring": ring, "layout": contiguous(4, 2)} | change
    return linear_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


WRONG: dict[str, tuple[dict[str, Any], type[RinglabError], str]] = {
    "no ring": ({"ring": None, "validate": False}, WorldSizeError, "ring="),
    "no layout": ({"layout": "zigzag"}, LayoutError, "layout="),
    "other ranks": ({"layout": contiguous(4, 3)}, WorldSizeError, "2 ranks"),
    "single tokens": ({"layout": striped(4, 2)}, LayoutError, "use contiguous(S, P)"),
    "no tensor": ({"q": 3}, ShapeError, "int"),
    "other keys": ({"k": ones(1, 2, 2, 4)}, ShapeError, "q and k both"),
    "heads that do not divide": ({"v": ones(1, 3, 2, 5)}, ShapeError, "3 and 2"),
    "more heads of q": ({"v": ones(1, 1, 2, 5)}, ShapeError, "repeat k and v"),
    "the whole sequence": ({"v": ones(1, 4, 4, 5)}, ShapeError, "layout.shard"),
    "mixed dtypes": ({"v": ones(1, 4, 2, 5).double()}, DtypeError, "float64"),
    "integers": ({name: ones(1, 2, 2, 3, dtype=torch.int64) for name in "qkv"}, DtypeError, "floating"),
    "another device": ({"v": ones(1, 4, 2, 5, device="meta")}, DeviceError, "meta"),
    "a decay for each channel": ({"decay": ones(1, 4, 2, 3)}, ShapeError, "Kimi Delta Attention"),
    "a decay of the heads of q": ({"decay": ones(1, 2, 2)}, ShapeError, "each head of v"),
    "whole numbers for beta": ({"beta": ones(1, 4, 2, dtype=torch.int64)}, DtypeError, "beta"),
    "beta elsewhere": ({"beta": ones(1, 4, 2, device="meta")}, DeviceError, "beta"),
    "another initial state": ({"initial_state": ones(1, 4, 5, 3)}, ShapeError, "(1, 4, 3, 5)"),
    "a scale of NaN": ({"scale": float("nan")}, DtypeError, "finite"),
    "chunks of nothing": ({"chunk": 0}, ShapeError, "chunk="),
    "several scans": ({"scan": ["relay"]}, BackendError, "relay, all-gather, doubling"),
    "an unknown scan": ({"scan": "ring"}, BackendError, "relay, all-gather, doubling"),
    "documents of another length": ({"documents": (2, 3)}, MaskError, "4 tokens"),
    "a mask": ({"documents": Mask(documents=(4,))}, MaskError, "mask.documents"),
}


def refused(ring: Ring, name: str, wrong: tuple[int, ...]) -> RinglabError | None:
    try:
        call(ring, WRONG[name][0] if ring.rank in wrong else {})
    except RinglabError as error:
        return error
    return None


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_on_every_rank(name: str) -> None:
    change, kind, words = WRONG[name]
    for wrong in ((0, 1), (1,)) if "validate" not in change else ((0, 1),):
        outcome = VirtualCluster(2, memory=False).run(refused, name, wrong)
        assert outcome.trace.bytes_sent() == 0
        for rank, error in enumerate(outcome.results):
            assert type(error) is (kind if rank in wrong else AgreementError), error
            assert words in str(error) or rank not in wrong


OTHERWISE: dict[str, dict[str, Any]] = {
    "scan": {"scan": "relay"},
    "scale": {"scale": 2.0},
    "layout": {"layout": zigzag(4, 2)},
    "documents": {"documents": (1, 3)},
    "gates": {"beta": ones(1, 4, 2)},
    "gradients": {"v": ones(1, 4, 2, 5, requires_grad=True)},
    "the last state": {"return_state": True},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_ranks_that_call_differently_are_refused(name: str) -> None:
    def program(ring: Ring) -> RinglabError | None:
        try:
            call(ring, OTHERWISE[name] if ring.rank else {})
        except RinglabError as error:
            return error
        return None

    outcome = VirtualCluster(2, memory=False).run(program)
    assert [type(error) for error in outcome.results] == [AgreementError] * 2
    assert outcome.trace.bytes_sent() == 0


def test_backward_through_another_call_is_refused() -> None:
    """Backward is refused if one rank goes back through the first of two calls and one through the second."""

    def program(ring: Ring) -> str:
        q = ones(1, 2, 2, 3, requires_grad=True)
        outs = [call(ring, {"q": q}) for _ in range(2)]
        try:
            outs[ring.rank].sum().backward()
        except AgreementError as error:
            return str(error)
        return ""

    for words in VirtualCluster(2, memory=False).run(program).results:
        assert "backward through call 1" in words and "backward through call 2" in words


def test_nothing_at_all() -> None:
    """Without tokens there are no outputs, and the last state is the initial one, with its gradient."""

    def program(ring: Ring) -> Any:
        state = torch.full((1, 4, 3, 5), 2.0, requires_grad=True)
        empty: dict[str, Any] = {
            name: torch.ones(1, heads, 0, D) for name, heads, D in (("q", 2, 3), ("k", 2, 3), ("v", 4, 5))
        }
        out, last = call(
            ring, empty | {"layout": contiguous(0, 2), "initial_state": state, "return_state": True}
        )
        last.sum().backward()
        return out.shape, last.unique().item(), state.grad is not None and state.grad.unique().item()

    assert VirtualCluster(2).run(program).results == [((1, 4, 0, 5), 2.0, 1.0)] * 2


class Incomparable(float):
    """A number whose comparison raises an error that no check expects."""

    def __ge__(self, other: object) -> bool:
        raise ArithmeticError("no such number")


class Unreadable(tuple[int, ...]):
    """Lengths whose iteration raises an error that no check expects."""

    def __iter__(self) -> Iterator[int]:
        raise ArithmeticError("no such lengths")


UNFORESEEN: dict[str, dict[str, Any]] = {
    "linear attention": {"scale": Incomparable(1.0)},
    "latent attention": {"scale": Incomparable(1.0)},
    "short convolution": {"documents": Unreadable((3, 5))},
    "halo": {"documents": Unreadable((3, 5))},
}


@pytest.mark.parametrize("name", UNFORESEEN)
def test_no_rank_waits_for_one_whose_checks_fail_in_any_way(name: str) -> None:
    def program(ring: Ring) -> Exception | None:
        try:
            attend(ring, name, **(UNFORESEEN[name] if ring.rank else {}))
        except (RinglabError, ArithmeticError) as error:
            return error
        return None

    outcome = VirtualCluster(2, memory=False).run(program)
    told, failed = outcome.results
    assert isinstance(told, AgreementError) and "ArithmeticError: no such" in str(told)
    assert isinstance(failed, ArithmeticError)
    assert outcome.trace.bytes_sent() == 0

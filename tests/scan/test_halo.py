"""The short convolution over ranks equals that of the whole sequence, with its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    RinglabError,
    ShapeError,
    WorldSizeError,
)
from ringlab.layout import Layout, contiguous, zigzag
from ringlab.scan.halo import halo, short_convolution
from tests.laws.draw import MAKERS
from tests.refusals import assert_refused, errors_on
from tests.scan.problems import cut


@dataclass(frozen=True)
class Convolution:
    """A convolution of two sequences with 3 channels."""

    layout: Layout
    kernel: int = 4
    documents: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    autocast: bool = False  # whether autocast makes the dtype from float32 inputs

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, the weight, and the gradient of the output."""
        draw = np.random.default_rng(self.layout.S).standard_normal
        shapes = (2, self.layout.S, 3), (3, self.kernel), (2, self.layout.S, 3)
        x, weight, dout = (torch.from_numpy(draw(shape)).to(self.dtype) for shape in shapes)
        return x, weight, dout


def whole(problem: Convolution) -> tuple[Tensor, ...]:
    """Return torch's own convolution, document by document, in float64, with its gradients."""
    x, weight, dout = (tensor.double() for tensor in problem.tensors())
    x.requires_grad_(), weight.requires_grad_()
    parts = x.split(problem.documents or (problem.layout.S,), dim=1)
    outs = [
        conv1d(pad(part.mT, (problem.kernel - 1, 0)), weight[:, None], groups=3).mT
        for part in parts
        if part.shape[1]
    ]
    out = torch.cat(outs, dim=1)
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


def of_rank(ring: Ring, problem: Convolution) -> tuple[Tensor, ...]:
    layout = problem.layout
    x, weight, dout = problem.tensors()
    x, dout = layout.shard((x, dout), ring.rank, dim=1)
    if problem.autocast:
        weight = weight.float()
    x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=problem.autocast):
        out = short_convolution(x, weight, ring=ring, layout=layout, documents=problem.documents)
    assert out.dtype == problem.dtype
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


def joined(problem: Convolution, shards: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    out, dx, dweight = zip(*shards, strict=True)
    return problem.layout.unshard(out, dim=1), problem.layout.unshard(dx, dim=1), torch.stack(dweight).sum(0)


def law_equals_the_whole(problem: Convolution) -> None:
    """Results equal the whole's up to the roundings of sums: of `kernel` products, or over all tokens."""
    run = VirtualCluster(problem.layout.P, memory=False).run(of_rank, problem)
    x, weight, dout = problem.tensors()
    sizes = (
        problem.kernel * x.abs().max() * weight.abs().max(),
        problem.kernel * dout.abs().max() * weight.abs().max(),
        (x.abs().amax() * dout.abs().amax() * 2 * problem.layout.S),
    )
    unit = torch.finfo(problem.dtype).eps
    for found, true, size in zip(joined(problem, run.results), whole(problem), sizes, strict=True):
        error = (found.double() - true).abs().max().item()
        assert error <= unit * float(size) * problem.kernel, (error, unit * float(size))


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    S, P = draw(st.integers(1, 20)), draw(st.integers(1, 6))
    places = draw(st.lists(st.floats(0, 1), max_size=4))
    documents = cut(S, *places) if places else ()
    return Convolution(draw(st.sampled_from(MAKERS))(S, P), draw(st.integers(1, 5)), documents)


@settings(max_examples=40)
@given(convolutions())
def test_equals_the_whole(problem: Convolution) -> None:
    law_equals_the_whole(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_other_dtypes(dtype: torch.dtype) -> None:
    law_equals_the_whole(Convolution(zigzag(17, 3), documents=(8, 9), dtype=dtype))


def test_autocast_casts_the_weight() -> None:
    """Autocast casts a float32 weight for bfloat16 tokens, as in a layer under autocast."""
    law_equals_the_whole(Convolution(contiguous(9, 3), dtype=torch.bfloat16, autocast=True))


def test_the_halo_is_what_was_before() -> None:
    """The halo of each stretch has the tokens before it, in order, and zeros before a document begins."""
    layout, x = zigzag(16, 2), torch.arange(1.0, 17.0).reshape(1, 16, 1)

    def program(ring: Ring) -> list[list[float]]:
        found = halo(layout.shard(x, ring.rank, dim=1), 3, ring=ring, layout=layout, documents=(11, 5))
        return found[0, :, :, 0].tolist()

    # Tokens are numbered from 1. Rank 0 owns 1 … 4 and 13 … 16, rank 1 owns 5 … 12; a document begins with 12.
    assert VirtualCluster(2).run(program).results == [[[0, 0, 0], [0, 0, 12]], [[2, 3, 4]]]


def call(ring: Ring, change: dict[str, Any]) -> Any:
    x, weight = torch.ones(1, 2, 3), torch.ones(3, 4)
    given: dict[str, Any] = {"x": x, "weight": weight, "ring": ring, "layout": contiguous(4, 2)} | change
    return short_convolution(given.pop("x"), given.pop("weight"), **given)


WRONG: dict[str, tuple[dict[str, Any], type[RinglabError], str]] = {
    "no ring": ({"ring": None, "validate": False}, WorldSizeError, "ring="),
    "no layout": ({"layout": "contiguous"}, LayoutError, "layout="),
    "other ranks": ({"layout": contiguous(4, 3)}, WorldSizeError, "2 ranks"),
    "the whole sequence": ({"x": torch.ones(1, 4, 3)}, ShapeError, "layout.shard"),
    "no weight": ({"weight": 4}, ShapeError, "weight (3, W)"),
    "an empty kernel": ({"weight": torch.ones(3, 0)}, ShapeError, "W ≥ 1"),
    "integers": ({"x": torch.ones(1, 2, 3, dtype=torch.int64)}, DtypeError, "floating"),
    "another dtype": ({"weight": torch.ones(3, 4).double()}, DtypeError, "float64"),
    "another device": ({"weight": torch.ones(3, 4, device="meta")}, DeviceError, "meta"),
    "documents of another length": ({"documents": (2, 3)}, MaskError, "4 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_on_every_rank(name: str) -> None:
    change, kind, words = WRONG[name]
    for wrong in ((0, 1), (1,)) if "validate" not in change else ((0, 1),):
        assert_refused(2, lambda ring, at_fault: call(ring, change if at_fault else {}), kind, words, wrong)


def test_kernels_of_other_widths_are_refused() -> None:
    """Kernels of unequal width are refused even if no message is needed, as at a document's beginning."""
    other = {"documents": (2, 2)}
    for error in errors_on(2, lambda ring: call(ring, other | {"weight": torch.ones(3, 3 + ring.rank)})):
        assert isinstance(error, AgreementError) and "width 3" in str(error) and "width 4" in str(error)


def test_a_halo_of_less_than_nothing() -> None:
    with pytest.raises(ShapeError, match="tokens ≥ 0"):
        VirtualCluster(1).run(lambda ring: halo(torch.ones(1, 4, 3), -1, ring=ring, layout=contiguous(4, 1)))

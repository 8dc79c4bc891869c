"""NaN and inf in the inputs reach exactly the outputs that depend on them, over the ring as on one device."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import LAYOUTS
from ringlab.layout import Layout
from ringlab.mask import Mask

# More keys than a vector register holds, because torch's SDPA loses NaN among fewer keys.
S, P, H, K, D = 37, 4, 4, 2, 8
POISONS = (math.nan, math.inf, -math.inf)
BLOCKS = ("naive", "blockwise", "native")
SOME_LAYOUTS = ("contiguous", "zigzag", "token-fold", "chunk-3")


def tensors() -> dict[str, Tensor]:
    draw = np.random.default_rng(3).standard_normal
    shapes = {"q": (1, H, S, D), "k": (1, K, S, D), "v": (1, K, S, D)}
    return {name: torch.from_numpy(draw(shape)).float() for name, shape in shapes.items()}


def program(ring: Ring, x: dict[str, Tensor], layout: Layout, block: str, causal: bool) -> Tensor:
    q, k, v = (layout.shard(x[name], ring.rank) for name in ("q", "k", "v"))
    return ring_attention(q, k, v, ring=ring, layout=layout, block=block, causal=causal)


def over_the_ring(x: dict[str, Tensor], layout_name: str, block: str, causal: bool) -> Tensor:
    layout = LAYOUTS[layout_name](S, P)
    return layout.unshard(VirtualCluster(P, memory=False).run(program, x, layout, block, causal).results)


def torchs_own(x: dict[str, Tensor], causal: bool) -> Tensor:
    k, v = (x[name].repeat_interleave(H // K, 1) for name in ("k", "v"))
    return torch.nn.functional.scaled_dot_product_attention(x["q"], k, v, is_causal=causal)


def reached(out: Tensor) -> Tensor:
    return ~out.isfinite()


HEADS = slice(H // K, H)  # the query heads that read key/value head 1
REACHES = {  # for each tensor: its head, tokens, poisons, and the entries of out that see token j
    "v": (1, (0, 5), POISONS, lambda j, causal: (0, HEADS, slice(j if causal else 0, None), 2)),
    "k": (1, (0, 5, S - 1), (math.nan,), lambda j, causal: (0, HEADS, slice(j if causal else 0, None))),
    "q": (1, (5, S - 1), POISONS, lambda j, causal: (0, 1, j)),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
@pytest.mark.parametrize("name", REACHES)
def test_a_poison_reaches_exactly_what_sees_it(name: str, layout: str, block: str) -> None:
    head, places, poisons, seen = REACHES[name]
    for poison, j, causal in itertools.product(poisons, places, (True, False)):
        x = tensors()
        x[name][0, head, j, 2] = poison
        out = over_the_ring(x, layout, block, causal)
        expected = torch.zeros(1, H, S, D, dtype=torch.bool)
        expected[seen(j, causal)] = True
        assert torch.equal(reached(out), expected), (poison, j, causal)
        more = reached(out) & ~reached(torchs_own(x, causal))
        assert not more.any(), "reaches more than in torch's SDPA"


@pytest.mark.parametrize("block", BLOCKS)
def test_a_row_with_no_score_above_minus_infinity_is_zero(block: str) -> None:
    """If an infinite query scores −inf with all its keys, its row is zero, here and in torch's SDPA."""
    x = tensors()
    x["q"][0, 1, 0] = math.inf
    x["k"][0, 0, 0] = -1.0
    for layout in SOME_LAYOUTS:
        out = over_the_ring(x, layout, block, True)
        assert (out[0, 1, 0] == 0).all()
        assert out.isfinite().all() and torchs_own(x, True).isfinite().all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_an_infinite_key_hides_or_spoils(layout: str, block: str) -> None:
    """An infinite key gives a row the score +inf (the row is NaN) or −inf (the key has weight 0)."""
    for poison, j, causal in itertools.product((math.inf, -math.inf), (1, S - 1), (True, False)):
        x = tensors()
        x["k"][0, 1, j, 2] = poison
        out = over_the_ring(x, layout, block, causal)
        assert torch.equal(reached(out), reached(torchs_own(x, causal))), (poison, j, causal)
        truth = torch.from_numpy(oracle.attention(x["q"], x["k"], x["v"], causal=causal).out).float()
        assert torch.equal(reached(out), reached(truth))
        torch.testing.assert_close(out, truth, equal_nan=True)


MASKS = {
    "window": Mask(window=6),
    "window-both": Mask(causal=False, window=4),
    "documents": Mask(documents=(9, 1, 27)),
    "packed": Mask(documents=(9, 1, 27), prefix=(0, 0, 3), window=5),
}


def masked(ring: Ring, x: dict[str, Tensor], layout: Layout, block: str, mask: Mask) -> tuple[Tensor, ...]:
    q, k, v = (layout.shard(x[name], ring.rank).requires_grad_() for name in ("q", "k", "v"))
    out = ring_attention(q, k, v, ring=ring, layout=layout, block=block, mask=mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.thorough
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mask", MASKS)
def test_what_a_window_or_a_document_hides_stays_hidden(mask: str, block: str) -> None:
    """A poisoned key reaches only the rows that see it, even if the edge of a window runs through a tile."""
    everyone = np.arange(S)
    visible = torch.from_numpy(MASKS[mask].visible(everyone, everyone))
    for layout_name, (name, poison), j in itertools.product(
        ("contiguous", "token-fold"), (("v", math.nan), ("v", math.inf), ("k", math.nan)), (9, 20)
    ):
        x = tensors()
        x[name][0, 1, j, 2] = poison
        layout = LAYOUTS[layout_name](S, P)
        shards = VirtualCluster(P, memory=False).run(masked, x, layout, block, MASKS[mask]).results
        out = layout.unshard([shard[0] for shard in shards])
        expected = torch.zeros(1, H, S, D, dtype=torch.bool)
        expected[0, H // K :, visible[:, j], slice(2, 3) if name == "v" else slice(None)] = True
        assert torch.equal(reached(out), expected), (layout_name, name, poison, j)


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_of_other_documents_know_nothing_of_it(block: str) -> None:
    """A document full of NaN changes no bit of the other documents' outputs and gradients."""
    mask, layout = MASKS["documents"], LAYOUTS["zigzag"](S, P)
    sound, spoiled = tensors(), tensors()
    for x in spoiled.values():
        x[..., :9, :] = math.nan
    results = [
        VirtualCluster(P, memory=False).run(masked, x, layout, block, mask).results for x in (sound, spoiled)
    ]
    for name, one, other in zip(
        ("out", "dq", "dk", "dv"), *(zip(*r, strict=True) for r in results), strict=True
    ):
        before, after = layout.unshard(one), layout.unshard(other)
        assert torch.equal(before[..., 9:, :], after[..., 9:, :]) and after[..., 9:, :].isfinite().all(), name
        assert after[..., :9, :].isnan().any()


def test_finite_inputs_give_no_warning_and_no_nan() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block, layout in itertools.product(BLOCKS, SOME_LAYOUTS):
            assert over_the_ring(tensors(), layout, block, True).isfinite().all()

"""Checks of the Triton kernels, each a small problem; mutants of the kernels fail in these checks.

While a check runs, memory that is not written contains NaN. Tiles are small, so that a shard of 45 tokens has
masked tiles, unmasked tiles and a ragged tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab.blocks.naive import Naive
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.mask import Mask
from ringlab.plan import Tile
from ringlab.scores import ScoreRules
from tests.blocks.compiled import small_tiles
from tests.philox import factors

SMALL = small_tiles()


@dataclass(frozen=True)
class Task:
    """An attention problem over P ranks: H query heads, K key/value heads, S tokens of the whole sequence."""

    S: int
    D: int = 16
    Dv: int = 0
    B: int = 1
    H: int = 2
    K: int = 2
    P: int = 1
    layout: str = "zigzag"
    causal: bool = True
    mask: Mask | None = None
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 2**63 + 2**31 + 17

    @property
    def seen(self) -> dict[str, Any]:
        """Return the option that says which keys a query sees: either `causal` or `mask`, never both."""
        return {"causal": self.causal} if self.mask is None else {"mask": self.mask}

    @property
    def how(self) -> dict[str, Any]:
        """Return the oracle's options, with dropout factors that tests/laws/draw.py draws independently."""
        drawn = factors(self.B, self.H, self.S, self.dropout, self.seed) if self.dropout else None
        return self.seen | {"scale": self.scale, "softcap": self.softcap, "factors": drawn}

    def tensors(self, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, dout, normally distributed, with q and k multiplied by `size`."""
        draw = torch.Generator().manual_seed(self.S + self.D)
        Dv = self.Dv or self.D
        sizes = (self.H, self.D), (self.K, self.D), (self.K, Dv), (self.H, Dv)
        shapes = [(self.B, heads, self.S, dim) for heads, dim in sizes]
        q, k, v, dout = (torch.randn(shape, generator=draw) for shape in shapes)
        return tuple(x.to(self.dtype) for x in (q * size, k * size, v, dout))  # type: ignore[return-value]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill all new memory with NaN inside this context."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # this also makes torch fill new memory with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attend(task: Task, tensors: tuple[Tensor, ...]) -> Results:
    """Return the results of the ring for whole tensors; each rank gets its shard of them."""
    layout = LAYOUTS[task.layout](task.S, task.P)

    def program(ring: Ring) -> tuple[Tensor, ...]:
        q, k, v, dout = (layout.shard(x, ring.rank) for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, lse = ring_attention(
            q, k, v,
            ring=ring, layout=layout, **task.seen, scale=task.scale, block=SMALL,
            return_lse=True, softcap=task.softcap, dropout=task.dropout, seed=task.seed,
        )  # fmt: skip
        return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)

    with poisoned():
        outcome = VirtualCluster(task.P, memory=False).run(program)
    parts = zip(*outcome.results, strict=True)
    return Results(*(layout.unshard(part, dim=-1 if i == 1 else -2) for i, part in enumerate(parts)))


def hold(task: Task, results: Results, tensors: tuple[Tensor, ...]) -> None:
    """Raise AssertionError if an error against the oracle is larger than its bound."""
    true = truth(*tensors, **task.how)
    allowed = bounds(*tensors, **task.how, true=true)
    found = errors(results, true)
    wrong = {name: (found[name], allowed[name]) for name in NAMES if not found[name] <= allowed[name]}
    assert not wrong, f"{task}: (error, allowed) {wrong}"


def right(task: Task) -> None:
    tensors = task.tensors()
    hold(task, attend(task, tensors), tensors)


def causal_ring() -> None:
    """Two ranks of 45 tokens are right with head dims that need padding, and a smaller head dim of v."""
    right(Task(S=90, D=24, Dv=12, H=1, K=1, P=2))


def full_ring() -> None:
    """A full ring is right: only the last tile is ragged, and one step is neither first nor last."""
    right(Task(S=123, Dv=24, P=3, H=1, K=1, causal=False, layout="contiguous"))  # v has more dims than q


def window_ring() -> None:
    """Windows are right if narrower than a tile of keys, and if they span several tiles on both sides."""
    right(Task(S=90, H=1, K=1, P=2, mask=Mask(window=11)))
    right(Task(S=150, H=1, K=1, P=2, layout="contiguous", mask=Mask(window=60, causal=False)))


def batches() -> None:
    """Two batches, and two query heads for each of two key/value heads, give right results."""
    right(Task(S=20, B=2, H=4, K=2))


def stored_otherwise() -> None:
    """The block accepts four tensors whose axes have four different orders in memory."""
    task = Task(S=20, B=2)
    q, k, v, dout = task.tensors()
    orders = ((0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 2, 3), (2, 1, 0, 3))
    q, k, v, dout = (_in_order(x, order) for x, order in zip((q, k, v, dout), orders, strict=True))
    with poisoned():
        partial = SMALL.forward(q, k, v, causal=True, scale=0.25)
        out, lse = partial.out, partial.lse
        delta = (dout * out).sum(-1)
        rows = BackwardRows(dout, q, out, lse, delta)
        dq, dk, dv = SMALL.backward(rows, k, v, causal=True, scale=0.25)
    hold(task, Results(out, lse, dq, dk, dv), (q, k, v, dout))


def _in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the same tensor, stored with its axes in another order."""
    back = tuple(order.index(axis) for axis in range(4))
    return x.permute(order).contiguous().permute(back)


def own_scale() -> None:
    """A scale that is not D^−½, and a negative scale, give right results."""
    for scale in (0.7, -0.4):
        right(Task(S=40, H=1, K=1, scale=scale))


def large_float16() -> None:
    """Float16 is right with scores beyond 65504, its largest number, before the scale makes them small.

    If q and k grow by 16 and the scale shrinks accordingly, no bit of out, lse and dv changes.
    """
    small = Task(S=48, D=64, H=1, K=1, dtype=torch.float16)
    q, k, v, dout = small.tensors(size=4.0)
    large = Task(**{**vars(small), "scale": 64**-0.5 / 256})
    assert (q.float() * 16 @ (k.float() * 16).mT).abs().max() > 65504
    before, after = attend(small, (q, k, v, dout)), attend(large, (q * 16, k * 16, v, dout))
    hold(small, before, (q, k, v, dout))
    # q and k are 16 times as large, so their gradients are a sixteenth.
    grown = after._replace(dq=after.dq.float() * 16, dk=after.dk.float() * 16)
    hold(small, grown, (q, k, v, dout))
    for name in ("out", "lse", "dv"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name


def large_products_float16() -> None:
    """Float16 is right with dO·Vᵀ beyond its largest number, 65504; weights of about 1/64 make dS small.

    The results are divided by the factor of 256 in v and in dout. The factor changes no bit, except where
    numbers near 0 lose some.
    """
    small = Task(S=64, H=1, K=1, causal=False, dtype=torch.float16)
    q, k, v, dout = small.tensors(size=0.25)
    assert (dout.float() * 256 @ (v.float() * 256).mT).abs().max() > 65504
    found = attend(small, (q, k, v * 256, dout * 256))
    factors = {"out": 256, "lse": 1, "dq": 256**2, "dk": 256**2, "dv": 256}
    shrunk = Results(*(getattr(found, name).float() / factors[name] for name in NAMES))
    hold(small, shrunk, (q, k, v, dout))


def carried_in_float32() -> None:
    """Eight steps of 16 keys give the bfloat16 bits of one step over all keys, except for rare ties.

    Values carried in float32 are rounded to bfloat16 once, at the end. Two float32 numbers a few units apart
    round to different bfloat16 numbers if a boundary is between them. There is one boundary in 2¹⁶ units, so
    this happens to about one number in 2¹⁴. Numbers that were rounded on the way differ far more often.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, 32, generator=draw).bfloat16() for n in (45, 128, 128, 45))
    whole, parts = _in_steps(q, k, v, dout, 1), _in_steps(q, k, v, dout, 8)
    for name in ("out", "dq", "dk", "dv"):
        one, other = (getattr(results, name).bfloat16() for results in (whole, parts))
        share = (one != other).float().mean().item()
        assert share < 0.02, f"{name}: {share:.1%} of all numbers are others in eight steps"
    assert (whole.lse - parts.lse).abs().max() <= 1e-6 * whole.lse.abs().max()


def _in_steps(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, count: int) -> Results:
    """Return the results of `count` steps, each over an equal part of the keys. Nothing is masked."""
    keys, scale = k.shape[2] // count, q.shape[3] ** -0.5
    tile = (Tile(0, q.shape[2], 0, keys, False),)
    blocks = list(zip(k.split(keys, dim=2), v.split(keys, dim=2), strict=True))
    with poisoned():
        steps = SMALL.begin_forward(q, count, scale=scale)
        for block in blocks:
            steps.attend(tile, *block)
        partial = steps.partial()
        out, lse = partial.out, partial.lse
        delta = (dout.float() * out.float()).sum(-1)
        back = SMALL.begin_backward(BackwardRows(dout, q, out, lse, delta), count, scale=scale)
        added = [gradient for block in blocks for gradient in back.differentiate(tile, *block)]
    dk, dv = (torch.cat([getattr(each, name) for each in added], dim=2) for name in ("dk", "dv"))
    assert dk.dtype == dv.dtype == torch.float32, "they are added to those of other rows"
    return Results(out, lse, back.query_gradient(), dk, dv)


def exact_scores() -> None:
    """Whole numbers in bfloat16 make exact scores, so the error of lse is float32's and not bfloat16's."""
    task = Task(S=70, H=1, K=1, D=32, dtype=torch.bfloat16, scale=0.3)
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-8, 9, (1, 1, 70, 32), generator=draw).bfloat16() for _ in range(2))
    _, _, v, dout = task.tensors()
    lse = attend(task, (q, k, v, dout)).lse
    true = truth(q, k, v, dout, causal=True, scale=0.3).lse
    assert (lse - torch.from_numpy(true)).abs().max() <= 4e-6 * abs(true).max()


def rows_that_see_nothing() -> None:
    """Row 0 and rows 20 to 39 see no key: out and dq are 0, lse is −inf, dk and dv get nothing from them.

    Row 0 shares a program with rows that see some keys.
    """
    q, k, v, dout = Task(S=50, H=1, K=1).tensors()
    tiles, scale = (Tile(1, 20, 0, 19, True), Tile(40, 50, 0, 50, False)), 0.25
    with poisoned():
        steps = SMALL.begin_forward(q, len(tiles), scale=scale)
        for tile in tiles:
            steps.attend((tile,), k, v)
        partial = steps.partial()
        out, lse = partial.out, partial.lse
        rows = BackwardRows(dout, q, out, lse, (dout * out).sum(-1))
        back = SMALL.begin_backward(rows, len(tiles), scale=scale)
        added = [gradient for tile in tiles for gradient in back.differentiate((tile,), k, v)]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for each in added:
        dk[:, :, each.keys] += each.dk
        dv[:, :, each.keys] += each.dv
    found = Results(out, lse, back.query_gradient(), dk, dv)
    wanted = Results(*(torch.zeros_like(x) for x in (q, lse, q, k, v)))
    wanted.lse.fill_(-torch.inf)
    for tile in tiles:
        q_of, k_of = (..., tile.rows, slice(None)), (..., tile.keys, slice(None))
        part = truth(q[q_of], k[k_of], v[k_of], dout[q_of], causal=tile.causal, scale=scale)
        wanted.lse[..., tile.rows] = torch.from_numpy(part.lse)
        for name, place in (("out", q_of), ("dq", q_of), ("dk", k_of), ("dv", k_of)):
            getattr(wanted, name)[place] += torch.from_numpy(getattr(part, name))
    for name, error in errors(found, Results(*(oracle.float64(x) for x in wanted))).items():
        assert error <= 2e-6, f"{name}: {error}"  # allows for a few roundings of float32
    for unseen in (slice(0, 1), slice(20, 40)):
        assert (out[:, :, unseen] == 0).all() and (back.query_gradient()[:, :, unseen] == 0).all()


def capped_ring() -> None:
    """A cap near many scores is right, and so is one that changes little under a negative scale."""
    right(Task(S=70, D=24, H=1, K=1, P=2, softcap=0.8))
    right(Task(S=40, H=1, K=1, scale=-0.4, softcap=300.0))


def capped_full_ring() -> None:
    """A soft cap is right in tiles without a mask and in a ring of three steps, one of which is in the middle."""
    right(Task(S=123, P=3, H=1, K=1, causal=False, layout="contiguous", softcap=0.8))


def dropping_ring() -> None:
    """Dropout is right with two batches, two query heads of one key/value head, and two steps."""
    right(Task(S=24, B=2, H=2, K=1, P=2, dropout=0.4))


def dropping_long_ring() -> None:
    """Dropout is right in tiles with and without a mask, if the tiles' positions form two runs."""
    right(Task(S=110, H=1, K=1, P=2, dropout=0.4))


def the_same_pairs() -> None:
    """The kernels drop exactly the pairs that `ringlab.scores` drops, bit for bit.

    v is the identity, so out shows the factor of each of the 16 keys. The positions are beyond 2^30, the
    heads start at the third, and the seed has 64 bits. Backward drops the same pairs as the naive block.
    """
    scores = ScoreRules(dropout=0.5, seed=2**64 - 2**33 + 5, first_head=2)
    rules = scores.of_tile(np.arange(40) * 70_001 + 2**30, np.arange(16) * 100_003 + 2**29)
    expected = rules.dropout_factors(2, 5, torch.zeros(1))
    assert expected is not None
    q, k, v = torch.zeros(2, 5, 40, 16), torch.zeros(2, 5, 16, 16), torch.eye(16).expand(2, 5, 16, 16)
    with poisoned():
        out = SMALL.forward(q, k, v, causal=False, scale=1.0, rules=rules).out
    assert torch.equal(out != 0, expected != 0)
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 5, n, 16, generator=draw) for n in (40, 16, 16, 40))
    lse, delta = torch.full((2, 5, 40), 3.0), torch.zeros(2, 5, 40)
    found, right = (
        block.backward(BackwardRows(dout, q, dout, lse, delta), k, v, causal=False, scale=0.25, rules=rules)
        for block in (SMALL, Naive())
    )
    for one, other in zip(found, right, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()  # allows for a few roundings of float32


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        causal_ring,
        full_ring,
        window_ring,
        batches,
        stored_otherwise,
        own_scale,
        large_float16,
        large_products_float16,
        carried_in_float32,
        exact_scores,
        rows_that_see_nothing,
        capped_ring,
        capped_full_ring,
        dropping_ring,
        dropping_long_ring,
        the_same_pairs,
    )
}

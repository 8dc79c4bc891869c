"""`sdpa_over` is torch's own attention over a ring; `gather` undoes `shard`; the script of the guide runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ringlab import Mask, VirtualCluster, contiguous, sdpa_over, striped, zigzag
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import FACTOR
from ringlab.errors import AgreementError, GradientError, MaskError, RinglabError, ShapeError, WorldSizeError

P, S = 2, 10
LAYOUT = zigzag(S, P)


def tensors(dtype: torch.dtype, kv_heads: int = 4) -> tuple[Tensor, ...]:
    """Return whole q, k, v and dout."""
    random = torch.Generator().manual_seed(0)
    heads = (4, kv_heads, kv_heads, 4)
    return tuple(torch.randn(2, h, S, 8, generator=random, dtype=torch.float64).to(dtype) for h in heads)


def differentiated(attention: Any, whole: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in whole[:3])
    out = attention(q, k, v, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])


def over(ring: Ring, dtype: torch.dtype, mask: Mask | None, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the whole results, on every rank."""
    shards = LAYOUT.shard(tensors(dtype, 2), ring.rank)
    return LAYOUT.gather(ring, differentiated(sdpa_over(ring, LAYOUT, mask), shards, **options))


CASES: dict[str, tuple[Mask | None, dict[str, Any]]] = {
    "causal": (None, {"is_causal": True, "enable_gqa": True}),
    "full, scaled": (None, {"scale": 0.3, "enable_gqa": True}),
    "a window": (Mask(window=3), {"is_causal": True, "enable_gqa": True}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_torchs_own(case: str, dtype: torch.dtype) -> None:
    """The error against float64 is at most twice that of torch's own attention in the same dtype."""
    mask, options = CASES[case]
    whole = tensors(dtype, 2)
    torchs = dict(options)
    if mask is not None:
        torchs |= {"is_causal": False, "attn_mask": torch.from_numpy(mask.visible(*[np.arange(S)] * 2))}
    true = differentiated(F.scaled_dot_product_attention, tuple(x.double() for x in whole), **torchs)
    plain = differentiated(F.scaled_dot_product_attention, whole, **torchs)
    for found in VirtualCluster(P, memory=False).run(over, dtype, mask, options).results:
        for one, other, best in zip(found, plain, true, strict=True):
            assert one.dtype == dtype
            unit = 4 * torch.finfo(dtype).eps * float(best.abs().max())
            assert (one.double() - best).abs().max() <= FACTOR * (other.double() - best).abs().max() + unit


@pytest.mark.parametrize(
    "mask, options, error, says",
    [
        (None, {"attn_mask": torch.zeros(S, S)}, MaskError, "ringlab.Mask"),
        (None, {"dropout_p": 0.1}, MaskError, "seed="),
        (Mask(window=3), {}, MaskError, "is_causal=False"),
        (None, {"is_causal": True}, ShapeError, "enable_gqa=True"),
    ],
)
def test_what_a_ring_has_not_is_refused(
    mask: Mask | None, options: dict[str, Any], error: type[RinglabError], says: str
) -> None:
    def program(ring: Ring) -> Any:
        q, k, v = LAYOUT.shard(tensors(torch.float32, 2)[:3], ring.rank)
        right = {"is_causal": True, "enable_gqa": True}
        try:
            return sdpa_over(ring, LAYOUT, mask)(q, k, v, **(options if ring.rank else right))
        except RinglabError as found:
            return found

    other, refused = VirtualCluster(P, memory=False).run(program).results
    assert isinstance(other, AgreementError)
    assert isinstance(refused, error) and says in str(refused)


@pytest.mark.parametrize("layout", [contiguous(7, 3), striped(7, 3), zigzag(2, 3)], ids=repr)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_undoes_shard(layout: Any, dim: int) -> None:
    x = torch.arange(layout.S * 6).reshape(layout.S, 2, 3).movedim(0, dim)

    def program(ring: Ring) -> tuple[Tensor, Tensor]:
        mine = layout.shard((x, x.double()), ring.rank, dim)
        return layout.gather(ring, mine, dim)

    for found, other in VirtualCluster(layout.P, memory=False).run(program).results:
        assert torch.equal(found, x) and torch.equal(other, x.double())


def test_gather_refuses() -> None:
    def program(ring: Ring) -> list[type]:
        asked = [
            (zigzag(S, 3), torch.zeros(5, 1)),
            (LAYOUT, torch.zeros(S, 1)),
            (LAYOUT, torch.zeros(LAYOUT.length(ring.rank), 1, requires_grad=True)),
        ]
        found: list[type] = []
        for layout, x in asked:
            with pytest.raises(RinglabError) as raised:
                layout.gather(ring, x)
            found.append(raised.type)
        return found

    assert VirtualCluster(P).run(program).results == [[WorldSizeError, ShapeError, GradientError]] * P


def test_the_axis_that_fits_is_named() -> None:
    with pytest.raises(ShapeError, match="remedy: name the sequence axis: dim=1$"):
        LAYOUT.shard(torch.zeros(2, S), 0)
    with pytest.raises(ShapeError, match="pass the whole sequence"):
        LAYOUT.shard(torch.zeros(2, 5), 0)


GUIDE = Path(__file__).resolve().parents[2] / "docs/guide/trainer.md"
SCRIPT = re.search(r"```py\n(# trainer\.py.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.thorough
def test_the_script_of_the_guide(tmp_path: Path) -> None:
    """The script prints falling losses, which are the same on two processes as on one."""
    assert SCRIPT is not None
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT[1], encoding="utf-8")
    two, one = (losses(script, processes) for processes in (2, 1))
    assert len(two) == len(one) == 5 and two[-1] < two[0]
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(two, one, strict=True))


def losses(script: Path, processes: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(script)],
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]

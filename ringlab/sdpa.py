"""`sdpa_over`: attention over a ring with the signature of torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ringlab.arguments import CAUSAL
from ringlab.attention import ring_attention
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.errors import MaskError, RinglabError, ShapeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.rank_agreement import agree
from ringlab.schedules.protocol import Schedule
from ringlab.types import KeyValue, Query


class Sdpa(Protocol):
    """Attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    def __call__(
        self,
        query: Query,
        key: KeyValue,
        value: KeyValue,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Query:
        """Return this rank's rows of attention over the whole sequence."""
        ...


def sdpa_over(
    ring: Ring,
    layout: Layout,
    mask: Mask | None = None,
    *,
    schedule: str | Schedule = "ring",
    block: str | Block = "auto",
    validate: bool = True,
) -> Sdpa:
    """Return a function that a model can call on shards in place of torch's `scaled_dot_product_attention`.

    mask: a mask with packed documents, a window or a prefix. Without a mask, only `is_causal` decides.
    schedule, block, validate: as in `ring_attention`.

    Raises: nothing here. The returned function raises the errors of `ring_attention`, on every rank. It also
    raises MaskError for `attn_mask`, `dropout_p`, or an `is_causal` that contradicts the mask, and ShapeError
    for grouped heads without `enable_gqa`.

    >>> import torch
    >>> from ringlab import VirtualCluster, zigzag
    >>> layout, x = zigzag(8, 2), torch.randn(1, 2, 8, 4)
    >>> def program(ring):
    ...     attention, shard = sdpa_over(ring, layout), layout.shard(x, ring.rank)
    ...     return layout.gather(ring, attention(shard, shard, shard, is_causal=True))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> [torch.allclose(out, expected, atol=1e-6) for out in VirtualCluster(2).run(program).results]
    [True, True]
    """

    def attention(
        query: Query,
        key: KeyValue,
        value: KeyValue,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Query:
        refusal = _refusal(query, key, mask, attn_mask, dropout_p, is_causal, enable_gqa)
        if refusal is not None:
            if validate:
                agree(ring.comm, "", refusal)
            raise refusal
        out: Tensor = ring_attention(
            query, key, value, ring=ring, layout=layout, causal=is_causal if mask is None else CAUSAL, mask=mask,
            scale=scale, schedule=schedule, block=block, validate=validate,
        )  # fmt: skip
        return out

    return attention


def _refusal(
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> RinglabError | None:
    """Return an error if an argument is valid in torch but not over a ring, or else None."""
    if attn_mask is not None:
        return MaskError("attn_mask=None", type(attn_mask).__name__, "sdpa_over(..., mask=ringlab.Mask(...))")
    if dropout_p:
        return MaskError(
            "dropout_p=0.0",
            str(dropout_p),
            "ring_attention(..., dropout=, seed=): only a seed gives all ranks the same random numbers",
        )
    if mask is not None and mask.causal != is_causal:
        return MaskError(f"is_causal={mask.causal}, as in the mask", f"is_causal={is_causal}")
    if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
        got = f"{query.shape[1]} and {key.shape[1]}"
        return ShapeError("as many key/value heads as query heads", got, "enable_gqa=True for grouped heads")
    return None

"""`context`: the ring, layout and mask for the forward of models, in the thread that enters the context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import LayoutError
from ringlab.hf.held import HELD, Held
from ringlab.hf.models import check_attended, looked_at
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn.context import Context

TESTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss", "deepseek_v3")
"""Model types whose loss and gradients were compared with those of one process."""


@contextmanager
def context(
    ring: Ring,
    layout: Layout,
    mask: Mask | None = None,
    *,
    schedule: str = "ring",
    block: str | Block = "auto",
    validate: bool = True,
    seed: int | None = None,
    models: tuple[str, ...] = (),
) -> Iterator[Context]:
    """Yield the context in which this thread's models spread their sequence over `ring`, for `shard_batch`.

    Only forward must run inside the block. Each layer keeps its context for backward and for activation
    checkpointing.
    mask: packed documents or a prefix, which a model's config cannot express. The config sets windows, layer
    by layer.
    schedule, block, validate: as in `ring_attention`.
    seed: the seed of attention dropout. Use another seed in every step.
    models: model types beyond TESTED that may run, such as ("olmo2",). Their tokens must interact only in
    attention. Convolutions, poolers and batch norms raise an error, but any other sum over the sequence would
    silently cover only the shard.

    Raises: before any data moves, AgreementError, WorldSizeError or MaskError, as `Context.agreed`, and
    LayoutError if a rank has no token; at the end of the block, BackendError if models ran but none of their
    layers attended over the ring.

    >>> from ringlab import VirtualCluster, hf, zigzag
    >>> def program(ring):
    ...     with hf.context(ring, zigzag(8, 2)) as around:
    ...         return around.positions.tolist()  # here model(**hf.shard_batch(around, input_ids)) runs over the ring
    >>> VirtualCluster(2).run(program).results
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_ring(ring)
    make = Context.agreed if validate else Context
    made = make(ring, layout, mask=mask, schedule=schedule, block=block, validate=validate)
    if min(layout.lengths) == 0:
        raise LayoutError(
            "a layout that gives every rank a token, because transformers models reject empty batches",
            f"{layout!r}: {layout.lengths.count(0)} ranks without tokens",
            "fewer ranks, or longer sequences",
        )
    held = Held(made, seed, models)
    token = HELD.set(held)
    try:
        with looked_at():
            yield held.context
        check_attended(held)
    finally:
        HELD.reset(token)

"""`context`: what a model's forward runs under, known to the rank that entered it and to no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.errors import LayoutError
from ringlab.hf.heads import looked_at
from ringlab.hf.held import HELD, Held
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn.context import Context

TESTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
"""Model types that were compared with one process, loss and gradients."""


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
    """Run the models of this thread with their sequence spread over `ring`; yields what `shard_batch` needs.

    Only forward has to lie inside: each layer keeps the context that it ran under, for backward and for
    activation checkpointing. `mask` says what a config cannot: packed documents, a prefix. Windows are the
    config's to say, layer by layer. `schedule`, `block` and `validate` are those of `ring_attention`.
    `models`: model types beyond TESTED that may run, such as ("olmo2",). Their tokens must meet in attention and
    nowhere else: no convolution, no recurrence, no statistics over the sequence, for those stay within a shard.

    Raises: AgreementError, WorldSizeError, MaskError before any data moves, as `Context.agreed`; LayoutError where a
    rank has no token.
    """
    make = Context.agreed if validate and isinstance(ring, Ring) else Context
    made = make(ring, layout, mask=mask, schedule=schedule, block=block)
    if min(layout.lengths) == 0:
        raise LayoutError(
            "a layout that gives every rank a token, for models of transformers take no empty batch",
            f"{layout!r}: {layout.lengths.count(0)} ranks without any",
            "fewer ranks, or longer sequences",
        )
    held = Held(made, validate, seed, models)
    token = HELD.set(held)
    try:
        with looked_at():
            yield held.context
    finally:
        HELD.reset(token)

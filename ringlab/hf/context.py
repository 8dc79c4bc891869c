"""`context`: the ring, layout and mask of a model's forward, known only to the thread that entered it.

Heads and losses on top of a model may run on a shard only if they treat each token by itself; others are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from ringlab.agreement import agree
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import BackendError, LayoutError, RinglabError, TrainingError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn.context import Context


class Held:
    """A Context, with the options that only models of transformers need.

    called: a model that ran under it. attended: whether a layer of any model computed its attention over the ring.
    """

    def __init__(self, context: Context, seed: int | None, models: tuple[str, ...]) -> None:
        self.context, self.seed, self.models = context, seed, models
        self.called: PreTrainedModel | None = None
        self.attended = False


HELD: ContextVar[Held] = ContextVar("ringlab.hf")


def held_or_none() -> Held | None:
    """Return what `context` holds for this thread, None outside of it."""
    return HELD.get(None)


def held() -> Held:
    """Return what `context` holds for this thread. Raises: BackendError outside of it."""
    found = held_or_none()
    if found is None:
        raise BackendError(
            "a ring for attn_implementation='ringlab'",
            "a forward outside of ringlab.hf.context",
            "with ringlab.hf.context(ring, layout): model(**batch); or model.set_attn_implementation('sdpa')",
        )
    return found


def raise_everywhere(around: Held, error: RinglabError | None, device: torch.device) -> None:
    """Return if no rank has an error.

    All ranks must call this, or, if they have no error, make another agreement on the same ring, such as that of
    `ring_attention`.

    Raises: `error` on this rank if there is one; AgreementError if another rank has one.
    """
    context = around.context
    if context.validate:
        agree(context.ring.comm, "" if error else "loss", error, "cpu" if device.type == "meta" else device)
    if error is not None:
        raise error


PER_TOKEN = ("Model", "ForCausalLM")
"""The endings of transformers' classes whose output for a token depends on no other token outside attention."""
_GUARDED = "ringlab_guards_it"


def _refused(model: PreTrainedModel) -> str | None:
    """Return the name of transformers' class if the model combines tokens, else None."""
    name = next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    return None if name.endswith(PER_TOKEN) else name


def _look(module: nn.Module, _: Any) -> None:
    if isinstance(module, PreTrainedModel):
        _look_at_model(module)


@torch.compiler.disable
def _look_at_model(model: PreTrainedModel) -> None:
    around, name = held_or_none(), _refused(model)
    if around is None:
        return
    around.called = model
    if name is None:
        return
    error = BackendError(
        f"a model whose class ends in {' or '.join(PER_TOKEN)}: its head looks at each token by itself",
        name,
        "run its base model over the ring, and let the ranks agree on what is pooled: the last token is on one of them",
    )
    raise_everywhere(around, error, next(model.parameters()).device)


@contextmanager
def looked_at() -> Iterator[None]:
    """Check every model that is called inside. Raises: BackendError there for a head that combines tokens."""
    handle = register_module_forward_pre_hook(_look)
    try:
        yield
    finally:
        handle.remove()


def _check_attended(around: Held) -> None:
    """Raise BackendError if a model ran, none of whose layers computed attention over the ring."""
    model = around.called
    if model is None or around.attended:
        return
    error = BackendError(
        "attention over the ring in a model that runs in ringlab.hf.context",
        f"{type(model).__name__} with attn_implementation={model.config._attn_implementation!r}, which saw this rank's tokens alone",
        "model.set_attn_implementation('ringlab')",
    )
    raise_everywhere(around, error, next(model.parameters()).device)


def guard_the_loss() -> None:
    """Make transformers' next-token loss refuse labels that it would shift inside a shard; further calls do nothing."""
    loss: Any = LOSS_MAPPING["ForCausalLM"]
    if hasattr(loss, _GUARDED):
        return
    guarded = _guarded(loss)
    setattr(guarded, _GUARDED, True)
    LOSS_MAPPING.update({name: guarded for name, known in LOSS_MAPPING.items() if known is loss})


def _guarded(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.compiler.disable
    @wraps(loss)
    def of_a_shard(*args: Any, **named: Any) -> Tensor:
        around = held_or_none()
        if around is not None and around.context.ring.world_size > 1:
            error = _unshifted() if named.get("shift_labels") is None else None
            raise_everywhere(around, error, (args[0] if args else named["logits"]).device)
        return loss(*args, **named)

    return of_a_shard


def _unshifted() -> TrainingError:
    return TrainingError(
        "labels that were shifted before the sequence was cut",
        "labels that the model would shift inside a shard",
        "ringlab.hf.shard_batch(context, input_ids, labels=labels) returns both",
    )


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
    """Yield the context, which `shard_batch` takes, in which this thread's models spread their sequence over `ring`.

    Only forward has to run inside: each layer keeps its context for backward and for activation checkpointing.
    mask: packed documents or a prefix, which a model's config cannot express. The config sets windows, layer by layer.
    schedule, block, validate: as in `ring_attention`.
    seed: for attention dropout; use another one in every step.
    models: model types beyond TESTED that may run, such as ("olmo2",). Attention must be the only place in which their
    tokens interact: convolutions, recurrences and statistics over the sequence would stay within a shard.

    Raises: AgreementError, WorldSizeError or MaskError before any data moves, as `Context.agreed`; LayoutError if a
    rank has no token; on leaving, BackendError if models ran in it and none of their layers attended over the ring.

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
            f"{layout!r}: {layout.lengths.count(0)} ranks without any",
            "fewer ranks, or longer sequences",
        )
    held = Held(made, seed, models)
    token = HELD.set(held)
    try:
        with looked_at():
            yield held.context
        _check_attended(held)
    finally:
        HELD.reset(token)

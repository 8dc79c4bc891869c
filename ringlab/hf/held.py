"""What `ringlab.hf.context` holds for the thread that entered it, and errors that must reach every rank."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from transformers import PreTrainedModel

from ringlab.errors import BackendError, RinglabError
from ringlab.nn.context import Context
from ringlab.rank_agreement import agree


class Held:
    """A Context, with the options that only models of transformers need.

    called: a model that ran under it. running: the model whose forward runs, of which others are parts. attended: whether a
    layer of any model computed its attention over the ring. shared: whether the running model's loss is this rank's share.
    padded: whether the latest batch has padding, which only a causal mask hides.
    """

    def __init__(self, context: Context, seed: int | None, models: tuple[str, ...]) -> None:
        self.context, self.seed, self.models = context, seed, models
        self.called: PreTrainedModel | None = None
        self.running: PreTrainedModel | None = None
        self.attended = self.shared = self.padded = False


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

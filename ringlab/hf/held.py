"""The context of a model's forward, known only to the thread that entered `ringlab.hf.context`."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from ringlab.agreement import agree
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, RinglabError
from ringlab.nn.context import Context


class Held:
    """A Context, with the options that only models of transformers need."""

    def __init__(self, context: Context, validate: bool, seed: int | None, models: tuple[str, ...]) -> None:
        self.context, self.validate, self.seed, self.models = context, validate, seed, models


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
    ring = around.context.ring
    if around.validate and isinstance(ring, Ring):
        agree(ring.comm, "" if error else "loss", error, device)
    if error is not None:
        raise error

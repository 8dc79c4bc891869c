"""What a model's forward runs under, known to the thread that entered `ringlab.hf.context` and to no other."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from ringlab.agreement import agree
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, RinglabError
from ringlab.nn.context import Context


class Held:
    """A Context, and what only models of transformers need to know."""

    def __init__(self, context: Context, validate: bool, seed: int | None, models: tuple[str, ...]) -> None:
        self.context, self.validate, self.seed, self.models = context, validate, seed, models


HELD: ContextVar[Held] = ContextVar("ringlab.hf")


def held_or_none() -> Held | None:
    """Return what this thread runs under, None outside of `context`."""
    return HELD.get(None)


def held() -> Held:
    """Return what this thread runs under. Raises: BackendError outside of `context`."""
    found = held_or_none()
    if found is None:
        raise BackendError(
            "a ring for attn_implementation='ringlab'",
            "a forward outside of ringlab.hf.context",
            "with ringlab.hf.context(ring, layout): model(**batch); or model.set_attn_implementation('sdpa')",
        )
    return found


def raise_everywhere(around: Held, error: RinglabError | None, device: torch.device) -> None:
    """Raise `error`, if there is one, on this rank, and AgreementError on those that have none.

    All ranks come here, or those without an error to an agreement of their own on the same ring, as `ring_attention`'s.
    """
    ring = around.context.ring
    if around.validate and isinstance(ring, Ring):
        agree(ring.comm, "" if error else "loss", error, device)
    if error is not None:
        raise error

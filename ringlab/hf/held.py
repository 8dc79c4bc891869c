"""The state of `ringlab.hf.context` for the thread that entered it, and how an error reaches all ranks."""

from __future__ import annotations

from contextvars import ContextVar

from transformers import PreTrainedModel

from ringlab.errors import BackendError, RinglabError
from ringlab.nn.context import Context
from ringlab.rank_agreement import agree


class Held:
    """A Context, with options and a state that only models of transformers need.

    called: a model that ran in the context. running: the outermost model whose forward is running. attended:
    whether a layer of any model computed attention over the ring. shared: whether the running model's loss is
    this rank's share. padded: whether the latest batch has padding, which only a causal mask hides.
    """

    def __init__(self, context: Context, seed: int | None, models: tuple[str, ...]) -> None:
        self.context, self.seed, self.models = context, seed, models
        self.called: PreTrainedModel | None = None
        self.running: PreTrainedModel | None = None
        self.attended = self.shared = self.padded = False


HELD: ContextVar[Held] = ContextVar("ringlab.hf")


def held_or_none() -> Held | None:
    """Return the state of the context that this thread has entered, or None outside a context."""
    return HELD.get(None)


def held() -> Held:
    """Return the state of the context that this thread has entered.

    Raises: BackendError outside a context.
    """
    found = held_or_none()
    if found is None:
        raise BackendError(
            "a ring for attn_implementation='ringlab'",
            "a forward outside of ringlab.hf.context",
            "with ringlab.hf.context(ring, layout): model(**batch); or model.set_attn_implementation('sdpa')",
        )
    return found


def raise_everywhere(around: Held, error: RinglabError | None) -> None:
    """Raise `error`, if there is one, and make the other ranks raise an error too.

    A rank with an error must call this function. A rank without an error must call it too, or make another
    agreement on the same ring, for example by calling `ring_attention`.

    Raises: `error` on this rank if there is one; AgreementError if another rank has one.
    """
    context = around.context
    if context.validate:
        agree(context.ring.comm, "" if error else "loss", error)
    if error is not None:
        raise error

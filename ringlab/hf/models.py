"""Checks that a model may run on a shard: its tokens must interact only in attention over the ring.

A model is checked when it is made with attn_implementation="ringlab", when one of its modules is called, and
when it returns. Its loss is checked where transformers computes it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from ringlab.errors import BackendError, DeviceError, RinglabError, TrainingError
from ringlab.hf.held import Held, held_or_none, raise_everywhere

NAME = "ringlab"
PER_TOKEN = ("Model", "ForCausalLM", "ForMaskedLM", "ForTokenClassification", "Encoder", "Decoder")
"""The endings of transformers' classes whose output for a token depends on no other token outside attention."""
ALONE = "run it on one process, with attn_implementation='eager'"
_GUARDED = "ringlab_guards_it"
_OVER_TOKENS = (nn.RNNBase, batchnorm._BatchNorm, instancenorm._InstanceNorm)


def guard_the_attention() -> None:
    """Make transformers refuse attn_implementation="ringlab" for models that compute attention themselves.

    Raises: nothing itself; BackendError later, when such a model is made.
    """
    check: Any = PreTrainedModel._check_and_adjust_attn_implementation
    if hasattr(check, _GUARDED):
        return

    @wraps(check)
    def checked(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **named: Any) -> str:
        if attn_implementation == NAME and attends_by_itself(type(self)):
            raise _own_attention(type(self).__name__)
        return check(self, attn_implementation, *args, **named)

    setattr(checked, _GUARDED, True)
    PreTrainedModel._check_and_adjust_attn_implementation = checked  # type: ignore[method-assign]


def attends_by_itself(kind: type[PreTrainedModel]) -> bool:
    """Return whether a class of transformers has attention layers that do not use AttentionInterface."""
    module = vars(sys.modules.get(kind.__module__, sys))
    tables = (table for table in module.values() if isinstance(table, dict) and "eager" in table)
    follows = (
        getattr(kind, "_supports_attention_backend", False)
        or getattr(kind, "_can_set_attn_implementation", lambda: True)()
    )
    return not follows or any(NAME not in table for table in tables)


def _own_attention(name: str) -> BackendError:
    return BackendError(
        "a model whose layers take their attention from transformers' AttentionInterface",
        f"{name}, whose layers compute attention themselves",
        ALONE,
    )


@contextmanager
def looked_at() -> Iterator[None]:
    """Check every model that is called inside the block.

    The call raises BackendError for a model that combines tokens outside attention, and DeviceError for one
    whose parameters have no data.
    """
    handles = (
        register_module_forward_pre_hook(_before),
        register_module_forward_hook(_after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(module: nn.Module, _: Any) -> None:
    if isinstance(module, PreTrainedModel):
        _begin(module)
    if (got := _over_tokens(module)) is not None:
        _refuse(got)


def _after(module: nn.Module, _: Any, output: Any) -> None:
    if isinstance(module, PreTrainedModel):
        _end(module, output)


@torch.compiler.disable
def _begin(model: PreTrainedModel) -> None:
    around = held_or_none()
    if around is None or around.running is not None:  # no context, or a part of the running model
        return
    around.running, around.shared = model, False
    if (error := _refusal(model)) is not None:
        raise_everywhere(around, error)
    around.called = model


def _refusal(model: PreTrainedModel) -> RinglabError | None:
    """Return the error for a model that cannot run on a shard according to its class and config, or None."""
    kind: Any = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    name, config = kind.__name__, model.config
    if any(weight.is_meta for weight in model.parameters()):
        return DeviceError(
            "parameters with data",
            f"{name} on the device meta",
            "model.to_empty(device=...), and load weights",
        )
    if getattr(config, "is_encoder_decoder", False):
        return BackendError(
            "a model of one sequence, an encoder or a decoder", f"{name}, which has both", ALONE
        )
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        return BackendError(
            "a model that takes position_ids, because most ranks' tokens are not the first of the sequence",
            f"{name}, which counts the tokens that it is given",
            ALONE,
        )
    if not name.endswith(PER_TOKEN):
        return BackendError(
            f"a class whose head treats each token separately, with a name that ends in {', '.join(PER_TOKEN)}",
            name,
            "run its base model over the ring, and apply the head to the hidden states of all ranks",
        )
    return None


@torch.compiler.disable
def _refuse(got: tuple[str, str, str]) -> None:
    around = held_or_none()
    if around is not None:
        raise_everywhere(around, BackendError(*got))


def _over_tokens(module: nn.Module) -> tuple[str, str, str] | None:
    """Return needed, got and remedy if a module combines or counts tokens, or else None.

    The module's children are checked as well, because it may use them without calling them.
    """
    owner = type(module).__name__
    if "Pool" in owner:
        return (
            _MIXED,
            owner,
            "make the model without it, for example by add_pooling_layer=False, and pool over the ranks",
        )
    for name, child in (("", module), *module._modules.items()):
        if isinstance(child, conv._ConvNd) and any(size != 1 for size in child.kernel_size):
            return _MIXED, f"a {type(child).__name__} over {child.kernel_size} in {owner}", ALONE
        if isinstance(child, _OVER_TOKENS):
            return _MIXED, f"a {type(child).__name__} in {owner}", ALONE
        if isinstance(child, nn.Embedding) and "position" in name and child.padding_idx is not None:
            first = f"positions from {child.padding_idx + 1} in {owner}, padding_idx + 1"
            return "positions that begin at 0, as ringlab.hf.shard_batch gives them", first, ALONE
    return None


_MIXED = "a model whose tokens meet in attention alone"


@torch.compiler.disable
def _end(model: PreTrainedModel, output: Any) -> None:
    around = held_or_none()
    if around is None or around.running is not model:
        return
    around.running = None
    if output is None:  # the forward raised an error
        return
    loss, others = _parts(output)
    length = around.context.layout.length(around.context.ring.rank)
    for name, x in others:
        if x.is_floating_point() and (x.ndim < 3 or x.shape[1] != length):
            error: RinglabError = BackendError(
                f"outputs (batch, {length}, features), one for each token",
                f"{name} of shape {tuple(x.shape)} from {type(model).__name__}: tokens combined within the shard",
                "make the model without it, for example by add_pooling_layer=False, and combine the last hidden "
                "states over the ranks",
            )
            raise_everywhere(around, error)
    if loss is not None and not around.shared and around.context.ring.world_size > 1:
        raise_everywhere(around, _own_loss(type(model).__name__))


def _parts(output: Any) -> tuple[Tensor | None, list[tuple[str, Tensor]]]:
    """Return the loss of a model's output, or None, and the other tensors by name."""
    named = dict(output.items() if hasattr(output, "items") else enumerate(_tuple(output)))
    first = named.get("loss", named.get(0))
    loss = named.pop("loss", None) if hasattr(output, "items") else None
    if loss is None and isinstance(first, Tensor) and first.ndim == 0:
        loss = named.pop(0)
    tensors = [(str(name), x) for name, each in named.items() for x in _tuple(each) if isinstance(x, Tensor)]
    return loss, tensors


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def check_attended(around: Held) -> None:
    """Raise BackendError if a model ran but none of its layers computed attention over the ring."""
    model = around.called
    if model is None or around.attended:
        return
    name, asked = type(model).__name__, model.config._attn_implementation
    if attends_by_itself(type(model)):
        error = _own_attention(name)
    elif asked == NAME:
        error = BackendError(
            "layers of attention over the ring, in a model that runs in ringlab.hf.context",
            f"{name}, none of whose layers called it: tokens interacted, if at all, only within this rank's shard",
            ALONE,
        )
    else:
        error = BackendError(
            "attention over the ring in a model that runs in ringlab.hf.context",
            f"{name} with attn_implementation={asked!r}, which saw only this rank's tokens",
            "model.set_attn_implementation('ringlab')",
        )
    raise_everywhere(around, error)


def guard_the_loss() -> None:
    """Make transformers' next-token loss raise an error for labels that it would shift inside a shard.

    Further calls do nothing.
    """
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
            given = (
                named.get("shift_labels"),
                named.get("num_items_in_batch", args[3] if len(args) > 3 else None),
            )
            error = _unshifted() if any(x is None for x in given) else None
            raise_everywhere(around, error)
            around.shared = True
        return loss(*args, **named)

    return of_a_shard


_BY_HAND = "ringlab.nn.loss_share(model(**batch).logits, labels, ringlab.nn.valid_tokens(labels, ring))"


def _unshifted() -> TrainingError:
    return TrainingError(
        "labels that were shifted before the sequence was cut, and the number that counts on all ranks",
        "labels that the model would shift inside a shard, or count there",
        "ringlab.hf.shard_batch(context, input_ids, labels=labels) returns all three; for a model that drops them, take them "
        f"out of the batch as labels: {_BY_HAND}",
    )


def _own_loss(name: str) -> TrainingError:
    return TrainingError(
        "transformers' own next-token loss, the only one that ringlab.hf divides by the number of labels on all ranks",
        f"another loss of {name}, over this rank's tokens",
        f"call shard_batch without labels; labels = context.shard(labels), and {_BY_HAND}",
    )

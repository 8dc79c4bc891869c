"""Reads the mask that a layer of transformers needs, part by part. An unknown part raises an error.

transformers describes a mask by a function of (batch, head, query, key), which is composed of a few known
functions. Evaluating this function would need the matrix that context parallelism avoids. The function is
therefore taken apart instead, into causal, sliding window and packed documents. For any other part the layer
raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import masking_utils

from ringlab.errors import BackendError, MaskError, RinglabError
from ringlab.hf.context import TESTED
from ringlab.hf.held import Held, held, raise_everywhere
from ringlab.hf.models import ALONE
from ringlab.mask import Mask

_ID = torch.zeros(1, 1, dtype=torch.long)
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_ID).__code__
# Not every supported version of transformers has these functions.
_ALL = getattr(masking_utils, "bidirectional_mask_function", None)
_REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _REMAP(masking_utils.causal_mask_function, _ID).__code__ if _REMAP else None
GENERATION = (
    "generate outside of ringlab.hf.context, after model.set_attn_implementation('sdpa'): "
    "ringlab.hf runs no generation, and no cache (use_cache=False)"
)
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def unpadded(causal: bool) -> str:
    """Return the remedy for padding that tokens would see."""
    return (
        "make one row without padding: packing = ringlab.packing.Packing.of_batch(batch); packing.pack(input_ids), in "
        f"ringlab.hf.context(ring, packing.layout('per_document', P), packing.mask({'' if causal else 'causal=False'}))"
    )


class LayerMask:
    """The `attention_mask` of layers under ringlab: the context, and the config's part of the mask.

    The class is neither a dataclass nor a tensor, so wrappers that inspect a layer's arguments pass it on
    unchanged. A model that computes with the mask, instead of passing it to attention, gets an error.
    """

    def __init__(self, held: Held, causal: bool, window: int | None, error: RinglabError | None) -> None:
        self.held, self.causal, self.window, self.error = held, causal, window, error
        self.checked: Tensor | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise MaskError, because the mask was passed to a function of torch."""
        given = [*args, *(kwargs or {}).values()]
        next(x for x in given if isinstance(x, LayerMask))._refuse(
            getattr(function, "__name__", str(function))
        )

    def __getattr__(self, name: str) -> Any:
        """Raise MaskError for an attribute that a tensor has but this mask does not."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        self._refuse(name)

    def __getitem__(self, _: Any) -> None:
        """Raise MaskError, because the mask cannot be indexed."""
        self._refuse("slicing")

    def to(self, *_: Any, **__: Any) -> LayerMask:
        """Return the mask itself.

        Wrappers call this method to move all arguments of a layer to its device.
        """
        return self

    def _refuse(self, use: str) -> NoReturn:
        model = type(self.held.running).__name__
        error = self.error or MaskError(
            "layers that hand their mask to attention as it is", f"{model}, which uses it ({use})", ALONE
        )
        raise_everywhere(self.held, error)
        raise error

    def mask(self) -> Mask:
        """Return the mask of a layer, in global positions.

        Raises: the error that reading the config's mask gave, or MaskError if it contradicts the context's
        mask.
        """
        if self.error is not None:
            raise self.error
        if self.held.padded and not self.causal:
            raise MaskError(
                "no padding in a model that is not causal, in which every token would see it",
                "attention_mask with padding, in ringlab.hf.shard_batch",
                unpadded(causal=False),
            )
        mask = self.held.context.mask or Mask(causal=self.causal)
        if mask.causal != self.causal:
            raise MaskError(
                f"a mask with causal={self.causal}, as the model's layers need",
                f"causal={mask.causal} in ringlab.hf.context",
                "give config.is_causal and the mask's causal= the same value",
            )
        if mask.window not in (None, self.window):
            raise MaskError(
                f"the window of the model's config, {self.window}",
                f"window={mask.window} in ringlab.hf.context",
                "leave window= out, because the config sets it for each layer (sliding_window, layer_types)",
            )
        if self.window is not None and not self.causal:
            raise MaskError(
                "a causal sliding window",
                "a sliding window that is not causal",
                "transformers defines the edge of such a window differently",
            )
        return replace(mask, window=self.window)

    def check_positions(self, ids: Any, layer: str) -> None:
        """Check that `ids`, the positions that a layer passed to attention, are those of this rank's tokens.

        The ids are checked once in each forward.

        Raises: MaskError unless `ids` are a tensor with equal rows; LayoutError if they are other positions.
        """
        if ids is self.checked and ids is not None:
            return
        if ids is None:
            raise MaskError(
                "position ids passed to attention, which compares them with this rank's tokens",
                f"none from {layer}",
                f"give the model ringlab.hf.shard_batch's position_ids; if layers do not pass them on, {ALONE}",
            )
        if not isinstance(ids, Tensor) or ids.ndim != 2 or bool((ids != ids[:1]).any()):
            got = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise MaskError(
                "position ids (1 or batch, tokens), alike in all rows, passed to attention",
                got,
                "give the model position_ids from ringlab.hf.shard_batch",
            )
        replace(self.held.context, position_ids=ids[0])
        self.checked = ids


@torch.compiler.disable
def layer_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Shaped[Tensor, "..."] | None = None,
    config: Any = None,
    cache_position: Int[Tensor, " q_length"] | None = None,
    **_: Any,
) -> LayerMask:
    """Return the mask that transformers needs. If it is unsupported, attention raises an error on all ranks.

    Raises: BackendError outside `ringlab.hf.context`.
    """
    if q_length is None and cache_position is not None:  # transformers 5.0 passes cache_position instead
        q_length, q_offset = len(cache_position), cache_position[0] if len(cache_position) else 0
    found = held()
    try:
        _check_model(config, found.models)
        _check_lengths(found, q_length, kv_length, int(q_offset), int(kv_offset))
        _check_padding(attention_mask)
        causal, window = read(mask_function)
    except RinglabError as error:
        return LayerMask(found, True, None, error)
    return LayerMask(found, causal, window, None)


def read(function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return (causal, window) of a mask function of transformers. Documents are read from position ids.

    Raises: MaskError for a function with any other part.
    """
    said = dict(_parts(function))
    return bool(said.get("causal")), said.get("window")


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inside = dict(zip(code.co_freevars, cells, strict=True)) if code else {}
    if function is masking_utils.causal_mask_function:
        yield "causal", True
    elif function is _ALL:
        yield "all", True
    elif code is _WINDOW:
        yield "window", int(inside["sliding_window"])
    elif code is _PACKED:
        yield "packed", True  # the caller compares these document ids with the position ids
    elif code is _AND:
        for part in inside["mask_functions"]:
            yield from _parts(part)
    elif code is _REMAPPED and code is not None:
        yield from _parts(inside["mask_function"])
    else:
        raise MaskError(
            "a mask of these parts: causal, sliding window, packed documents",
            f"a part {getattr(function, '__qualname__', repr(function))}",
            "pass an equal ringlab.Mask to ringlab.hf.context, if there is one; else run on one process",
        )


def _check_model(config: Any, models: tuple[str, ...]) -> None:
    kind = getattr(config, "model_type", None)
    if kind not in (*TESTED, *models):
        raise BackendError(
            f"a model of type {', '.join(TESTED)}",
            f"{kind!r}",
            f"if its tokens interact only in attention: ringlab.hf.context(..., models=({kind!r},))",
        )
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise BackendError("layers of full or sliding attention", ", ".join(sorted(map(str, others))), ALONE)
    if getattr(config, "output_router_logits", False):
        raise BackendError(
            "no auxiliary loss of a mixture of experts: each rank would have that of its shard",
            "output_router_logits=True in the config",
            "config.output_router_logits = False",
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        rope_type = each.get("rope_type", each.get("type"))
        if rope_type in _ROPE_BY_LENGTH:
            raise BackendError(
                "rotary frequencies that do not depend on the largest position in the input",
                f"rope_type {rope_type!r}: each rank would choose its frequencies by its own shard",
                "use default, linear, yarn or llama3",
            )


def _check_lengths(found: Held, q_length: int | None, kv_length: int, q_offset: int, kv_offset: int) -> None:
    context = found.context
    owned = context.layout.length(context.ring.rank)
    if q_length != kv_length or q_offset or kv_offset:
        raise MaskError(
            "as many keys as queries, from the first token on",
            f"{q_length} queries from {q_offset}, {kv_length} keys from {kv_offset}: a cache, or a mask longer than the input",
            GENERATION,
        )
    if q_length != owned:
        raise MaskError(
            f"the {owned} tokens that rank {context.ring.rank} owns under {context.layout!r}",
            f"{q_length} tokens",
            f"the batch from ringlab.hf.shard_batch; if generate() called the model: {GENERATION}",
        )


def _check_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is None:
        return
    if attention_mask.ndim != 2 or not bool(attention_mask.to(torch.bool).all()):
        raise MaskError(
            "attention_mask of ones, or none",
            f"one of shape {tuple(attention_mask.shape)} that hides keys",
            "pass that of the whole sequence to ringlab.hf.shard_batch, with padding at the end; or pack documents",
        )

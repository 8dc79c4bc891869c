"""The attention that transformers calls in every layer: checks the arguments and calls `ring_attention`.

`register` puts the name "ringlab" into transformers' tables of attentions and of masks.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ringlab.attention import ring_attention
from ringlab.errors import BackendError, DeviceError, MaskError, RinglabError, ShapeError
from ringlab.hf.held import held, raise_everywhere
from ringlab.hf.masks import GENERATION, LayerMask, layer_mask
from ringlab.hf.models import ALONE, NAME, guard_the_attention, guard_the_loss
from ringlab.mask import Mask
from ringlab.types import KeyValue, Query, Value

# transformers passes these arguments of a model's forward on to attention. They do not change the result.
_HARMLESS = {
    "cache_position", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "return_dict",
    "shift_labels",
}  # fmt: skip
_REMEDIES = {
    "use_cache": GENERATION,
    "output_attentions": "no rank has the weights; ask for them on one process, with attn_implementation='eager'",
}
_CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: Query,
    key: KeyValue,
    value: Value,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Float[Tensor, "B Lq H Dv"], None]:
    """Return this rank's rows of attention over the whole sequence, and None for the weights.

    query, key and value are this rank's shards, rotated by global positions.

    Raises: MaskError, BackendError, LayoutError or ShapeError on a rank whose arguments are not supported,
    and AgreementError on all other ranks. No argument is ignored.
    """
    around = attention_mask.held if isinstance(attention_mask, LayerMask) else held()
    around.attended, context = True, around.context
    mask, seed = Mask(), None
    try:
        if query.is_meta:
            raise DeviceError(
                "tensors with data", "q, k and v on the device meta", "give the model weights and a batch"
            )
        mask, seed = _mask(module, attention_mask, more), _seed(around.seed, module, dropout)
        if key.shape[2] != query.shape[2]:
            raise ShapeError(
                "as many keys as queries", f"{key.shape[2]} and {query.shape[2]}", _REMEDIES["use_cache"]
            )
    except RinglabError as error:
        raise_everywhere(around, error)
    out: Tensor = ring_attention(
        query, key, value, ring=context.ring, layout=context.layout, mask=mask, scale=scaling,
        schedule=context.schedule, block=context.block, validate=context.validate,
        softcap=softcap, dropout=dropout, seed=seed, sinks=more.get("s_aux"),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _mask(module: nn.Module, asked: Any, more: dict[str, Any]) -> Mask:
    """Return the mask of this layer. Raises: MaskError or LayoutError for a mask that is not supported."""
    if not isinstance(asked, LayerMask):
        got = f"a tensor of shape {tuple(asked.shape)}" if isinstance(asked, Tensor) else type(asked).__name__
        raise MaskError(
            "the mask that transformers makes for attn_implementation='ringlab'",
            f"attention_mask {got} in {type(module).__name__}",
            f"pass an equal ringlab.Mask to ringlab.hf.context; if the model makes the mask, {ALONE}",
        )
    mask = asked.mask()
    causal = more.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if bool(causal) != mask.causal:
        needed = f"is_causal={mask.causal} in every layer, as in its mask"
        raise MaskError(
            needed, f"is_causal={causal} in {type(module).__name__}", f"set its is_causal; or {ALONE}"
        )
    if "sliding_window" in more and more["sliding_window"] != mask.window:
        raise MaskError(
            "one sliding window",
            f"{more['sliding_window']} in the layer, {mask.window} in its mask",
            "correct the config",
        )
    _check_rest(more)
    asked.check_positions(more.get("position_ids"), type(module).__name__)
    return mask


def _check_rest(more: dict[str, Any]) -> None:
    """Raise MaskError for an unknown argument, unless its value is None or False."""
    known = _HARMLESS | {"position_ids", "sliding_window", "is_causal", "s_aux"}
    for name, value in more.items():
        if name in known or value is None or value is False:
            continue
        remedy = _REMEDIES.get(name, "leave it out: it would be dropped")
        if name in _CU_SEQ_LENS:
            remedy = "leave it out, and give ringlab.hf.context(mask=ringlab.hf.mask_of(position_ids))"
        raise MaskError("only arguments of attention that ringlab.hf supports", f"{name}=", remedy)


def _seed(seed: int | None, module: nn.Module, dropout: float) -> int | None:
    """Return the seed of this layer, or None without dropout. Raises: MaskError for dropout without a seed.

    Seeds of successive layers differ by 2⁶⁴/φ, so no two layers have the same seed.
    """
    layer = getattr(module, "layer_idx", None)
    if not dropout:
        return None
    if seed is None or not isinstance(layer, int):
        raise MaskError(
            "a seed for attention dropout, and layers that have a number",
            f"dropout={dropout}, seed={seed}, layer {layer}",
            "ringlab.hf.context(..., seed=), another one in every step; or config.attention_dropout = 0.0",
        )
    return (seed + layer * 0x9E3779B97F4A7C15) % (1 << 64)


OLDEST = (4, 57)


def register() -> str:
    """Register ringlab in transformers, and return its name for attn_implementation=.

    Importing ringlab.hf calls this function.

    Raises: BackendError for a version of transformers that is too old to describe the mask of a layer.

    >>> register()
    'ringlab'
    >>> AttentionInterface()["ringlab"] is attend  # transformers' table
    True
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise BackendError(
            f"transformers {OLDEST[0]}.{OLDEST[1]} or later",
            transformers.__version__,
            "pip install 'ringlab[hf]'",
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, layer_mask)
    guard_the_attention()
    guard_the_loss()
    return NAME

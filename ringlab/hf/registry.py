"""The name "ringlab" in transformers' tables of attentions and of masks."""

from __future__ import annotations

import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ringlab.errors import BackendError
from ringlab.hf.attention import attend
from ringlab.hf.heads import guard_the_loss
from ringlab.hf.masks import layer_mask

NAME = "ringlab"
OLDEST = (4, 57)


def register() -> str:
    """Return the name under which models find ringlab, attn_implementation="ringlab"; once is enough.

    Raises: BackendError for a transformers too old to say which mask a layer asks for.
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
    guard_the_loss()
    return NAME

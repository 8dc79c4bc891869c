"""Models of Hugging Face transformers over a ring: the optional extra `hf`; docs/huggingface.md shows it whole.

registry.py   the name "ringlab" in transformers' tables of attentions and of masks
context.py    context: the ring, the layout and the mask that a model's forward runs under
held.py       what this thread runs under
heads.py      models whose heads take tokens together, and labels shifted inside a shard, refused
masks.py      what mask a layer of transformers asks for, read without a matrix, or refused by name
attention.py  the attention that transformers calls in every layer
batch.py      shard_batch and mask_of: a whole batch → this rank's part of it

Importing this registers the implementation; models take it by attn_implementation="ringlab".
"""

from __future__ import annotations

from ringlab.errors import MissingExtraError

try:
    from ringlab.hf.attention import NAME, register
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingExtraError(
        "transformers, for ringlab.hf", "not installed", "pip install 'ringlab[hf]'"
    ) from error
from ringlab.hf.batch import mask_of, shard_batch
from ringlab.hf.context import context

__all__ = ["NAME", "context", "mask_of", "register", "shard_batch"]

register()

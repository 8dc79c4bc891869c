"""Models of Hugging Face transformers over a ring (the optional extra `hf`); see docs/huggingface.md.

context.py    context: the ring, the layout and the mask of a model's forward
held.py       the state of a context, and errors that must reach every rank
models.py     checks that a model and its loss may run on a shard: tokens must interact only in attention
masks.py      reads the mask that a layer of transformers needs, without a matrix, or raises an error
attention.py  the attention that transformers calls in every layer, and its name in transformers' tables
batch.py      shard_batch and mask_of: a whole batch → this rank's part of it
trainer.py    OverRing: transformers' Trainer over a ring

Importing this package registers the implementation. Models select it by attn_implementation="ringlab".
"""

from __future__ import annotations

from ringlab.errors import MissingExtraError

try:
    from ringlab.hf.attention import register
    from ringlab.hf.models import NAME
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingExtraError(
        "transformers, for ringlab.hf", "not installed", "pip install 'ringlab[hf]'"
    ) from error
from ringlab.hf.batch import mask_of, shard_batch
from ringlab.hf.context import context
from ringlab.hf.trainer import OverRing

__all__ = ["NAME", "OverRing", "context", "mask_of", "register", "shard_batch"]

register()

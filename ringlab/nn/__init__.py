"""A small transformer whose sequence is spread over the ranks of a ring, its loss, its training, its checkpoints.

context.py       Context: how a shard's sequence is spread over the ring
attention.py     rotary position embedding and ContextParallelAttention
transformer.py   FeedForward, ModelConfig and Transformer
loss.py          labels, the loss by the global number of tokens, the sum of gradients
text.py          the standard library's source, as batches of bytes
mesh.py          data × context × tensor parallelism over torch's DeviceMesh
checkpoint.py    checkpoints that any world size can resume from
training.py      Recipe, training_step and train
"""

from __future__ import annotations

from ringlab.nn.attention import ContextParallelAttention
from ringlab.nn.context import Context
from ringlab.nn.loss import IGNORE, loss_share, next_tokens, sum_gradients, total_weight, valid_tokens
from ringlab.nn.mesh import Degrees
from ringlab.nn.training import Recipe, train, training_step
from ringlab.nn.transformer import FeedForward, ModelConfig, Transformer

__all__ = [
    "IGNORE",
    "Context",
    "ContextParallelAttention",
    "Degrees",
    "FeedForward",
    "ModelConfig",
    "Recipe",
    "Transformer",
    "loss_share",
    "next_tokens",
    "sum_gradients",
    "total_weight",
    "train",
    "training_step",
    "valid_tokens",
]

"""A small transformer whose sequence is spread over the ranks of a ring, with loss, training and checkpoints.

context.py       Context: how a sequence is spread over the ring
attention.py     rotary position embedding and ContextParallelAttention
transformer.py   FeedForward, ModelConfig and Transformer
loss.py          labels, the loss per token of all ranks, the sum of gradients
rates.py         the learning rate of each step: warm-up and decay
clipping.py      the norm of the whole gradient, and clipping by this norm
precision.py     computing in bfloat16 with float32 master weights
text.py          the standard library's source, or a file, as batches of bytes
mesh.py          data × context × tensor parallelism over torch's DeviceMesh
checkpoint.py    checkpoints from which any world size can resume
recipe.py        Recipe: model, data and hyperparameters
training.py      training_step and train
"""

from __future__ import annotations

from ringlab.nn.attention import ContextParallelAttention
from ringlab.nn.clipping import clip_gradients, gradient_norm
from ringlab.nn.context import Context
from ringlab.nn.loss import IGNORE, loss_share, next_tokens, sum_gradients, total_weight, valid_tokens
from ringlab.nn.mesh import Degrees
from ringlab.nn.precision import computing_in
from ringlab.nn.rates import learning_rate
from ringlab.nn.recipe import Recipe
from ringlab.nn.training import Step, train, training_step
from ringlab.nn.transformer import FeedForward, ModelConfig, Transformer

__all__ = [
    "IGNORE",
    "Context",
    "ContextParallelAttention",
    "Degrees",
    "FeedForward",
    "ModelConfig",
    "Recipe",
    "Step",
    "Transformer",
    "clip_gradients",
    "computing_in",
    "gradient_norm",
    "learning_rate",
    "loss_share",
    "next_tokens",
    "sum_gradients",
    "total_weight",
    "train",
    "training_step",
    "valid_tokens",
]

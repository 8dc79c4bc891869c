"""The solution in the notebook, without its docstrings."""

import math

import numpy as np
import torch

from ringlab.blocks import get_block
from ringlab.merge import Partial, merge


def attend(q, k, v):
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    flops = 4 / 2 if causal else 4  # per L², head dim and query head
    moved = 2 * element_bytes / group  # per L, head dim and query head
    return moved * flops_per_s / (flops * bytes_per_s)


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s  # to the next rank
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return float((ready + compute_s[:, P - 1]).max())


def overlapped_ring(ring, q, k, v, pieces):
    state = Partial.identity(q)
    block = list(zip(k.tensor_split(pieces, -2), v.tensor_split(pieces, -2), strict=True))
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        for number, piece in enumerate(block):
            work = None if last else ring.post(*piece)
            state = merge(state, ring.compute(f"attend {step}", attend, q, *piece))
            if work is not None:
                block[number] = work.wait()
    return state.out, state.lse


def max_speedup(model, ranks, tokens, attention_weight=1.0):
    L, d, layers = tokens / ranks, model["d_model"], model["layers"]
    weights = layers * (4 * d * d + model["ffn_matrices"] * d * model["d_ff"]) + d * model["vocabulary"]
    linear = 2 * L * weights
    block = attention_weight * 4 * d * L * L * layers
    return (linear + block * (ranks - 0.5)) / (linear + block * ranks / 2)

"""One block in JAX, as in lesson 17: attention with lse, the merge, its identity, and one block's backward.

The arguments are the arrays of one device, (B, H, L, D), and a mask (L, L) that is True where a query sees a
key. Scores and state are float32 for every dtype of q, k and v.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

State: TypeAlias = tuple[jax.Array, jax.Array]
"""(out, lse): out is normalised, (B, H, L, D); lse is the natural log, (B, H, L).

A row that saw no key has out 0 and lse −inf.
"""


def identity(q: jax.Array) -> State:
    """Return the state of queries that have seen no key yet."""
    return jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> State:
    """Return attention of q on one block, scores scaled by 1/√D; a row that sees nothing gives 0 and −inf."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    lse = jax.nn.logsumexp(scores, axis=-1, where=mask)
    finite = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    weights = jnp.exp(jnp.where(mask, scores, -jnp.inf) - finite)
    return weights @ v.astype(jnp.float32), lse


def merge(a: State, b: State) -> State:
    """Return the state over the keys of both states; the weights are e^(lse_a − lse) and e^(lse_b − lse)."""
    lse = jnp.logaddexp(a[1], b[1])
    finite = jnp.where(lse == -jnp.inf, 0, lse)
    weights = (jnp.exp(part - finite)[..., None] for part in (a[1], b[1]))
    first, second = (w * out for w, (out, _) in zip(weights, (a, b), strict=True))
    return first + second, lse


def attend_backward(
    dout: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what one block adds to (dq, dk, dv), in float32, given the final lse and delta."""
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    total = jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]
    weights = jnp.exp(jnp.where(mask, scale * (q @ k.mT), -jnp.inf) - total)
    dscores = weights * (dout @ v.mT - delta[..., None])
    return scale * (dscores @ k), scale * (dscores.mT @ q), weights.mT @ dout

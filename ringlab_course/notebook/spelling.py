"""A row of Python's keywords on ranks, a decoder that predicts their letters, and six programs that compute its loss.

Five of the programs are wrong. Lesson 18 shows all six losses first, and finds the mistakes later.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringlab.comm.ring import Ring
from ringlab.comm.virtual import VirtualCluster
from ringlab.layout import Layout, contiguous
from ringlab.merge import Partial, merge
from ringlab.nn import IGNORE, Context, ModelConfig, Transformer
from ringlab.packing import Packing
from ringlab_course.figures import packed_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Given = dict[str, np.ndarray]
"""The inputs of the decoder that a wrong program replaces, by name."""
CONFIG = ModelConfig(vocabulary=128, width=32, heads=4, kv_heads=2, hidden=64)
STEPS = 40
"""Steps of training: enough for a loss that depends on the context, and too few to know the words by heart."""


@cache
def decoder() -> Transformer:
    """Return a float64 decoder after STEPS steps of training on Python's 35 keywords, each in a row of its own."""
    model = Transformer(CONFIG, seed=0).double()
    words = [torch.tensor(list(word.encode())) for word in keyword.kwlist]
    tokens = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([word[1:] for word in words], True, IGNORE)
    labels = F.pad(labels, (0, tokens.shape[1] - labels.shape[1]), value=IGNORE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
    model.zero_grad()
    return model


class Row:
    """Words packed in one row, one token per letter, which P ranks share in contiguous shards.

    Keywords of its methods replace the right inputs of the decoder: `sees`, (S, S), True where a query sees a key, and
    the tokens' `positions`, `labels` and `weights` in the mean loss, each (S,).

    >>> Row(["def", "_"], P=2).letters
    ['d', 'e', 'f', '_']
    """

    def __init__(self, words: Sequence[str], P: int) -> None:
        self.words = tuple(words)
        self.letters = list("".join(words))
        self.tokens = np.array(list("".join(words).encode()))
        self.packing = Packing.of_lengths([len(word) for word in words])
        self.layout = contiguous(self.packing.length, P)

    @cached_property
    def right(self) -> dict[str, np.ndarray]:
        """Return the right `sees`, `positions` and `labels`."""
        places = np.arange(self.packing.length)
        return {
            "sees": np.asarray(self.packing.mask().visible(places, places)),
            "positions": self.packing.position_ids,
            "labels": self.packing.next_tokens(torch.from_numpy(self.tokens)[None])[0].numpy(),
        }

    def on_each_rank(
        self, make: Callable[[np.ndarray], np.ndarray], layout: Layout | None = None
    ) -> np.ndarray:
        """Return a value for each token, in the order of the row, as the token's rank makes it.

        make: takes the places of a rank's tokens in the row, and returns a value for each of them. layout: how
        the ranks share the row, by default in contiguous shards.
        """
        layout = layout or self.layout
        owned = [layout.positions(rank) for rank in range(layout.P)]
        return np.concatenate([make(own) for own in owned])[np.argsort(np.concatenate(owned))]

    def logits(self, **given: np.ndarray) -> Tensor:
        """Return the decoder's logits for each token, (S, vocabulary), computed on the ranks."""
        inputs = self.right | given
        run = VirtualCluster(self.layout.P).run(_logits, decoder(), self, inputs["sees"], inputs["positions"])
        joined: Tensor = self.layout.unshard(run.results, dim=0)
        return joined

    def token_losses(self, **given: np.ndarray) -> np.ndarray:
        """Return −log p of each token's label, (S,), or 0 without a label."""
        labels = torch.from_numpy(given.get("labels", self.right["labels"]))
        losses = F.cross_entropy(self.logits(**given), labels, ignore_index=IGNORE, reduction="none")
        return losses.numpy()

    def shown_changes(self, **given: np.ndarray) -> list[str]:
        """Return a text for each token: the change of its loss, "lost" if its label is lost, or "" for no change."""
        has, should = (given.get("labels", self.right["labels"]) != IGNORE), self.right["labels"] != IGNORE
        changes = [f"{change:+.2f}" for change in self.token_losses(**given) - self.token_losses()]
        texts = ["lost" if lost else text for lost, text in zip(should & ~has, changes, strict=True)]
        return ["" if text in ("+0.00", "-0.00") else text.replace("-", "−") for text in texts]

    def loss(self, **given: np.ndarray) -> float:
        """Return the sum of weight · −log p over the tokens. All labels have the same weight unless it is given."""
        counted = given.get("labels", self.right["labels"]) != IGNORE
        return float((given.get("weights", counted / counted.sum()) * self.token_losses(**given)).sum())

    def six_programs(self) -> dict[str, float]:
        """Return the losses that the six programs report, by the program's letter."""
        return {letter: self.loss(**program(self)) for letter, program in _PROGRAMS.items()}

    def strip(self, *args: Any, **options: Any) -> tuple[Figure, str]:
        """Return `packed_view.strip` of this row, and the same in words."""
        drawn = self.packing, self.layout, self.letters, *args
        return packed_view.strip(*drawn, **options), packed_view.describe(*drawn, **options)

    def pairs(self, seen: dict[str, np.ndarray], framed: int | None = None) -> tuple[Figure, str]:
        """Return `packed_view.pairs` of this row, and the same in words."""
        drawn = self.packing, self.layout, self.letters, seen, framed
        return packed_view.pairs(*drawn), packed_view.describe_pairs(*drawn)

    def arrows(self, made: dict[str, np.ndarray], layout: Layout | None = None) -> tuple[Figure, str]:
        """Return `packed_view.labels` of this row, and the same in words. layout: as in `on_each_rank`."""
        drawn = self.packing, dict.fromkeys(made, layout or self.layout), self.letters, made
        return packed_view.labels(*drawn), packed_view.describe_labels(*drawn)

    def bars(self, weights: dict[str, np.ndarray], *, shares: bool = False) -> tuple[Figure, str]:
        """Return `packed_view.weights` of this row, and the same in words."""
        drawn = self.packing, self.layout, self.letters, weights
        return packed_view.weights(*drawn, shares=shares), packed_view.describe_weights(*drawn, shares=shares)


@torch.no_grad()
def _logits(ring: Ring, model: Transformer, row: Row, sees: np.ndarray, positions: np.ndarray) -> Tensor:
    own = row.layout.positions(ring.rank)
    context = _Free(ring, row.layout, position_ids=torch.from_numpy(positions[own]), sees=sees)
    logits: Tensor = model(torch.from_numpy(row.tokens[own])[None], context)[0]
    return logits


@dataclass(frozen=True, eq=False, kw_only=True)
class _Free(Context):
    """A context with any mask and any positions, also wrong ones, which `Context` refuses."""

    sees: np.ndarray

    def __post_init__(self) -> None:
        pass

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any = None) -> Tensor:
        ring, group = self.ring, q.shape[1] // k.shape[1]
        own, state = self.layout.positions(ring.rank), Partial.identity(q)
        for step in range(ring.world_size):
            keys = self.layout.positions(ring.origin(step))
            visible = torch.from_numpy(self.sees[np.ix_(own, keys)])
            scores = q @ k.repeat_interleave(group, dim=1).mT / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~visible, -math.inf)
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
            state = merge(state, Partial(weights @ v.repeat_interleave(group, dim=1), lse))
            if step < ring.world_size - 1:
                k, v = ring.shift(k, v, length=len(self.layout.positions(ring.origin(step + 1))))
        out: Tensor = state.out
        return out


def _a(row: Row) -> Given:
    counted = row.right["labels"] != IGNORE
    means = row.on_each_rank(lambda own: counted[own] / max(1, counted[own].sum()))
    return {"weights": means / row.layout.P}


def _b(row: Row) -> Given:
    labels = row.right["labels"].copy()
    labels[[row.layout.positions(rank)[-1] for rank in range(row.layout.P)]] = IGNORE
    return {"labels": labels}


def _c(row: Row) -> Given:
    return {"sees": np.tri(row.packing.length, dtype=bool)}


def _d(row: Row) -> Given:
    return {}


def _e(row: Row) -> Given:
    bounds = row.packing.cu_seqlens // row.layout.P
    numbers = np.searchsorted(bounds, _f(row)["positions"], side="right")
    return {"sees": np.tri(row.packing.length, dtype=bool) & (numbers[:, None] == numbers)}


def _f(row: Row) -> Given:
    return {"positions": row.on_each_rank(lambda own: np.arange(len(own)))}


_PROGRAMS: dict[str, Callable[[Row], Given]] = dict(zip("ABCDEF", (_a, _b, _c, _d, _e, _f), strict=True))

"""Checks of 19.prefill: a chunk of a prompt attends to itself and to a cached prefix that ranks share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_tuple, to_numpy
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.numbers import NAMES, State, attend, random, rounding_bound
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e19_serving.place import truth as place


@dataclass(frozen=True)
class Problem:
    """Each rank's q, k, v and positions of the chunk, and its k, v and positions of the cached prefix."""

    qs: list[torch.Tensor]
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    positions: list[torch.Tensor]
    cached_ks: list[torch.Tensor]
    cached_vs: list[torch.Tensor]
    cached: list[torch.Tensor]
    text: str

    @property
    def world_size(self) -> int:
        return len(self.qs)

    def keys(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the keys, values and positions of all ranks: those of the prefix, then those of the chunk."""
        k, v = (torch.cat([*old, *new], dim=2).double().numpy() for old, new in ((self.cached_ks, self.ks), (self.cached_vs, self.vs)))  # fmt: skip
        return k, v, torch.cat([*self.cached, *self.positions]).numpy()


def problem(
    rng: np.random.Generator, prefix: int, layout: Layout, H: int = 1, K: int = 1, D: int = 4, page: int = 2
) -> Problem:
    """Return a problem: a chunk under `layout` after `prefix` cached tokens, which are in pages of `page`."""
    P, positions, cached = layout.P, [], []
    ranks, _ = place(np.arange(prefix), page, P)
    for rank in range(P):
        positions.append(torch.from_numpy(prefix + layout.positions(rank)))
        cached.append(torch.from_numpy(np.flatnonzero(ranks == rank)))
    qs = [random(rng, 1, H, len(own), D) for own in positions]
    ks, vs = ([random(rng, 1, K, len(own), D) for own in positions] for _ in range(2))
    old_ks, old_vs = ([random(rng, 1, K, len(own), D) for own in cached] for _ in range(2))
    heads = "" if H == K == 1 else f", {H} query and {K} K/V heads"
    text = f"P={P}, {prefix} cached tokens and {layout.S} new ones, {layout.name}{heads}"
    return Problem(qs, ks, vs, positions, old_ks, old_vs, cached, text)


def truth(rank: int, given: Problem) -> State:
    """Return (out, lse) of a rank's queries over all keys at or before them."""
    k, v, at = given.keys()
    return attend(given.qs[rank], k, v, given.positions[rank].numpy()[:, None] >= at)


def _run(subject: Any, given: Problem) -> Any:
    keywords = {"positions": given.positions, "cached": given.cached}
    per_rank = given.qs, given.ks, given.vs, given.cached_ks, given.cached_vs
    try:
        return subject.run_ring(given.world_size, *per_rank, **keywords)
    except Crashed as crash:
        if "MismatchError" in crash.message:
            name = "assumes_equal_parts"
        elif re.search(r"size of tensor a .* must match the size of tensor b", crash.counterexample):
            name = "mask_of_another_block"
        else:
            raise
        raise STAGE.misconception(name).failure(f"{given.text}\n{crash.counterexample}") from None


def _answers(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    k, v, _ = given.keys()
    for rank, answer in enumerate(results):
        out, _ = expect_tuple(answer, NAMES)
        text = f"{given.text}: rank {rank}"
        if hasattr(out, "dtype") and np.isnan(to_numpy(out)).any():
            raise Failure("There is a NaN in out.", text)
        right = truth(rank, given)
        bound = rounding_bound(given.qs[rank], k, v, right)
        yield Answered(answer, right, bound, names=NAMES, text=text)


def _verify(subject: Any, cases: Iterable[Problem]) -> None:
    compare_all(each for case in cases for each in _answers(_run(subject, case).results, case))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on chunks without a prefix, on a single rank, and with a prefix on several ranks."""
    made = ((0, 4, 1), (0, 4, 2), (3, 2, 1), (4, 4, 2), (9, 6, 3))
    _verify(subject, [problem(rng, prefix, layouts.contiguous(n, P)) for prefix, n, P in made])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on zig-zag and striped chunks, shared heads and large pages."""
    prefix = int(rng.integers(5, 12))
    made = [
        problem(rng, prefix, layouts.zigzag(8, 2)),
        problem(rng, prefix + 4, layouts.striped(6, 3), page=4),
    ]
    _verify(subject, [*made, problem(rng, prefix, layouts.zigzag(12, 3), 4, 2)])


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on a chunk of fewer tokens than ranks, and a prefix that is on some ranks only."""
    made = ((1, layouts.contiguous(1, 3)), (3, layouts.zigzag(5, 4)), (0, layouts.striped(2, 3)))
    _verify(subject, [problem(rng, prefix, layout, 2, 1, page=3) for prefix, layout in made])


def _check_messages(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank's prefix and chunk travel as one block, in P − 1 exchanges with the next rank."""
    for prefix, layout in ((8, layouts.contiguous(8, 4)), (9, layouts.zigzag(7, 3))):
        given = problem(rng, prefix, layout, 2, 1)
        outcome = _run(subject, given)
        compare_all(_answers(outcome.results, given))
        P, trace = layout.P, outcome.trace
        blocks = [
            sum(x[r].nbytes for x in (given.ks, given.vs, given.cached_ks, given.cached_vs)) for r in range(P)
        ]
        for rank in range(P):
            if strangers := trace.peers(rank) - {(rank + 1) % P}:
                text = f"{given.text}: rank {rank} sends to {', '.join(map(str, sorted(strangers)))}"
                raise STAGE.misconception("sends_to_strangers").failure(text)
            rounds, sent = trace.rounds(rank), trace.bytes_sent(rank)
            exact = sum(blocks[(rank - step) % P] for step in range(P - 1))
            text = f"{given.text}: rank {rank} made {rounds} exchanges of {sent:,} bytes; {P - 1} of {exact:,} are enough"
            if rounds == 2 * (P - 1) and sent == exact:
                raise STAGE.misconception("two_rings").failure(text)
            if rounds != P - 1 or sent != exact:
                raise Failure("The exchanges or their bytes are not those of one ring.", text)


STAGE = Stage(
    id="19.prefill",
    function="prefill",
    title="Prefill of a chunk",
    kind="ring",
    helpers=("merge_all",),
    hints=(
        "A causal ring compares positions and nothing else. What changes for it if a rank's block holds some tokens of the prefix, too?",
        "Put the cached keys in front of the new ones, and their positions likewise, on every rank. Then it is the causal ring of "
        "lesson 07, with queries of the chunk alone. Which lengths do the blocks have?",
        r"$k = [k_{\mathrm{cached}}; k_{\mathrm{new}}]$, $p = [p_{\mathrm{cached}}; p_{\mathrm{new}}]$ on every rank; "
        r"visible if $p_{\mathrm{query}} \ge p_{\mathrm{key}}$",
    ),
    misconceptions=misconceptions_of("19.prefill"),
    checks=(
        Check("values", 2, "visible", "contiguous chunks, without a prefix and with one", _check_values),
        Check("layouts", 1, "visible", "zig-zag and striped chunks, shared heads", _check_layouts),
        Check("edges", 1, "visible", "fewer tokens than ranks, a prefix on some ranks", _check_edges),
        Check("messages", 1, "visible", "P − 1 exchanges of exact bytes", _check_messages, kind="cost"),
    ),
)  # fmt: skip

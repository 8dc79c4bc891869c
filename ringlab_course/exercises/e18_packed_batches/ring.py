"""Checks of 18.ring: a ring over packed documents that computes a block only if one of the rows sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_tuple, relative_error, to_numpy
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.numbers import NAMES, State, attend, rounding_bound
from ringlab_course.checking.positions import MISTAKES as FORWARD
from ringlab_course.checking.positions import Shards, expect_bytes, expect_neighbours, reason, shards
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e18_packed_batches.shard import bounds, document_of, lengths_of


def visible(rank: int, origin: int, positions: Sequence[Any], cu: np.ndarray) -> np.ndarray:
    """Return True where a key of `origin` is in the document of a query of `rank`, at or before the query."""
    queries, keys, of = np.asarray(positions[rank])[:, None], np.asarray(positions[origin]), document_of(cu)
    return (of[queries] == of[keys]) & (queries >= keys)


def truth(rank: int, case: Shards) -> State:
    """Return the right (out, lse) of a rank: its queries over the keys that they see in all blocks."""
    cu, positions = case.keywords["cu_seqlens"].numpy(), case.positions
    assert positions is not None
    seen = [visible(rank, origin, positions, cu) for origin in range(case.world_size)]
    keys, values = torch.cat(case.ks, dim=-2), torch.cat(case.vs, dim=-2)
    return attend(case.qs[rank], keys, values, np.concatenate(seen, axis=1))


ON_THE_WIRE = tuple(
    FORWARD[name]
    for name in (
        "gathers_everything", "sends_p_times", "splits_the_exchange", "repeats_heads_on_the_wire", "sends_too_many_bytes",
        "does_not_unpack", "leaves_the_ring", "never_waits",
    )
)  # fmt: skip
"""Mistakes that any ring can make, with the descriptions of exercise 05."""
NAMED = {each.name: each for each in (*misconceptions_of("18.ring"), *ON_THE_WIRE)}


def _case(
    rng: np.random.Generator, lengths: Sequence[int], make: Callable[[int, int], Layout], P: int,
    H: int = 1, K: int = 1, D: int = 2,
) -> Shards:  # fmt: skip
    layout = make(sum(lengths), P)
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(P)]
    made = shards(rng, [len(own) for own in positions], H, K, D, positions=positions)
    return replace(
        made,
        text=f"documents of {', '.join(map(str, lengths))} tokens, {layout.name}, {made.text}",
        keywords={"cu_seqlens": bounds(lengths)},
    )


def _run(subject: Any, case: Shards) -> Any:
    keywords = {**case.keywords, "places": case.positions}
    try:
        return subject.run_ring(case.world_size, case.qs, case.ks, case.vs, **keywords)
    except Crashed as crash:
        name = reason(crash, ragged=len({q.shape[-2] for q in case.qs}) > 1, causal=True)
        name = {"skips_the_shift": "skips_the_exchange"}.get(name or "", name)
        if name not in NAMED:
            raise
        raise NAMED[str(name)].failure(f"{case.text}\n{crash.counterexample}") from None


def _answers(results: Sequence[Any], case: Shards) -> Iterator[Answered]:
    for rank, answer in enumerate(results):
        out, _ = expect_tuple(answer, NAMES)
        if hasattr(out, "dtype") and np.isnan(to_numpy(out)).any():
            raise NAMED["nan_in_blind_rows"].failure(f"{case.text}: rank {rank}")
    keys, values = torch.cat(case.ks, dim=-2), torch.cat(case.vs, dim=-2)
    for rank, answer in enumerate(results):
        right = truth(rank, case)
        bound = rounding_bound(case.qs[rank], keys, values, right)
        yield Answered(answer, right, bound, names=NAMES, text=f"{case.text}: rank {rank}")


def _verify(subject: Any, cases: Iterable[Shards]) -> None:
    """Compare each rank's (out, lse) with the oracle's. Cases are in order of size."""
    compare_all(each for case in cases for each in _answers(_run(subject, case).results, case))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on one rank, documents inside shards, and documents across the borders of shards."""
    a, b, c = lengths_of(rng, 3, 7)
    packed = ([a, b], 1), ([a, a], 2), ([a, b, c], 2), ([b, c, a, 2], 3)
    _verify(subject, [_case(rng, lengths, layouts.contiguous, P) for lengths, P in packed])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    packed = [(lengths_of(rng, 3, 9), make) for make in (layouts.zigzag, layouts.striped)]
    cases = [_case(rng, lengths, make, 3) for lengths, make in packed]
    _verify(subject, [*cases, _case(rng, lengths_of(rng, 4, 9), layouts.zigzag, 2, 4, 2, 4)])


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on documents of one token or no token, fewer tokens than ranks, and eight ranks."""
    a, b, c = lengths_of(rng, 3, 9)
    packed = (
        ([1, 1], layouts.contiguous, 3), ([a, 0, 1, b], layouts.zigzag, 3), ([0, 1, 1, c, 0], layouts.striped, 2),
        ([a, b, c, 1, a], layouts.zigzag, 8),
    )  # fmt: skip
    _verify(subject, [_case(rng, *each, 2, 1, 4) for each in packed])


def _right(subject: Any, case: Shards) -> Any:
    """Return the trace of a run after comparing its values.

    Messages and work count only if values are right.
    """
    outcome = _run(subject, case)
    for each in _answers(outcome.results, case):
        if relative_error(each.answer, each.truth) > 1e-4:
            raise Failure("Messages and work are counted only when the values are right.", each.text)
    return outcome.trace


def _check_messages(subject: Any, rng: np.random.Generator) -> None:
    for lengths, make, H, K in (
        ([3, 3, 3], layouts.contiguous, 1, 1),
        (lengths_of(rng, 3, 9), layouts.zigzag, 4, 2),
    ):
        case = _case(rng, lengths, make, 3, H, K, 4)
        trace = _right(subject, case)
        expect_neighbours(trace, case.text)
        expect_bytes(case, trace, H // K)


LONG = ([700, 836], layouts.zigzag, 2, 4, 4, 64)
"""The documents, layout, ranks, heads and head dim of a run whose computation takes long."""


def _check_work(subject: Any, rng: np.random.Generator) -> None:
    """Check that each rank computes with every block in which it sees a key, and with no other block.

    In the last case, the work takes so long that the judge can tell whether it is done inside `ring.compute`.
    """
    a, b = lengths_of(rng, 2, 6)
    for each in (([a] * 3, layouts.contiguous, 3), ([a, b, a, b], layouts.contiguous, 4), LONG):
        case = _case(rng, *each)
        trace, cu = _right(subject, case), case.keywords["cu_seqlens"].numpy()
        P = case.world_size
        assert case.positions is not None
        for rank in range(P):
            needed = sum(bool(visible(rank, owner, case.positions, cu).any()) for owner in range(P))
            made = len([event for event in trace.computes(rank) if event.end > event.start])
            if made != needed:
                example = f"{case.text}: rank {rank} sees keys of {needed} of {P} blocks, but made {made} computations"
                raise NAMED["computes_what_nobody_sees" if made > needed else "computes_unseen"].failure(
                    example
                )


STAGE = Stage(
    id="18.ring",
    function="packed_ring",
    title="The ring over packed documents",
    kind="ring",
    hints=(
        "A block has arrived. Which two conditions must a query and a key meet, whatever rank they lie on, for the query to see the "
        "key?",
        "Look up the document of every token of your own and of the block's, by its place in the row. The mask compares "
        "documents and places. If it holds nothing, compute nothing; the exchange happens all the same.",
        r"$\mathrm{visible}_{ij} = [d_{p_i} = d_{p_j}] \wedge [p_j \le p_i]$, "
        r"$\;(o, L) \leftarrow (o, L) \oplus \mathrm{attend}(q, k, v, \mathrm{visible})$",
    ),
    misconceptions=tuple(NAMED.values()),
    checks=(
        Check("values", 2, "visible", "contiguous shards, documents within them and across", _check_values),
        Check("layouts", 2, "visible", "zig-zag and striped, shared heads", _check_layouts),
        Check("edges", 1, "visible", "documents of one token and of none, ranks without tokens", _check_edges),
        Check("messages", 1, "held-out", "P − 1 exchanges with the next rank, exact bytes", _check_messages, kind="cost"),
        Check("work", 1, "visible", "a rank computes only with blocks that it sees", _check_work, kind="cost"),
    ),
)  # fmt: skip

"""Run ring programs on random shards and compare results, messages and the positions that each rank owns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringlab import oracle
from ringlab_course.checking.answers import expect_tuple, has_nan
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.numbers import NAMES, State, attend, random, rounding_bound
from ringlab_course.checking.wrong_answers import misconceptions_of

if TYPE_CHECKING:
    import torch

    from ringlab_course.checking.faults import Faults

LONGEST = 12
"""The most positions that a counterexample shows."""


def expect_shares(answer: Any, P: int) -> list[np.ndarray]:
    """Return the answer as one array of positions per rank. Raises: Failure if it is something else."""
    if answer is None:
        raise Failure("the result is None: is the `return` missing?")
    if not isinstance(answer, (list, tuple, np.ndarray)) or getattr(answer, "ndim", 1) == 0:
        raise Failure(
            f"the result should be a list with one array of positions per rank, but is a {type(answer).__name__}."
        )
    if len(answer) != P:
        raise Failure(
            "the result should hold one array of positions per rank.", f"{len(answer)} parts for P={P}"
        )
    return [_positions(part, rank) for rank, part in enumerate(answer)]


def same_shares(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether the shares `a` and `b` give every rank the same positions in the same order."""
    return len(a) == len(b) and all(np.array_equal(left, right) for left, right in zip(a, b, strict=True))


def same_sets(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether the shares `a` and `b` give every rank the same positions, in any order."""
    return same_shares([np.sort(x) for x in a], [np.sort(x) for x in b])


def read_sets(answer: Any) -> list[np.ndarray]:
    """Return the positions of every rank in ascending order.

    Raises: Failure if the answer is not one array of positions per rank.
    """
    return [
        np.sort(share) for share in expect_shares(answer, len(answer) if hasattr(answer, "__len__") else 0)
    ]


def expect_owned_once(shares: Sequence[np.ndarray], S: int, case: str) -> None:
    """Return None if each of the positions 0 … S − 1 is owned exactly once. Raises: Failure."""
    owned = np.concatenate([np.zeros(0, np.int64), *shares])
    beyond = owned[(owned < 0) | (owned >= S)]
    if len(beyond):
        raise Failure(
            "Some positions do not exist: the sequence ends at S − 1.", f"{case}: {listed(np.sort(beyond))}"
        )
    times = np.bincount(owned, minlength=S)
    if (times > 1).any():
        raise Failure(
            "Some positions are owned more than once.", f"{case}: {listed(np.flatnonzero(times > 1))}"
        )
    if (times == 0).any():
        raise Failure("Some positions are owned by no rank.", f"{case}: {listed(np.flatnonzero(times == 0))}")


@dataclass(frozen=True)
class Question:
    """A question put to the learner's function, the function's answer and the right answer.

    `example` describes the question in words.
    """

    inputs: tuple[Any, ...]
    got: Any
    truth: Any
    example: str


def judge(
    cases: Iterable[tuple[Any, ...]],
    ask: Callable[..., Question],
    right: Callable[[Any, Any], bool],
    explain: Callable[[Question], Failure],
    read: Callable[[Any], Any] | None = None,
) -> None:
    """Call `ask` with every case, then raise the failure of the first wrong answer, if there is one.

    Every case is needed because two mistakes often give the same answer in one case, and only further cases tell
    them apart. `read` returns the part of an answer that the check compares, if the check does not compare the
    whole answer.
    """
    wrong = None
    for case in cases:
        try:
            latest = ask(*case)
        except Failure:
            if wrong is None:
                raise
            break  # the result before the crash is compared first
        if wrong is None and not right(latest.got, latest.truth):
            wrong = latest
    if wrong is not None:
        failure = explain(wrong)
        failure.read = read
        raise failure


def listed(positions: Any) -> str:
    """Return positions as text; long lists are cut after the first positions."""
    items = [int(p) for p in positions[: LONGEST + 1]]
    shown = ", ".join(map(str, items[:LONGEST]))
    return f"{{{shown}{', …' if len(items) > LONGEST else ''}}}"


def first_difference(shares: Sequence[np.ndarray], truth: Sequence[np.ndarray], case: str) -> str:
    """Return in words what the first rank that differs owns, and what it should own."""
    for rank, (got, expected) in enumerate(zip(shares, truth, strict=True)):
        if not np.array_equal(got, expected):
            lacks, extra = np.setdiff1d(expected, got), np.setdiff1d(got, expected)
            # `listed` cuts long lists, so the texts of two different lists may be equal.
            if listed(got) == listed(expected) and lacks.size + extra.size:
                parts = (("lacks", lacks), ("should not own", extra))
                differ = " and ".join(f"{verb} {listed(some)}" for verb, some in parts if some.size)
                return f"{case}: rank {rank} {differ}"
            return f"{case}: rank {rank} owns {listed(got)}, should own {listed(expected)}"
    return case


def _positions(part: Any, rank: int) -> np.ndarray:
    what = "every rank's part should be one flat NumPy array of integers, int64."
    if not isinstance(part, np.ndarray):
        raise Failure(what, f"rank {rank}: a {type(part).__name__}")
    if part.dtype.kind == "f" and part.size == 0:
        raise Failure(
            f"{what} An empty np.array([]) holds floats, and floats do not index: give it dtype=np.int64.",
            f"rank {rank}: dtype {part.dtype}, no positions",
        )
    if part.ndim != 1 or part.dtype.kind not in "iu":
        raise Failure(what, f"rank {rank}: dtype {part.dtype}, shape {part.shape}")
    return part.astype(np.int64)


MISTAKES = {each.name: each for stage in ("05.causal", "05.forward") for each in misconceptions_of(stage)}
"""The misconceptions of exercise 05. Those about messages and about failing ranks may occur in any ring."""


@dataclass(frozen=True)
class Shards:
    """The q, k and v of every rank, with the global positions of their tokens if there is a mask.

    keywords: further keyword arguments that every rank gets.
    """

    qs: list[torch.Tensor]
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    text: str
    positions: list[torch.Tensor] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.qs)

    def run(self, subject: Any, faults: Faults | None = None) -> Any:
        """Return the outcome of the learner's program on these shards. Raises: Failure, Crashed."""
        keywords = self.keywords if self.positions is None else {**self.keywords, "positions": self.positions}
        try:
            return subject.run_ring(self.world_size, self.qs, self.ks, self.vs, faults=faults, **keywords)
        except Crashed as crash:
            name = reason(
                crash, ragged=len({q.shape[-2] for q in self.qs}) > 1, causal=self.positions is not None
            )
            if name is None:
                raise
            raise MISTAKES[name].failure(f"{self.text}\n{crash.counterexample}") from None

    def block_bytes(self, origin: int) -> int:
        """Return the bytes of one K/V block, that is, of K and V with their K/V heads."""
        return self.ks[origin].nbytes + self.vs[origin].nbytes


AnyShards = TypeVar("AnyShards", bound=Shards)


def shards(
    rng: np.random.Generator,
    lengths: Sequence[int],
    H: int,
    K: int,
    D: int,
    *,
    size: float = 1.0,
    text: str = "",
    positions: list[torch.Tensor] | None = None,
) -> Shards:
    """Return random float32 shards of these lengths."""
    qs = [random(rng, 1, H, L, D, size=size) for L in lengths]
    ks, vs = ([random(rng, 1, K, L, D) for L in lengths] for _ in range(2))
    heads = "" if H == K == 1 else f", {H} query and {K} K/V heads"
    tokens = (
        "one token per rank" if set(lengths) == {1} else f"{', '.join(map(str, lengths))} tokens on the ranks"
    )
    return Shards(qs, ks, vs, f"P={len(lengths)}, {tokens}, D={D}{heads}{text}", positions)


def narrow(case: AnyShards) -> AnyShards:
    """Return the same shards in bfloat16."""
    qs, ks, vs = ([x.bfloat16() for x in xs] for xs in (case.qs, case.ks, case.vs))
    return replace(case, qs=qs, ks=ks, vs=vs, text=f"{case.text}, bfloat16")


def reason(crash: Crashed, *, ragged: bool, causal: bool) -> str | None:
    """Return the name of the mistake that made the ranks fail, or None if it is unknown."""
    if re.search(r"'tuple' (object )?(has no|and )|and 'tuple'|not tuple|a tuple of", crash.counterexample):
        return "does_not_unpack"
    if "MismatchError" in crash.message:
        return "assumes_equal_lengths" if ragged else None
    if not any(name in crash.message for name in ("DeadlockError", "UnreceivedError", "PeerDiedError")):
        return None
    if "ended without it" not in crash.counterexample and "never waited" in crash.counterexample:
        return "never_waits"
    if causal:
        return "skips_the_shift"
    waits_in_a_circle = "cycle: " in crash.counterexample and "cycle: none" not in crash.counterexample
    return None if waits_in_a_circle else "leaves_the_ring"


def compare_ranks(case: Shards, results: Sequence[Any], nan: Misconception | None = None) -> None:
    """Raise the Failure of the first rank whose (out, lse) are wrong; `nan` is the mistake behind a NaN."""
    compare_all(answered_ranks(case, results, nan))


def compare_runs(subject: Any, cases: Iterable[Shards], nan: Misconception | None = None) -> None:
    """Run the learner's ring on all cases, and compare every rank of every case; `nan` is the mistake behind a NaN."""
    compare_all(each for case in cases for each in answered_ranks(case, case.run(subject).results, nan))


def truth(rank: int, qs: Sequence[Any], ks: Sequence[Any], vs: Sequence[Any], positions: Any = None) -> State:
    """Return the float64 result that rank `rank` should return.

    Without `positions` its queries see all keys; with `positions` (one array per rank) they see the keys at
    or before their own positions.
    """
    k, v = (np.concatenate([oracle.float64(x) for x in xs], axis=-2) for xs in (ks, vs))
    if positions is None:
        return attend(qs[rank], k, v)
    keys = np.concatenate([np.asarray(each) for each in positions])
    return attend(qs[rank], k, v, np.asarray(positions[rank])[:, None] >= keys)


def answered_ranks(
    case: Shards, results: Sequence[Any], nan: Misconception | None = None
) -> Iterator[Answered]:
    """Yield each rank's (out, lse) with the right one, for `compare_all`.

    Raises: the Failure of `nan`, if `nan` is given and a rank's answer contains NaN.
    """
    for rank, result in enumerate(results):
        if nan is not None and has_nan(*expect_tuple(result, NAMES)):
            raise nan.failure(f"{case.text}: rank {rank}")
    qs, ks, vs = ([oracle.float64(x) for x in xs] for xs in (case.qs, case.ks, case.vs))
    shared = (qs, ks, vs, case.positions)
    keys, values = np.concatenate(ks, axis=-2), np.concatenate(vs, axis=-2)
    for rank, answer in enumerate(results):
        right = truth(rank, *shared)
        bound = rounding_bound(qs[rank], keys, values, right)
        yield Answered(answer, right, bound, NAMES, f"{case.text}: rank {rank}")


def expect_neighbours(trace: Any, text: str, pieces: int = 1) -> None:
    """Return None if every rank makes P − 1 hops of `pieces` exchanges, all with the next rank."""
    P = trace.world_size
    right = pieces * (P - 1)
    for rank in range(P):
        if trace.peers(rank) - {(rank + 1) % P}:
            strangers = ", ".join(map(str, sorted(trace.peers(rank))))
            raise MISTAKES["gathers_everything"].failure(f"{text}: rank {rank} sends to ranks {strangers}")
        rounds = trace.rounds(rank)
        example = f"{text}: rank {rank} made {rounds} exchanges, should make {right}"
        if rounds == pieces * P:
            raise MISTAKES["sends_p_times"].failure(example)
        if rounds == 2 * right and rounds:
            raise MISTAKES["splits_the_exchange"].failure(example)
        if rounds != right:
            raise Failure("The number of exchanges is wrong.", example)


def expect_bytes(case: Shards, trace: Any, group: int = 1) -> None:
    """Return None if every rank sends each block but one exactly once, and nothing else. Raises: Failure."""
    P = case.world_size
    for rank in range(P):
        exact = sum(case.block_bytes((rank - step) % P) for step in range(P - 1))
        sent = trace.bytes_sent(rank)
        example = f"{case.text}: rank {rank} sent {sent:,} bytes, K and V take {exact:,}"
        if group > 1 and sent == group * exact:
            raise MISTAKES["repeats_heads_on_the_wire"].failure(example)
        if sent > exact:
            raise MISTAKES["sends_too_many_bytes"].failure(example)
        if sent < exact:
            raise Failure("Fewer bytes travel than K and V hold.", example)

"""Checks of 17.couriers: a backward ring by custom_vjp, what is on its wire, and what a device holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab.course.contract import Check, Failure, Misconception, Stage
from ringlab.course.contracts.e17_bfloat16 import expect_told, narrow_case, verify_narrow
from ringlab.course.contracts.e17_cases import Case, Parts, case, look, shuffled, verify
from ringlab.layout import zigzag

L = 4
MORE = 1.25
"""How many times the scratch memory of 4 devices may be needed on 8: couriers need the same, what keeps blocks half as much again or more."""
MORE_BLOCKS = 0.5
"""And how much more it may be for each further device, in blocks of K: who keeps one needs 1 more, however much is held beside."""
Home = Callable[[int, int, int], int | None]


def _gradients(given: Case, dlse: np.ndarray) -> Parts:
    """All five results with this cotangent of lse, dealt."""
    return tuple(map(given.dealt, (*given.true[:2], *given.gradients(dlse))))


def _sent_home(home: Home) -> Callable[[Case], Parts]:
    """Return a backward in which what device `rank` adds in a step ends up with device home(rank, step, P), or nowhere."""

    def imitate(given: Case) -> Parts:
        P = given.ranks
        out, lse, dq, _, _ = map(given.dealt, given.true)
        total = np.zeros((2, *given.given()[1].shape))
        blocks = [slice(rank * given.length, (rank + 1) * given.length) for rank in range(P)]
        terms = _terms(given)
        for rank in range(P):
            for step in range(P):
                to, origin = home(rank, step, P), (rank - step) % P
                if to is not None:
                    total[:, :, :, blocks[to]] += terms(blocks[rank], blocks[origin])
        return out, lse, dq, total[0], total[1]

    return imitate


def _terms(given: Case) -> Callable[[slice, slice], np.ndarray]:
    """Return a function of queries and keys, dealt: what they add to dk and dv."""
    q, k, v, dout, dlse = (x.astype(np.float64) for x in (*given.given(), *given.cotangents()))
    scale, order = q.shape[-1] ** -0.5, given.positions.ravel()
    out, lse = (given.dealt(x) for x in given.true[:2])
    delta = (dout * out).sum(-1) - dlse
    seen = order[:, None] >= order
    with np.errstate(over="ignore"):
        weights = np.where(seen, np.exp(scale * q @ k.swapaxes(-1, -2) - lse[..., None]), 0.0)
    dscores = weights * (dout @ v.swapaxes(-1, -2) - delta[..., None])

    def of(queries: slice, keys: slice) -> np.ndarray:
        p, ds = (x[:, :, queries, keys].swapaxes(-1, -2) for x in (weights, dscores))
        return np.stack([scale * ds @ q[:, :, queries], p @ dout[:, :, queries]])

    return of


MISTAKES = (
    Misconception(
        "lse_is_a_result_too",
        "The cotangent of lse has no effect. The loss may use lse as well: delta is Σ_d dout·out − dlse.",
        lambda given: _gradients(given, np.zeros(given.dlse.shape)),
    ),
    Misconception(
        "lse_with_the_wrong_sign",
        "The cotangent of lse acts the wrong way round: ds = p · (dout·v − delta), and delta is Σ_d dout·out minus dlse.",
        lambda given: _gradients(given, -given.dlse.double().numpy()),
    ),
    Misconception(
        "against_the_blocks",
        "Couriers travel against K and V: after the first hop a block's terms go into another block's sums. dK and dV travel with the block that they belong to.",
        _sent_home(lambda rank, step, P: (rank + step) % P),
    ),
    Misconception(
        "a_hop_before_home",
        "dK and dV stand one device before home: every device has the gradient of its neighbour's block. K and V need P − 1 hops, couriers P.",
        _sent_home(lambda rank, step, P: (rank - step - 1) % P),
    ),
    Misconception(
        "stays_where_it_was_computed",
        "Each device keeps what it computes for the blocks that come by. Those sums belong to the blocks' owners: send them along.",
        _sent_home(lambda rank, step, P: rank),
    ),
    Misconception(
        "own_pair_only",
        "dK and dV hold the terms of a device's own queries alone. The queries of other devices see this block too.",
        _sent_home(lambda rank, step, P: rank if step == 0 else None),
    ),
    Misconception(
        "own_pair_forgotten",
        "dK and dV lack the terms of a device's own queries: couriers begin with the own pair, not with zeros.",
        _sent_home(lambda rank, step, P: (rank - step) % P if step else None),
    ),
    Misconception(
        "all_four_home",
        "K and V make P hops in the backward, as the couriers do. They are not needed after P − 1: the couriers' last hop stands after the loop, alone.",
    ),
    Misconception(
        "keeps_what_came_by",
        "What a device needs grows with P, and no couriers travel: this is what automatic differentiation makes, by keeping every block, or its weights, where it was met. "
        "Say with jax.custom_vjp what is kept, q, k, v, out and lse, and what is sent.",
    ),
    Misconception(
        "keeps_the_blocks",
        "Couriers travel, but K and V are not sent again in the backward: they were kept, and what a device needs grows with P. Your `keep` did that, or the compiler: "
        "where loops are written out, by Python's `for` or by unroll, it sees the same block sent twice, and keeps it. "
        "jax.vjp inside of `backward` keeps it as well. Keep your own shard alone, and write both rings with lax.scan.",
    ),
    Misconception(
        "writes_out_the_turns",
        "Everything travels as it should, and yet what a device needs grows with P: the loop's turns are written out, by Python's `for` or by unroll, and many of them "
        "are held at once. Use lax.scan, in `backward` and in `ring_forward`, which `keep` runs.",
    ),
    Misconception(
        "rounds_on_the_way",
        "With q, k and v in bfloat16 a result is rounded more often than once: a sum, a term or something kept is stored in the type of q on the way. Keep out, lse, delta, dq, dk and dv "
        "in float32, at every stop, and round the three gradients at the very end. If out or lse is off, 17.forward has it, too.",
    ),
    Misconception(
        "narrow_couriers",
        "With K and V in bfloat16 the couriers are bfloat16 too: their sums are rounded at every stop. Let dK and dV travel in float32, and round once, at home.",
    ),
    Misconception(
        "wide_blocks",
        "With inputs in bfloat16 all that travels is float32: K and V are sent with twice the bytes that they have. Send them as they are, and only the couriers in float32.",
    ),
)  # fmt: skip
NAMED = {mistake.name: mistake for mistake in MISTAKES}


def _verify(subject: Any, *cases: Case) -> None:
    verify(subject, cases, MISTAKES, gradients=True)


def _check_gradients(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, case(rng, zigzag(L * 4, 4)))


def _check_ring(subject: Any, rng: np.random.Generator) -> None:
    given = case(rng, zigzag(L * 4, 4))
    found, P = look(subject, given, NAMED, gradients=True), given.ranks
    enough = 2 * (P - 1) + 2 * (P - 1) + 2 * P
    example = (
        f"{given.text}, forward and backward: {found.messages} messages of a device, {found.blocks:g} blocks; "
        f"{enough} are enough"
    )
    if found.others:
        raise Failure("The compiled step has a collective that brings all blocks to all devices.", example)
    if found.blocks == enough + 2:
        raise NAMED["all_four_home"].failure(example)
    if found.blocks > enough:
        raise Failure(
            "The compiled step sends more than K and V, P − 1 times in each direction of the step, and couriers P times.",
            example,
        )


def _check_held(subject: Any, rng: np.random.Generator) -> None:
    """The same tokens on each device, 4 devices and 8."""
    cases = [case(rng, zigzag(L * P, P)) for P in (4, 8)]
    few, many = (look(subject, given, NAMED, gradients=True) for given in cases)
    block = cases[0].given()[1].nbytes / 4
    if 0 < many.scratch <= min(MORE * few.scratch, few.scratch + 4 * MORE_BLOCKS * block):
        return
    example = (
        f"{L} tokens on each device: {few.scratch:,} bytes of scratch with P=4, {many.scratch:,} with P=8"
    )
    hops = many.blocks / 2  # of K and V; 7 forward, 7 backward, and 8 of the couriers are a ring's
    name = "keeps_what_came_by" if hops <= 14 else "keeps_the_blocks" if hops < 22 else "writes_out_the_turns"
    raise NAMED[name].failure(f"{example}, {many.blocks:g} blocks sent")


def _check_wire(subject: Any, rng: np.random.Generator) -> None:
    """Who brings what it computes straight home sends a courier P − 1 times; nobody less, as P − 1 others wait for it."""
    given = narrow_case(rng, 4)
    found = look(subject, given, NAMED, gradients=True, run=False)
    expect_told(found, given)
    P, types = given.ranks, found.types
    narrow, wide = types.get("bfloat16", 0.0), types.get("float32", 0.0)
    blocks, couriers, fewest = 4 * (P - 1), 2 * P, 2 * (P - 1)
    example = f"{given.text}: {narrow:g} blocks of a device travel in bfloat16, {wide:g} in float32; K and V are {blocks}, dK and dV {couriers}"
    if wide < fewest or (wide < couriers and narrow > blocks):
        raise NAMED["narrow_couriers"].failure(example)
    if narrow == 0 or (wide > couriers and narrow < blocks):
        raise NAMED["wide_blocks"].failure(example)


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    verify_narrow(subject, narrow_case(rng, 8), NAMED, gradients=True)


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Three devices, positions dealt at random."""
    _verify(subject, case(rng, shuffled(rng, 3, L), "dealt at random"))


STAGE = Stage(
    id="17.couriers",
    function="courier_ring",
    title="Couriers by custom_vjp",
    kind="mesh",
    helpers=("ring_forward",),
    hints=(
        "Which arrays of a device's own are enough to compute p again for any block that comes by? And with whom does what is added to a block's gradient have to travel?",
        "keep returns ((out, lse), (q, k, v, out, lse)). The backward begins with attend_backward of the own pair; then lax.scan: shift k, v, dk, dv together, add the "
        "terms; after the loop shift dk and dv once more. delta takes dlse along. Round to q's dtype at the very end.",
        r"$\delta = \sum_d dO \cdot O - d\mathrm{lse}$, $\;2(P-1) + 2(P-1) + 2P$ messages",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("gradients", 3, "visible", "out, lse, dq, dk and dv, with a cotangent of lse", _check_gradients,
              ("lse_is_a_result_too", "lse_with_the_wrong_sign", "against_the_blocks", "a_hop_before_home", "stays_where_it_was_computed", "own_pair_only", "own_pair_forgotten")),
        Check("ring", 2, "visible", "messages of the compiled step", _check_ring, ("all_four_home",), kind="cost"),
        Check("held", 2, "stress", "what a device needs does not grow with P", _check_held, ("keeps_what_came_by", "keeps_the_blocks", "writes_out_the_turns"), kind="cost"),
        Check("bfloat16", 1, "stress", "bfloat16 inputs: gradients rounded once", _check_bfloat16, ("rounds_on_the_way",)),
        Check("wire", 1, "stress", "bfloat16 inputs: couriers in float32, K and V as they are", _check_wire, ("narrow_couriers", "wide_blocks"), kind="cost"),
        Check("any", 1, "held-out", "3 devices, any layout", _check_any, ("a_hop_before_home", "own_pair_forgotten")),
    ),
)  # fmt: skip

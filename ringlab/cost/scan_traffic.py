"""Bytes, messages, rounds, memory and FLOPs of the scans of `ringlab.scan`, and of its halo.

A state has B·H·D·Dv numbers of the state dtype. A transition may travel with it: one number per head, or
under the delta rule a matrix of D × D. Neither depends on the length of the sequence. A rank whose state
includes all earlier tokens sends the state alone, and a rank that does not know the earlier tokens also sends
its transition.

The formulas hold for one document on P ranks that own one stretch each. The backward is like the forward,
but runs from the last rank to the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.sizes import element_bytes
from ringlab.cost.traffic import Traffic, state_bytes
from ringlab.errors import CostError

SCANS = ("relay", "all-gather", "doubling")


@dataclass(frozen=True)
class LinearAttention:
    """One layer: B sequences, H heads of v with Dv numbers, keys of D numbers. delta: the delta rule.

    The defaults are a layer of Qwen3-Next-80B-A3B. Raises: CostError for sizes below one, or an unknown dtype.

    >>> layer = LinearAttention()
    >>> layer.state_bytes, layer.transition_bytes
    (2097152, 2097152)
    """

    B: int = 1
    H: int = 32
    D: int = 128
    Dv: int = 128
    dtype: str = "bfloat16"
    delta: bool = True

    def __post_init__(self) -> None:
        for name in ("B", "H", "D", "Dv"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CostError(f"{name} >= 1, an integer", f"{name}={value!r}")
        element_bytes(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a state: B·H·D·Dv of float32, or float64 for float64."""
        return self.B * self.H * self.D * self.Dv * state_bytes(self.dtype)

    @property
    def transition_bytes(self) -> int:
        """Return the bytes of a transition: B·H numbers, or B·H·D² with the delta rule."""
        return self.B * self.H * (self.D**2 if self.delta else 1) * state_bytes(self.dtype)


def scan_traffic(
    sizes: LinearAttention,
    P: int,
    scan: str = "all-gather",
    *,
    rank: int | None = None,
    backward: bool = False,
    return_state: bool = False,
) -> Traffic:
    """Return the bytes that `rank` sends in one layer, round by round; if None, those of the rank that sends most.

    relay: each rank but the last sends one state to the next rank. all-gather: each rank sends to all later
    ranks.
    doubling: each rank sends to the ranks 1, 2, 4, … places further on. In the last two, a rank sends its
    state alone if the state includes all earlier tokens, and otherwise a state and a transition.
    return_state: the last rank sends the last state to all others; in the backward each of them sends back
    its gradient.
    Raises: CostError for an unknown scan, or ranks below one.

    >>> scan_traffic(LinearAttention(), 8, "relay").total_bytes, scan_traffic(LinearAttention(), 8).total_bytes
    (2097152, 25165824)
    """
    _check(P, scan)
    if rank is None:
        of_ranks = [
            scan_traffic(sizes, P, scan, rank=each, backward=backward, return_state=return_state)
            for each in range(P)
        ]
        return max(of_ranks, key=lambda traffic: traffic.total_bytes)
    turn = P - 1 - rank if backward else rank
    pair, later = sizes.state_bytes + sizes.transition_bytes, P - 1 - turn
    if scan == "relay":
        steps = [sizes.state_bytes] * min(later, 1)
    elif scan == "all-gather":
        steps = [sizes.state_bytes if turn == 0 else pair] * later
    else:
        distances = [1 << n for n in range(rounds(P, scan)) if turn + (1 << n) < P]
        steps = [sizes.state_bytes if turn < distance else pair for distance in distances]
    if return_state:
        steps += [sizes.state_bytes] * (P - 1 if rank == P - 1 and not backward else 0)
        steps += [sizes.state_bytes] * (1 if rank < P - 1 and backward else 0)
    return Traffic(tuple(steps), len(steps))


def rounds(P: int, scan: str = "all-gather") -> int:
    """Return the number of messages, one after the other, before the last rank has its state.

    Raises: CostError for an unknown scan, or ranks below one.

    >>> [rounds(8, scan) for scan in SCANS]
    [7, 1, 3]
    """
    _check(P, scan)
    return {"relay": P - 1, "all-gather": min(1, P - 1), "doubling": (P - 1).bit_length()}[scan]


def passing_bytes(sizes: LinearAttention, P: int, scan: str = "all-gather") -> int:
    """Return the peak bytes for passing states on the rank that needs most: messages, and combined passages.

    A passage is the effect of tokens on a state: a state and a transition. relay: the passage of the rank's
    tokens, the state that enters, and the state that leaves, twice while it is summed. all-gather: on the
    last rank, the messages of all others, and the passage combined from them. doubling: at most 7
    passages on any number of ranks. Tensors that a rank had before, and the outputs, are not counted.
    Raises: CostError for an unknown scan, or ranks below one.
    """
    _check(P, scan)
    state, pair = sizes.state_bytes, sizes.state_bytes + sizes.transition_bytes
    if P == 1:
        return 0
    relay = pair + 3 * state
    if scan == "relay" or P == 2:
        return relay
    if scan == "doubling":
        return 7 * pair
    arrived = state + (P - 2) * pair
    composing = [2 * state] if P == 3 else [pair, pair + 2 * state]
    composing += [2 * pair] * (P > 4)
    return max(relay, arrived + max(composing))


def passage_flops(sizes: LinearAttention, tokens: int, chunk: int = 64) -> int:
    """Return the forward FLOPs by which a rank computes the effect of its tokens on a state: matrix products and solves.

    Each head and chunk of C tokens takes 2·C·D·Dv without the delta rule, to write. With the delta rule, the
    products of keys with keys take 2·C²·D. The state and the transition have W = D + Dv columns, which take
    2·C·D·W to read, C²·W to solve, and 2·C·D·W to write.
    """
    return sizes.B * sizes.H * sum(_passage(sizes, C) for C in _chunks(tokens, chunk))


def attend_flops(sizes: LinearAttention, tokens: int, chunk: int = 64) -> int:
    """Return the FLOPs of a rank's outputs, once the state before its tokens has arrived; linear in its tokens.

    Each head and chunk takes, in addition to writing into Dv columns, 2·C·D·Dv to read the state, 2·C²·D for
    the scores, and 2·C²·Dv for the weighted values.
    """
    D, Dv = sizes.D, sizes.Dv
    read = sum(2 * C * D * Dv + 2 * C * C * (D + Dv) for C in _chunks(tokens, chunk))
    written = sum(_written(sizes, C, Dv) for C in _chunks(tokens, chunk))
    return sizes.B * sizes.H * (read + written)


def scan_flops(sizes: LinearAttention, tokens: int, chunk: int = 64, backward: bool = False) -> int:
    """Return the FLOPs of a layer on a rank of `tokens` tokens: of the effect on a state, and of the outputs.

    The backward takes three times as many: two products for each product of the forward, and the forward again,
    because states inside a shard are not kept.
    """
    whole, rest = divmod(tokens, chunk)
    found = whole * (passage_flops(sizes, chunk, chunk) + attend_flops(sizes, chunk, chunk))
    found += passage_flops(sizes, rest, chunk) + attend_flops(sizes, rest, chunk)
    return found * (3 if backward else 1)


def halo_bytes(B: int, channels: int, kernel: int = 4, dtype: str = "bfloat16") -> int:
    """Return the bytes that a rank sends for a short convolution: kernel − 1 tokens, to the next rank.

    Each rank but the last sends these tokens; in the backward, each rank but the first sends equally many
    gradients. Shards must have at least kernel − 1 tokens.

    >>> halo_bytes(1, channels=2 * 16 * 128 + 32 * 128)  # q, k and v of Qwen3-Next
    49152
    """
    return B * channels * (kernel - 1) * element_bytes(dtype)


def _passage(sizes: LinearAttention, C: int) -> int:
    return _written(sizes, C, sizes.Dv + (sizes.D if sizes.delta else 0))


def _written(sizes: LinearAttention, C: int, columns: int) -> int:
    """Return the FLOPs of writing C tokens into `columns` columns of a state."""
    write = 2 * C * sizes.D * columns
    return write + (2 * C * C * sizes.D + write + C * C * columns if sizes.delta else 0)


def _chunks(tokens: int, chunk: int) -> list[int]:
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]


def _check(P: int, scan: str) -> None:
    if not isinstance(P, int) or isinstance(P, bool) or P < 1:
        raise CostError("ranks >= 1, an integer", f"{P!r}")
    if scan not in SCANS:
        raise CostError(f"one of the scans {', '.join(SCANS)}", repr(scan))

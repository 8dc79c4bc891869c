"""One run of a target as data: its request and its outcome.

All runs are planned before any of them is made, and several checks may judge the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ringlab.conformance.target.claims import BOTTOM_RIGHT, LEFT, PAST
from ringlab.mask import Mask

ANY_LAYOUT = ""
SOME_ROWS = "some rows"
"""The dout of a run with too many tokens to compute all pairs: it is 0 outside of `some_rows`."""
_LISTED = 12
"""The most lengths that a report lists one by one."""
GIVEN = {
    "window": "window", "window_of": "window meaning", "sides": "window sides", "softcap": "softcap", "prefix": "prefix", "documents": "documents",
    "key_documents": "documents of keys", "documents_of": "documents of each sequence", "pads": "padding", "pads_of": "padding of each sequence", "holes": "tokens and padding in turn", "sinks": "sinks",
    "trained": "trained", "alibi": "ALiBi slopes", "bias": "additive bias", "joint": "joint tokens", "keys": "keys",
    "alignment": "aligned", "neutral": "switched off:", "spelled": "causal as", "dv": "head dim of v", "dropout": "dropout",
    "of_keys": "dtypes of k and v", "offset": "positions from", "numbered": "segment ids",
    "turned": "inner heads in reverse order", "slopes_of_each": "slopes of each sequence",
}  # fmt: skip
"""The fields of a run for arguments that only some targets take, and their names in a report."""
NUMBERED = {
    "above 2²⁴": (2**24, 2**24 + 1, 2**24 + 257, 2**24 + 257 + 2**16, 2**25 + 2, 2**25 + 3),
    "above 2³¹": (2**31, 2**31 + 1, 2**31 + 1 + 2**32, 2**31 + 1 + 2**33, 2**40, 2**40 + 1),
    "above 2⁵³": (2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3, 2**62, 2**62 + 1),
    "with gaps": (2, 5, 9, 10, 40, 300),
    "in no order": (5, 2, 9, 300, 0, 7),
}
"""The numbers of documents, by words for a report. Some numbers differ by 1, which float32 or float64 rounds
away. Some differ by a power of 2, which a conversion to 8, 16 or 32 bits cuts off. Ids with gaps, and ids that
do not ascend along the sequence, are found in data sets; code that counts or sorts ids gets them wrong."""
SPELLINGS: dict[str, Callable[[bool], Any]] = {"": bool, "1": int, "numpy.bool_": np.bool_}
"""The forms in which configuration files and arrays give a bool."""
JOINT = 5
"""The number of tokens that are joined to the keys of a run with joint tokens."""
LOSS_SCALE = {"float16": 2.0**8}
"""The factor of a large dout by dtype; it is 2¹⁶ for all other dtypes, which would overflow in float16."""
TWO_RINGS = "two rings"
"""The call pattern in which the even ranks form one ring and the odd ranks another; the odd ring's results
are compared."""
HALF_AFTERWARDS = "half of the ranks afterwards"
"""The call pattern of two rings after a call of all ranks."""
HALVED = (TWO_RINGS, HALF_AFTERWARDS)
TWO_AT_ONCE = "two at once"
"""The call pattern of two calls at the same time in one process, each on a ring of its own."""
SAME_MEMORY = "same memory"
"""The call pattern of a second call with the same tensors, those of arguments too, whose values were changed in
place."""
MANY_MORE_LENGTHS = "many more lengths"
"""The call pattern with so many lengths that a cache with a limit is full; it runs only if memory grows at a
few lengths."""
GROWS = "grows"
"""The kind of note of memory that grows with each length of a call."""
COMPILED = "compiled"
"""The call pattern of a function that torch.compile traces, which takes seconds."""


@dataclass(frozen=True)
class Run:
    """The request of a run: its computation, its ranks, and any fault.

    values: how the inputs are drawn (see `inputs`). strided: how the inputs lie in memory, if not densely (see
    `ringlab.conformance.run.memory_forms`). use: the name of a call pattern (see
    `ringlab.conformance.run.call_patterns`). dlse: whether lse has a gradient too.
    dout: "normal", "ones" or "zeros". "large" is "normal" times 2¹⁶, or 2⁸ in float16. "infinite" is infinite
    in the row in the middle. With "overflowing", and with a large v that comes with it, gradients exceed
    float16. With "last token", "second half" or "some rows", dout is 0 in all other rows, as with masked
    labels. With "some rows", out and lse are compared only in these rows.

    window, softcap, prefix, documents, dropout: arguments of the call; 0 or () if they are not passed.
    window_of: without a causal mask, the meaning of a window of one number (see
    `ringlab.conformance.target.claims`); "" is "both". sides: how many keys before and after its own a row
    sees, −1 for no limit. dropout_seed: the seed that chooses the dropped pairs. documents_of: the lengths of
    the documents of each of B sequences. numbered: the segment ids of the documents, a name in `NUMBERED`, or
    "" for 0, 1 and so on.

    pads: the number of padding tokens after each document, or after the whole sequence; a negative number means
    padding before the sequence. pads_of: the same number for each of B sequences. holes: for each of B
    sequences, the lengths of stretches that are tokens and padding in turn. No row sees padding keys, and
    padding rows have no gradient and are not compared.

    sinks: whether each query head has a logit that takes weight and contributes no value. alibi: if it is not
    0, a score falls by this number times the query head's slope times the distance of the key, in both
    directions. slopes_of_each: whether the slopes of ALiBi differ between the sequences. bias: whether a number
    for each head, query and key is added to the score. turned: whether sinks, slopes or the bias of all heads
    but the first and the last are in reverse order. trained: the argument that needs a gradient, a name in
    `ringlab.conformance.target.argument_names.TRAINED`.

    joint: "front" or "rear", the end at which `JOINT` keys that all ranks hold are joined. keys: the number of
    keys of another sequence, for cross-attention. key_documents: the lengths of the documents of this sequence;
    a document of queries sees the document of keys with the same number. alignment: under a causal mask,
    "bottom-right" if the last query sees all keys, "top-left" if the first query sees the first key alone. dv:
    the head dim of v. keys and dv are 0 if they equal those of the queries. of_keys: the dtypes of k and v, or
    () if they are those of q. offset: the position of the first token, for a target that takes positions.

    strict: whether receive buffers hold NaN until they are waited for. moved: ("token", j) or ("dout", j), the
    token or row whose values are replaced. one_hot: "q", "k", "v" or "dout", the input whose token t becomes
    the unit vector t; D is at least S. twice: whether the call is repeated, to compare the results, and to
    detect changes to those of the first call.
    meter: whether messages, memory and work are counted. fault: the fault of rank 1: "dies", "dies at once",
    "dies in backward", "stalls" or "wrong shape".
    """

    P: int
    S: int
    layout: str
    causal: bool
    H: int = 2
    K: int = 2
    D: int = 16
    B: int = 1
    dtype: str = "float32"
    values: str = "normal"
    seed: int = 0
    backward: bool = True
    scale: float | None = None
    strided: str = ""
    strict: bool = False
    moved: tuple[str, int] | None = None
    one_hot: str = ""
    twice: bool = False
    meter: bool = False
    fault: str = ""
    use: str = ""
    dout: str = "normal"
    dlse: bool = False
    window: int = 0
    softcap: float = 0.0
    prefix: int = 0
    documents: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    sinks: bool = False
    alibi: float = 0.0
    joint: str = ""
    keys: int = 0
    dv: int = 0
    dropout: float = 0.0
    dropout_seed: int = 0
    sides: tuple[int, ...] = ()
    pads_of: tuple[int, ...] = ()
    holes: tuple[tuple[int, ...], ...] = ()
    key_documents: tuple[int, ...] = ()
    documents_of: tuple[tuple[int, ...], ...] = ()
    alignment: str = ""
    bias: bool = False
    trained: str = ""
    neutral: str = ""
    spelled: str = ""
    of_keys: tuple[str, ...] = ()
    offset: int = 0
    window_of: str = ""
    numbered: str = ""
    turned: bool = False
    slopes_of_each: bool = False

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = f"H={self.H}" if self.H == self.K else f"H={self.H}/{self.K}"
        text = f"P={self.P} S={self.S} {heads} D={self.D} {self.dtype} {mask} {self.layout} seed {self.seed}"
        extra = [f"{self.B} sequences"] if self.B > 2 else []
        extra += [self.values] if self.values != "normal" else []
        extra += [f"{self.moved[0]} {self.moved[1]} changed"] if self.moved else []
        extra += [f"{self.one_hot} one-hot"] if self.one_hot else []
        extra += [
            f"{name} {in_words(value)}" for field, name in GIVEN.items() if (value := getattr(self, field))
        ]
        extra += [self.use] if self.use else []
        extra += [self.fault] if self.fault else []
        return ", ".join([text, *extra])

    @property
    def ends(self) -> bool:
        """Return whether the fault of this run ends its processes."""
        return self.fault not in ("", "stalls")

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one rank's K and V together."""
        return 2 * self.B * self.K * (self.S // self.P) * self.D * getattr(torch, self.dtype).itemsize

    @property
    def mask(self) -> Mask:
        """Return the mask of this run's sequence."""
        return Mask(self.causal, self.window or None, self.prefix, self.padded)

    @property
    def padded(self) -> tuple[int, ...]:
        """Return the lengths of the documents and of the padding after each, as separate documents."""
        if not self.pads:
            return self.documents
        if self._front:
            return -self.pads[0], self.S + self.pads[0]
        documents = self.documents or (self.S - sum(self.pads),)
        return tuple(length for pair in zip(documents, self.pads, strict=True) for length in pair)

    @property
    def _front(self) -> bool:
        return bool(self.pads) and self.pads[0] < 0

    @property
    def with_padding(self) -> tuple[int, ...]:
        """Return the lengths of the documents, each including its padding; () if there is one document."""
        pads = self.pads if self.documents and self.pads else [0] * len(self.documents)
        return tuple(map(sum, zip(self.documents, pads, strict=True)))

    @property
    def padding(self) -> Bool[np.ndarray, " S"]:
        """Return a mask of the padding tokens."""
        if not self.pads:
            return np.zeros(self.S, bool)
        odd = np.arange(len(self.padded)) % 2 == 1
        return np.repeat(odd != self._front, self.padded)

    @property
    def any_padding(self) -> bool:
        """Return whether there are padding tokens."""
        return bool(self.pads or self.pads_of or self.holes)

    @property
    def padded_tokens(self) -> Bool[np.ndarray, "_ S"]:
        """Return a mask of the padding tokens of each sequence, or one row for all sequences."""
        if self.holes:
            return np.stack([np.repeat(np.arange(len(each)) % 2 == 1, each) for each in self.holes])
        if not self.pads_of:
            return self.padding[None]
        at = np.arange(self.S)
        return np.stack([at < -pad if pad < 0 else at >= self.S - pad for pad in self.pads_of])

    def visible(self, keys: int = 0) -> Bool[np.ndarray, "_ 1 S keys"]:
        """Return which keys each row sees, for each sequence or for all. keys: their number, if it is not the run's."""
        rows, columns = np.arange(self.S), np.arange(keys or self.keys or self.S)
        i, j = rows[:, None], columns[None]
        if self.key_documents:
            of_rows, of_keys = (
                Mask(False, documents=lengths).document_of(at)
                for lengths, at in ((self.documents, rows), (self.key_documents, columns))
            )
            seen = of_rows[:, None] == of_keys
        elif self.alignment:
            seen = j <= i + (len(columns) - self.S if self.alignment == BOTTOM_RIGHT else 0)
        else:
            one_sided = self.window_of in (LEFT, PAST)
            seen = (replace(self, window=0) if one_sided else self).mask.visible(rows, columns)
            if one_sided:
                seen = seen & (i - j < self.window) & ((j <= i) | (self.window_of == LEFT))
        if self.sides:
            left, right = (side if side >= 0 else len(columns) + self.S for side in self.sides)
            seen = seen & (i - j <= left) & (j - i <= right)
        seen = seen[None]
        if self.documents_of:
            ids = self.ids
            seen = seen & (ids[:, :, None] == ids[:, None])
        if self.pads_of or self.holes:
            padding = self.padded_tokens
            seen = seen & (padding[:, :, None] == padding[:, None])
        return seen[:, None]

    @property
    def ids(self) -> Int[np.ndarray, "_ S"]:
        """Return the number of each token's document, for each sequence or in one row for all."""
        packings = self.documents_of or (self.documents or (self.S,),)
        return np.stack([Mask(documents=lengths).document_of(np.arange(self.S)) for lengths in packings])

    @property
    def plain(self) -> Run:
        """Return the plain run with the same true result and the same bounds."""
        return replace(
            self, P=1, layout=ANY_LAYOUT, backward=True, strided="", strict=False,
            twice=False, meter=False, fault="", use="", dropout=0.0, dropout_seed=0, neutral="", spelled="",
            offset=0,
        )  # fmt: skip


def in_words(value: Any) -> str:
    """Return the value of an argument for a report, which counts lengths that are too many to list.

    >>> in_words((3, 5)), in_words((1,) * 300)
    ('(3, 5)', '(1, 1, 1, …), 300 of them')
    """
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return f"({', '.join(map(in_words, value))})"
    if not isinstance(value, tuple) or len(value) <= _LISTED:
        return str(value)
    return f"({', '.join(map(str, value[:3]))}, …), {len(value)} of them"


@dataclass(frozen=True)
class Trouble:
    """The reason why a run has no result: it hung, crashed, raised, printed endlessly, or returned something else.

    uncallable: whether Python refused the arguments of the call.
    """

    kind: str
    text: str
    uncallable: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind

    @property
    def refuses(self) -> bool:
        """Return whether this may be a refusal: an error other than those that only a mistake raises."""
        return self.kind == RAISED and not self.text.startswith(NO_REFUSALS)


NO_REFUSALS = ("DeadlockError", "IndexError", "KeyError", "ZeroDivisionError")
"""Errors that are never a refusal of an argument. PeerDiedError may follow from another rank's refusal."""


@dataclass(frozen=True)
class Meter:
    """One rank's messages, memory and computation in one pass.

    sent: the number of bytes sent. exchanges: the number of sends. peers: the ranks that messages went to.
    peak, largest: the bytes of all tensors at the peak, and of the largest tensor. flops: the FLOPs of matrix
    products and attention operators, 0 if none were seen. collectives: the names of torch.distributed's
    collectives. sends_queries: whether the rank sent its own q. sizes: the bytes of the smallest and
    of the largest message.
    """

    sent: int = 0
    exchanges: int = 0
    peers: tuple[int, ...] = ()
    peak: int = 0
    largest: int = 0
    flops: int = 0
    collectives: tuple[str, ...] = ()
    sends_queries: bool = False
    sizes: tuple[int, int] = (0, 0)


@dataclass
class RankResult:
    """One rank's results: float64 arrays (B, H, L, D) by name, its tokens' positions, and observations.

    key_positions: the positions of its keys; they differ from `positions` if the keys are of another
    sequence. of_trained: the gradient of the trained argument, if autograd returned one.
    """

    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    key_positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    forward: Meter | None = None
    backward: Meter | None = None
    trouble: Trouble | None = None
    seconds: float = 0.0
    of_trained: np.ndarray | None = None


@dataclass
class Ran:
    """A run and its outcome: whole arrays by name, notes (kind, text) of all ranks, positions and meters per rank.

    returned: the ranks on which the target returned anything, whether it is an attention or not. failed: the
    rank that failed first, −1 if unknown. spared: whether rank 1 was never killed, because it did not send
    the message at which it should die. stopped: if no rank reported an error, the ranks that continued
    without rank 1 until their processes were ended. of_trained: each rank's gradient of the trained argument.
    """

    run: Run
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    forward: list[Meter] = field(default_factory=list)
    backward: list[Meter] = field(default_factory=list)
    trouble: Trouble | None = None
    returned: tuple[int, ...] = ()
    failed: int = -1
    spared: bool = False
    stopped: tuple[int, ...] = ()
    seconds: float = 0.0
    of_trained: list[np.ndarray | None] = field(default_factory=list)

    def noted(self, kind: str) -> list[str]:
        """Return the notes of one kind."""
        return [text for its, text in self.notes if its == kind]


RAISED = "raised"
HUNG, SLOW = "hung", "over the limit"
"""The kinds of trouble of a run that reached its time limit: every rank waits for another one, or some rank
does not wait."""
ENDLESS = (HUNG, SLOW)
WRONG_RESULT = "wrong result"
"""The kind of trouble of a target that returns something other than attention."""


def gave(parts: Sequence[RankResult | None]) -> tuple[int, ...]:
    """Return the ranks on which the target ended without an error of its own, whatever it returned."""
    return tuple(
        rank
        for rank, part in enumerate(parts)
        if part is not None and (part.trouble is None or part.trouble.kind == WRONG_RESULT)
    )


def join(run: Run, parts: list[RankResult]) -> Ran:
    """Return the run with whole results, joined from the results of all ranks in rank order."""
    ran = Ran(run, returned=gave(parts))
    ran.seconds = max(part.seconds for part in parts)
    ran.trouble = next((part.trouble for part in parts if part.trouble is not None), None)
    ran.notes = [note for part in parts for note in part.notes]
    ran.forward = [part.forward for part in parts if part.forward is not None]
    ran.backward = [part.backward for part in parts if part.backward is not None]
    if ran.trouble is not None:
        return ran
    ran.positions = [part.positions for part in parts]
    ran.of_trained = [part.of_trained for part in parts]
    for name, first in parts[0].arrays.items():
        of_keys = bool(run.keys) and name in ("dk", "dv")
        whole = np.full((*first.shape[:2], run.keys if of_keys else run.S, *first.shape[3:]), np.nan)
        for part in parts:
            whole[:, :, part.key_positions if of_keys else part.positions] = part.arrays[name]
        ran.arrays[name] = whole
    return ran


VALUES = {
    "normal": "",
    "large": "q = q * 60.0",
    "rising": "q[..., 0], k[..., 0] = 4.0 * D**0.5, 24.0 * np.linspace(-1.0, 1.0, S)",
    "falling": "q[..., 0], k[..., 0] = 4.0 * D**0.5, 24.0 * np.linspace(1.0, -1.0, S)",
    "gently rising": "q[..., 0], k[..., 0] = 4.0 * D**0.5, 4.5 * np.linspace(-1.0, 1.0, S)",
    "negative": "q[..., 0], k[..., 0] = 128.0 * D**0.5, -128.0",
    "NaN in a key": "k[..., S // 2, :] = np.nan",
    "zeros": "q[..., 1::5, :], k[..., S // 3 : S - S // 4, :], v[..., 2::7, :] = 0.0, 0.0, 0.0",
    "equal heads": "k[...], v[...] = k[:, :1].copy(), v[:, :1].copy()",
    "stepped": "q[...], k[..., 0] = 0.0, 16.0 + np.round(k[..., 0]).clip(-8, 7) / 8; q[..., 0] = 8.0 * D**0.5",
}
"""How each kind of values is made from standard normal q, k and v, as a line of the program that `--script` writes.

"large": scores of some hundreds. "rising" and "falling": scores that grow or shrink with the key's position, so that
each later block has a larger or smaller maximum. "gently rising": on three ranks, the maxima of blocks differ by about 12,
so that each block still counts in float32. "negative": all scores about −16,000, as if by a bias, which is
below the numbers that some code uses for −∞. "zeros": rows of q and v, and a stretch of k, are 0, as after a gate.
"equal heads": all heads of k, and of v, are the same. "stepped": scores that are whole numbers near 128. If D is a power of 4, half
dtypes compute them exactly, while an lse of such a size loses its fraction in them.
"""


def inputs(run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout of the whole sequence, in the run's dtypes, the same for equal runs."""
    sizes = [run.S, run.H, run.K, run.D, run.B, run.seed]
    draw = np.random.default_rng(sizes).standard_normal
    rows, keys = (run.B, run.H, run.S), (run.B, run.K, run.keys or run.S)
    dims = (run.D, run.D, run.dv or run.D, run.dv or run.D)
    q, k, v, dout = (draw((*x, dim)) for x, dim in zip((rows, keys, keys, rows), dims, strict=True))
    names: dict[str, Any] = {"np": np, "q": q, "k": k, "v": v, "D": run.D, "S": run.S}
    exec(VALUES[run.values], names)
    q, k = names["q"], names["k"]
    large = LOSS_SCALE.get(run.dtype, 2.0**16)
    overflowing = dout * 2.0**13
    v = v * 32.0 if run.dout == "overflowing" else v
    at = np.arange(run.S)[:, None]
    infinite = np.where(at == run.S // 2, np.inf, dout)
    dout = {
        "normal": dout, "ones": np.ones_like(dout), "zeros": 0.0 * dout, "large": dout * large, "infinite": infinite,
        "overflowing": overflowing, "last token": np.where(at == run.S - 1, dout, 0.0),
        "second half": np.where(at >= run.S // 2, dout, 0.0), SOME_ROWS: np.where(np.isin(at, some_rows(run)), dout, 0.0),
    }[run.dout]  # fmt: skip
    dout[_in_padding(run)] = 0.0
    q, k, v, dout = _moved(run, q, k, v, dout)
    if run.one_hot:
        # The factor √D in q or k gives scores a deviation of about 1, so no weight is too small to be
        # visible.
        size = run.D**0.5 if run.one_hot in ("q", "k") else 1.0
        {"q": q, "k": k, "v": v, "dout": dout}[run.one_hot][...] = size * np.eye(run.S, run.D)
    dtypes = (run.dtype, *(run.of_keys or (run.dtype, run.dtype)), run.dtype)
    tensors = [
        torch.from_numpy(x).to(getattr(torch, dtype))
        for x, dtype in zip((q, k, v, dout), dtypes, strict=True)
    ]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def some_rows(run: Run) -> Int[np.ndarray, " rows"]:
    """Return the rows of a long run that are compared: around the ends of shards and powers of two, and some between."""
    ends = [0, run.S // 2, run.S, *(2**power for power in range(8, 15))]
    near = {end + step for end in ends for step in (-2, -1, 0, 1)} | {*range(0, run.S, max(1, run.S // 60))}
    return np.array(sorted(row for row in near if 0 <= row < run.S))


def second_gradients(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return the second gradients by autograd: those of Σ x · x₀, over x in (dq, dk, dv), with respect to q, k and v.

    x₀ has the values of x, and is treated as a constant.
    """
    *qkv, dout = (x.double() for x in inputs(run))
    q, k, v = (x.requires_grad_() for x in qkv)
    groups = run.H // run.K
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ keys.mT) * (run.D**-0.5 if run.scale is None else run.scale)
    scores = scores.masked_fill(
        ~torch.from_numpy(np.broadcast_to(run.visible(), scores.shape).copy()), -torch.inf
    )
    first = torch.autograd.grad(scores.softmax(-1) @ values, (q, k, v), dout, create_graph=True)
    loss = torch.stack([(x * x.detach()).sum() for x in first]).sum()
    second = torch.autograd.grad(loss, (q, k, v))
    return second[0], second[1], second[2]


def sinks_of(run: Run) -> Float[Tensor, " H"]:
    """Return the sinks of a run in the run's dtype."""
    draw = np.random.default_rng([run.H, run.seed, 2]).standard_normal(run.H)
    return torch.from_numpy(draw)[_heads(run)].to(getattr(torch, run.dtype))


def _heads(run: Run) -> list[int]:
    """Return the order of the query heads in arguments with a value for each."""
    first, *inner, last = range(run.H)
    return [first, *inner[::-1], last] if run.turned else [*range(run.H)]


def slopes_of(run: Run) -> Float[Tensor, "*B H"]:
    """Return the float32 slopes of ALiBi, one for each query head, which are powers of 2 as in models.

    If they differ between sequences, each sequence has half of those of the sequence before it.
    """
    slopes = torch.tensor([run.alibi * 2.0 ** -(1 + head % 4) for head in _heads(run)])
    return torch.stack([slopes * 2.0**-batch for batch in range(run.B)]) if run.slopes_of_each else slopes


def bias_of(run: Run) -> Float[Tensor, "B H S S"]:
    """Return the numbers that a run adds to the scores, in the run's dtype."""
    draw = np.random.default_rng([run.S, run.H, run.B, run.seed, 4]).standard_normal(
        (run.B, run.H, run.S, run.S)
    )
    return torch.from_numpy(2 * draw)[:, _heads(run)].to(getattr(torch, run.dtype))


def joint_of(run: Run) -> tuple[Float[Tensor, "B K joint D"], Float[Tensor, "B K joint D"]]:
    """Return the joint keys and values of a run, which every rank holds."""
    draw = np.random.default_rng([run.K, run.D, run.B, run.seed, 3]).standard_normal
    k, v = (torch.from_numpy(draw((run.B, run.K, JOINT, run.D))) for _ in range(2))
    return k.to(getattr(torch, run.dtype)), v.to(getattr(torch, run.dtype))


def cotangent_of_lse(run: Run) -> Float[Tensor, "B H S"]:
    """Return the gradient of the loss with respect to lse, (B, H, S), in the dtype of lse."""
    draw = np.random.default_rng([run.S, run.H, run.B, run.seed, 1]).standard_normal((run.B, run.H, run.S))
    draw[_in_padding(run)] = 0.0
    dtype = torch.promote_types(getattr(torch, run.dtype), torch.float32)
    return torch.from_numpy(draw).to(dtype)


def _in_padding(run: Run) -> Bool[np.ndarray, "B H S"]:
    return np.broadcast_to(run.padded_tokens[:, None], (run.B, run.H, run.S))


def _moved(run: Run, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the arrays with token j of q, k and v, or row j of dout, replaced."""
    if run.moved is None:
        return list(arrays)
    what, j = run.moved
    chosen = (0, 1, 2) if what == "token" else (3,)
    for index in chosen:
        arrays[index][..., j, :] = 3.0 - 2.0 * arrays[index][..., j, :]
    return list(arrays)

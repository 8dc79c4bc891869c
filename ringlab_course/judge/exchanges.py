"""Read and check each rank's exchanges and computations, and count the bytes that arrive at the judge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ringlab.comm.protocol import CONTROL
from ringlab.comm.trace import Exchange, union
from ringlab.comm.virtual.waiting import Half
from ringlab.errors import RinglabError
from ringlab_course.checking.protocol import ITEMSIZE, Frame, ProtocolError
from ringlab_course.judge.process import Endless

EXCHANGES = 100_000  # the maximum for one rank in one run
SIZE_BYTES = 8
"""Bytes that count for one number of a shape, or of a clock."""
FORM_BYTES = 1 << 10
"""Bytes of the judge's memory for each exchange, tensor or computation, without the tensors' data."""


@dataclass
class Form:
    """The dtype and shape of a tensor at one end of a message.

    `data` is the tensor, at the sending end only.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(eq=False)
class Posted:
    """One exchange of one rank, with the fields that `ringlab.comm.virtual.waiting` needs.

    data_as_control: whether it sends bytes other than zero under a tag that meters leave out. Barriers send
    only zeros.
    told: bytes that count as sent in addition to its data: its tag and shapes if they appear in another rank's
    error, and clock readings, which reveal how long other ranks took.
    in_vain: whether waiting for it raises TransportTimeout, as if no message came in time.
    """

    rank: int
    index: int
    tag: str
    to: int | None
    source: int | None
    posted: float
    sent: int
    received: int
    shapes: tuple[tuple[int, ...], ...]
    waited: float = 0.0
    arrival: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    error: RinglabError | None = None
    open_ends: list[Half] = field(default_factory=list)
    arrived: dict[int, Any] = field(default_factory=dict)
    data_as_control: bool = False
    told: int = 0
    in_vain: bool = False

    @property
    def form_bytes(self) -> int:
        """The bytes of the judge's memory that this exchange takes until the run ends."""
        return FORM_BYTES * (1 + len(self.open_ends))

    @property
    def done(self) -> bool:
        """Whether all its messages have been matched, or one of them does not match."""
        return not self.open_ends or self.error is not None

    def fail(self, error: RinglabError, form: Form) -> None:
        """Make waiting for this exchange raise `error`.

        The error that the other rank gets contains this exchange's tag and the shape of `form`, so these count
        as sent data.
        """
        self.error = error
        self.tell(len(self.tag.encode()) + SIZE_BYTES * len(form.shape))

    def tell(self, nbytes: int = SIZE_BYTES) -> None:
        """Count `nbytes` more bytes as sent data; the default is one number."""
        self.told, self.data_as_control = self.told + nbytes, True

    def event(self) -> Exchange:
        """Return this exchange in the form of the trace."""
        return Exchange(
            self.rank,
            self.index,
            self.tag,
            self.to,
            self.source,
            self.sent + self.told,
            self.received,
            self.shapes,
            self.posted,
            self.waited,
            max(self.arrival, self.waited),
            transit=union(self.spans) if self.spans else None,
        )


def read_exchange(frame: Frame, rank: int, world_size: int, index: int, now: float) -> Posted:
    """Return the `index`-th exchange of `rank`, with all of its messages still unmatched.

    Raises: ProtocolError unless the frame holds tensors and valid ranks, shapes and dtypes; Endless if the
    rank has made too many exchanges.
    """
    if index >= EXCHANGES:
        raise Endless("a program that ends", f"one rank made more than {EXCHANGES} exchanges")
    fields, tensors = _checked(frame, world_size, index)
    wanted = [Form(dtype, tuple(shape)) for dtype, shape in fields["receive"]]
    sent = [Form(str(t.dtype).removeprefix("torch."), tuple(t.shape), t) for t in tensors]
    to: Any = fields.get("to")
    source: Any = fields.get("source")
    posted = Posted(
        rank,
        index,
        fields["tag"],
        to,
        source,
        now,
        sum(t.nbytes for t in tensors),
        sum(f.nbytes for f in wanted),
        tuple(f.shape for f in sent),
    )
    posted.data_as_control = posted.tag.startswith(CONTROL) and any(
        bool(t.reshape(-1).view(torch.uint8).any()) for t in tensors if t.numel()
    )
    # A Half reads only the shape and dtype of its tensor, so a form can take the tensor's place.
    posted.open_ends = [Half(posted, rank, to, cast(Tensor, form), i, True) for i, form in enumerate(sent)]
    posted.open_ends += [
        Half(posted, rank, source, cast(Tensor, form), i, False) for i, form in enumerate(wanted)
    ]
    return posted


def read_label(frame: Frame, count: int) -> str:
    """Return the label of the computation that a rank begins after `count` events.

    Raises: ProtocolError unless the label is a short text; Endless if the rank has made too many
    computations.
    """
    label: Any = frame.fields.get("label")
    if count > 2 * EXCHANGES:
        raise Endless("a program that ends", f"one rank made more than {EXCHANGES} computations")
    if not isinstance(label, str) or len(label) > 200:
        raise ProtocolError("a computation with a short label", "something else")
    return label


def _checked(frame: Frame, world_size: int, index: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the fields and tensors of an exchange. Raises: ProtocolError if one of them is invalid."""
    fields, tensors = frame.fields, frame.value
    wanted = fields.get("receive")
    ok = (
        is_integer(fields.get("index"))
        and fields["index"] == index
        and isinstance(fields.get("tag"), str)
        and len(fields["tag"]) <= 200
        and isinstance(tensors, tuple)
        and all(hasattr(t, "is_floating_point") for t in tensors)
        and isinstance(wanted, list)
        and len(wanted) <= 512
        and all(map(_is_form, wanted))
        and all(
            _is_rank(fields.get(n), world_size, bool(part))
            for n, part in (("to", tensors), ("source", wanted))
        )
    )
    if not ok:
        raise ProtocolError("an exchange of tensors with a rank", "something else")
    return fields, tensors


def _is_form(form: Any) -> bool:
    if not (isinstance(form, list) and len(form) == 2 and isinstance(form[0], str) and form[0] in ITEMSIZE):
        return False
    return (
        isinstance(form[1], list)
        and len(form[1]) <= 8
        and all(is_integer(n) and 0 <= n < 1 << 40 for n in form[1])
    )


def _is_rank(peer: Any, world_size: int, needed: bool) -> bool:
    return not needed if peer is None else is_integer(peer) and 0 <= peer < world_size


def is_integer(value: Any) -> bool:
    """Return whether `value` is an int and not a bool."""
    return type(value) is int

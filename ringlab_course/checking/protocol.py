"""The frames between judge and worker: a length, a JSON header, raw array bytes. Nothing is ever unpickled.

    4 bytes   length of the header, little endian
    header    JSON object: kind, fields, value, arrays [{dtype, shape, torch, grad}]
    payload   the arrays' bytes, C order, in the order of `arrays`, each at a multiple of 16 bytes

A value is a tree of None, bool, int, float, str, lists, tuples, sets, dicts, layouts, arrays and NumPy's
numbers. There is no field for a verdict. A frame that breaks a rule raises ProtocolError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from ringlab.errors import CourseError
from ringlab.layout import Layout, Run

Buffer = bytes | memoryview
LENGTH = struct.Struct("<I")
ALIGNMENT = 16
ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""The dtypes that a frame may contain, and their bytes per item."""
MESSAGES = ("exchange", "received")
"""Kinds of frames that carry messages between ranks. Only these may contain complex numbers."""
QUESTIONS = ("arguments",)  # kinds of frames whose values may contain layouts
SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": (list, range), "set": (set, frozenset)}
# The most entries of a set or dict: building a larger one from keys with equal hashes could take hours.
MOST_DISTINCT = 10_000
SPEC = {"dtype", "shape", "torch", "grad"}


class ProtocolError(CourseError):
    """A frame breaks the protocol. No more frames of its sender are read."""


@dataclass(frozen=True)
class Limits:
    """The limits of one frame; sizes are in bytes."""

    header: int = 1 << 20
    array: int = 1 << 28
    total: int = 1 << 29
    arrays: int = 512
    dimensions: int = 8
    depth: int = 12


@dataclass
class Frame:
    """One message: its kind, small JSON fields, and a value that may hold arrays."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    value: Any = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays in `value`; an array that occurs twice counts once."""
        return sum({id(array): array.nbytes for array in _arrays(self.value)}.values())


LIMITS = Limits()


def pack(frame: Frame, limits: Limits = LIMITS) -> list[Buffer]:
    """Return the bytes of `frame` as parts; arrays are not copied.

    Raises: ProtocolError if the protocol cannot carry the frame.
    """
    encoder = _Encoder(limits, frame.kind)
    value = encoder.node(frame.value, 0)
    document = {"kind": frame.kind, "fields": frame.fields, "value": value, "arrays": encoder.specs}
    header = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    _require(
        len(header) <= limits.header,
        f"a header of at most {limits.header} bytes",
        f"one of {len(header)} bytes",
    )
    _require(
        encoder.total <= limits.total,
        f"at most {limits.total} bytes of arrays",
        f"arrays of {encoder.total} bytes",
    )
    return [LENGTH.pack(len(header)) + header, *encoder.payload]


def carried(answer: Any) -> Any:
    """Return an answer as it would reach the judge, so that notebook and judge accept the same answers.

    Raises: ProtocolError if the protocol cannot carry the answer; its `got` names the part.
    """
    (frame,) = FrameReader().feed(b"".join(pack(Frame("result", {}, answer))))
    return frame.value


class FrameReader:
    """Turns bytes, which arrive in pieces of any size, into frames.

    Memory grows with the bytes that arrived, and never with the sizes that a header claims.
    """

    def __init__(self, limits: Limits = LIMITS, *, from_judge: bool = False) -> None:
        self.limits, self.from_judge = limits, from_judge
        self.buffer = bytearray()
        self.header: dict[str, Any] | None = None
        self.needed = LENGTH.size
        self.broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return the frames that `data` completes. Raises: ProtocolError for or after a malformed frame."""
        _require(not self.broken, "a sender that kept to the protocol", "bytes after a malformed frame")
        self.buffer += data
        frames = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except ProtocolError:
            self.broken = True
            self.buffer.clear()
            raise
        return frames

    @property
    def unparsed(self) -> int:
        """The number of buffered bytes of an incomplete frame."""
        return len(self.buffer) + (self.header is not None)

    def _next(self) -> Frame | None:
        if self.header is None:
            if len(self.buffer) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack_from(self.buffer)
            most = self.limits.header
            _require(0 < length <= most, f"a header of 1 to {most} bytes", f"one of {length} bytes")
            if len(self.buffer) < LENGTH.size + length:
                return None
            text = bytes(self.buffer[LENGTH.size : LENGTH.size + length])
            del self.buffer[: LENGTH.size + length]
            self.header = _parse_header(text, self.limits)
            self.needed = _payload_bytes(self.header["arrays"])
            # The copy is aligned again. A buffer that contains further frames is not copied, because each
            # frame would copy all bytes after it.
            if len(self.buffer) <= self.needed:
                self.buffer = bytearray(self.buffer)
        if len(self.buffer) < self.needed:
            return None
        if len(self.buffer) == self.needed:  # the usual case: the arrays use this memory without a copy
            payload, self.buffer = self.buffer, bytearray()
        else:
            payload = self.buffer[: self.needed]
            del self.buffer[: self.needed]
        header, self.header = self.header, None
        return _decode(header, payload, self.limits, self.from_judge)


class _Encoder:
    """Turns a value into JSON, and its arrays into `specs` and `payload`."""

    def __init__(self, limits: Limits, kind: str) -> None:
        self.limits, self.kind = limits, kind
        self.specs: list[dict[str, Any]] = []
        self.payload: list[Buffer] = []
        self.total = 0

    def node(self, value: Any, depth: int) -> Any:
        _require(depth <= self.limits.depth, f"at most {self.limits.depth} levels deep", "a deeper value")
        if value is None or type(value) in (bool, float, str):
            return value
        if isinstance(value, np.generic) and not isinstance(value, str):
            return {"scalar": self._array(np.asarray(value))}
        if isinstance(value, np.ndarray) or _is_tensor(value):
            return {"array": self._array(value)}
        exactly: dict[type, Any] = {int: int.__int__, float: float.__float__, str: str.__str__}
        for plain, convert in exactly.items():
            if isinstance(value, plain):  # an enumeration or a version is sent as its number or text
                return _in_64_bits(convert(value))
        if isinstance(value, (Decimal, numbers.Rational)):  # for example a Fraction
            return _number(value)
        if isinstance(value, Layout) and self.kind in QUESTIONS:
            runs = [[[run.start, run.step, run.length] for run in rank] for rank in value.ranks]
            return {"layout": {"S": value.S, "P": value.P, "name": value.name, "runs": runs}}
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Layout)):
            value = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
        if isinstance(value, (set, frozenset, dict)):
            _require_keys(value)
        if isinstance(value, dict):
            pairs = value.items()
            return {"dict": [[self.node(key, depth + 1), self.node(item, depth + 1)] for key, item in pairs]}
        for kind, types in SEQUENCES.items():
            if isinstance(value, types):
                return {kind: [self.node(item, depth + 1) for item in value]}
        needed = "arrays, numbers, text, None, or lists, tuples, sets or dicts"
        raise ProtocolError(needed, f"a {type(value).__name__}")

    def _array(self, value: Any) -> int:
        _require(
            len(self.specs) < self.limits.arrays,
            f"at most {self.limits.arrays} arrays",
            f"more than {self.limits.arrays} arrays",
        )
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.dtype.itemsize > 8:
            value = value.astype(np.float64)  # a longdouble, which a frame cannot hold
        dtype = _dtype(value)
        known = _passes(dtype, self.kind) and getattr(value.dtype, "isnative", True)
        _require(known, f"an array of {', '.join(ITEMSIZE)}", f"an array of {dtype}")
        reach, most = _reach(value.shape, dtype), self.limits.dimensions
        _require(
            reach <= self.limits.array,
            f"arrays of at most {self.limits.array} bytes",
            f"an array of {reach} bytes",
        )
        _require(
            len(value.shape) <= most,
            f"at most {most} dimensions",
            f"an array of {len(value.shape)} dimensions",
        )
        data = _tensor_bytes(value) if _is_tensor(value) else _array_bytes(value)
        self.specs.append({"dtype": dtype, "shape": list(value.shape), **_flags(value)})
        self.payload += [data, bytes(_padded(data.nbytes) - data.nbytes)]
        self.total += _padded(data.nbytes)
        return len(self.specs) - 1


def _parse_header(text: bytes, limits: Limits) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"))
        # refuses lone surrogates, because they cannot be printed
        json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # also Unicode errors, and numbers of too many digits
        raise ProtocolError("a header that is JSON", type(error).__name__) from None
    _require(isinstance(header, dict), "a header that is an object", type(header).__name__)
    parts = ("kind", "fields", "value", "arrays")
    _require(set(header) == {*parts}, ", ".join(parts), "other keys")
    _require(
        isinstance(header["kind"], str) and len(header["kind"]) <= 32,
        "a kind of at most 32 characters",
        "a longer one, or no text",
    )
    _require(isinstance(header["fields"], dict), "fields that are an object", "fields of another type")
    specs = header["arrays"]
    few = isinstance(specs, list) and len(specs) <= limits.arrays
    _require(few, f"at most {limits.arrays} arrays", "more arrays, or no list")
    for spec in specs:
        _check_spec(spec, limits)
        _require(_passes(spec["dtype"], header["kind"]), "real numbers", "complex ones")
    total = _payload_bytes(specs)
    _require(total <= limits.total, f"at most {limits.total} bytes of arrays", f"arrays of {total} bytes")
    return header


def _check_spec(spec: Any, limits: Limits) -> None:
    _require(isinstance(spec, dict) and set(spec) == SPEC, ", ".join(sorted(SPEC)), "other keys")
    _require(
        isinstance(spec["dtype"], str) and spec["dtype"] in ITEMSIZE, "a known dtype", "an unknown dtype"
    )
    _require(
        type(spec["torch"]) is bool and type(spec["grad"]) is bool, "flags: true or false", "other values"
    )
    _require(spec["torch"] or spec["dtype"] != "bfloat16", "bfloat16 in torch only", "bfloat16 in NumPy")
    shape = spec["shape"]
    few = isinstance(shape, list) and len(shape) <= limits.dimensions
    _require(few, "a shape of few dimensions", "more dimensions, or no list")
    _require(all(type(n) is int and 0 <= n <= limits.array for n in shape), "lengths from 0", "other lengths")
    reach = _reach(shape, spec["dtype"])
    _require(reach <= limits.array, f"arrays of at most {limits.array} bytes", "a larger array")


def _reach(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes that an array of this shape would take if each length of 0 were 1.

    NumPy and torch cannot make an array of shape (0, 2**28, 2**28, 2**28), although it holds no bytes.
    """
    return math.prod(max(1, length) for length in shape) * ITEMSIZE[dtype]


def _nbytes(spec: dict[str, Any]) -> int:
    return math.prod(spec["shape"]) * ITEMSIZE[spec["dtype"]]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _payload_bytes(specs: Sequence[dict[str, Any]]) -> int:
    return sum(_padded(_nbytes(spec)) for spec in specs)


def _decode(header: dict[str, Any], payload: bytearray, limits: Limits, from_judge: bool) -> Frame:
    arrays, start = [], 0
    for spec in header["arrays"]:
        array = _array_from(spec, memoryview(payload)[start : start + _nbytes(spec)])
        arrays.append(array.requires_grad_() if from_judge and spec["torch"] and spec["grad"] else array)
        start += _padded(_nbytes(spec))
    value = _value(header["value"], arrays, 0, limits, from_judge)
    return Frame(header["kind"], header["fields"], value)


def _array_from(spec: dict[str, Any], data: memoryview) -> Any:
    dtype, shape = spec["dtype"], tuple(spec["shape"])
    if spec["torch"] and 0 in shape:
        # A new tensor, because an empty tensor in the frame would have the same address as the next array,
        # and Triton's interpreter tells tensors apart by their addresses.
        return _torch().empty(shape, dtype=getattr(_torch(), dtype))
    if dtype == "bool":
        items = np.frombuffer(data, dtype=np.uint8)
        _require(not items.size or items.max() <= 1, "booleans of 0 or 1", "another byte")
    if dtype == "bfloat16":
        torch = _torch()
        return torch.from_numpy(np.frombuffer(data, dtype=np.int16)).view(torch.bfloat16).reshape(shape)
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return _torch().from_numpy(array) if spec["torch"] else array


def _value(node: Any, arrays: Sequence[Any], depth: int, limits: Limits, from_judge: bool) -> Any:
    _require(depth <= limits.depth, f"at most {limits.depth} levels deep", "a deeper value")
    if node is None or type(node) in (bool, float, str):
        return node
    if type(node) is int:
        return _in_64_bits(node)
    _require(isinstance(node, dict) and len(node) == 1, "a node of one kind", "a node of another form")
    ((kind, content),) = node.items()
    if kind in ("array", "scalar"):
        _require(
            type(content) is int and 0 <= content < len(arrays), "the number of an array", "another number"
        )
        if kind == "array":
            return arrays[content]
        _require(np.shape(arrays[content]) == (), "an array of one number", "an array of another shape")
        return arrays[content][()]
    if kind == "layout":
        _require(from_judge, "no layouts in this direction", "a layout")
        return _layout(content)
    _require(
        kind in (*SEQUENCES, "dict") and isinstance(content, list),
        "list, tuple, set or dict",
        "a node of another kind",
    )
    if kind == "dict":
        _require(
            all(isinstance(pair, list) and len(pair) == 2 for pair in content),
            "pairs",
            "entries that are no pairs",
        )
        content = [part for pair in content for part in pair]
    items = [_value(item, arrays, depth + 1, limits, from_judge) for item in content]
    if kind in ("set", "dict"):
        _require_keys(items if kind == "set" else items[::2])
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    return {"tuple": tuple, "set": set, "list": list}[kind](items)


def _require_keys(distinct: Collection[Any]) -> None:
    """Raise ProtocolError unless all values may be members of a set, or keys of a dict."""
    needed = f"at most {MOST_DISTINCT} numbers, texts or tuples as keys or members"
    _require(len(distinct) <= MOST_DISTINCT, needed, f"{len(distinct)} keys or members")
    _require(all(map(_is_key, distinct)), needed, "a key or member of another type")


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_key, value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _number(value: Any) -> int | float:
    """Return a fraction or a decimal number as Python's int or float."""
    try:
        wide = float(value)
    except (OverflowError, ValueError):
        raise ProtocolError("numbers of 64 bits", "a larger number") from None
    return int(_in_64_bits(int(value))) if wide.is_integer() and value == int(value) else wide


def _passes(dtype: str, kind: str) -> bool:
    return dtype in ITEMSIZE and (kind in MESSAGES or not dtype.startswith("complex"))


def _in_64_bits(value: Any) -> Any:
    _require(type(value) is not int or abs(value) < 1 << 63, "integers of 64 bits", "a larger integer")
    return value


def _layout(content: dict[str, Any]) -> Layout:
    ranks = tuple(tuple(Run(*run) for run in runs) for runs in content["runs"])
    return Layout(content["S"], content["P"], content["name"], ranks)


def _flags(value: Any) -> dict[str, bool]:
    return {"torch": _is_tensor(value), "grad": bool(getattr(value, "requires_grad", False))}


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays(item)
    elif hasattr(value, "nbytes"):
        yield value


def _is_tensor(value: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # None if torch is not loaded
    return isinstance(tensor, type) and isinstance(value, tensor)


def _torch() -> Any:
    import torch  # imported here, so that NumPy exercises do not load torch

    return torch


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _tensor_bytes(tensor: Any) -> memoryview:
    torch, tensor = _torch(), tensor.detach().to("cpu").resolve_conj().resolve_neg()
    # NumPy has no bfloat16, so its bits are read as int16. Bytes are viewed in NumPy, because torch's `view`
    # refuses some strides of empty tensors.
    return _array_bytes((tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


def _array_bytes(array: Any) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _require(holds: bool, needed: str, got: str) -> None:
    if not holds:
        raise ProtocolError(needed, got)

"""The frames between judge and worker: a length, a JSON header, raw array bytes. Nothing is ever unpickled.

    4 bytes   length of the header, little endian
    header    JSON object: kind, fields, value, arrays [{dtype, shape, torch, grad}]
    payload   the arrays' bytes, C order, in the order of `arrays`, each begun at a multiple of 16

A value is a tree of None, bool, int, float, str, lists, tuples, dicts with text keys, layouts
and arrays. There is no field for a verdict. A frame that breaks a rule is a ProtocolError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlab.errors import CourseError
from ringlab.layout import Layout, Run

Buffer = bytes | memoryview
LENGTH = struct.Struct("<I")
ALIGNMENT = 16
ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1,
}  # fmt: skip
"""The dtypes that may pass, and their bytes per item."""
SPEC = {"dtype", "shape", "torch", "grad"}


class ProtocolError(CourseError):
    """A frame breaks the protocol; its sender is not listened to any more."""


@dataclass(frozen=True)
class Limits:
    """Limits of one frame; sizes in bytes."""

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
        """Return the bytes of the arrays in `value`, each counted once."""
        return sum({id(array): array.nbytes for array in _arrays(self.value)}.values())


LIMITS = Limits()


def pack(frame: Frame, limits: Limits = LIMITS) -> list[Buffer]:
    """Return the bytes of `frame` in parts, the arrays' own memory among them.

    Raises: ProtocolError for what the protocol cannot carry.
    """
    encoder = _Encoder(limits)
    value = encoder.node(frame.value, 0)
    document = {"kind": frame.kind, "fields": frame.fields, "value": value, "arrays": encoder.specs}
    header = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    _require(len(header) <= limits.header, f"a header of at most {limits.header} bytes", f"{len(header)}")
    _require(encoder.total <= limits.total, f"at most {limits.total} bytes of arrays", f"{encoder.total}")
    return [LENGTH.pack(len(header)) + header, *encoder.payload]


class FrameReader:
    """Turns bytes, as they come in pieces of any size, into frames.

    Memory grows with the bytes that really came, never with the sizes that a header claims.
    """

    def __init__(self, limits: Limits = LIMITS, *, from_judge: bool = False) -> None:
        self.limits, self.from_judge = limits, from_judge
        self.buffer = bytearray()
        self.header: dict[str, Any] | None = None
        self.needed = LENGTH.size
        self.broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return the frames that `data` completes. Raises: ProtocolError, then and ever after."""
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
    def pending(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self.buffer) or self.header is not None

    def _next(self) -> Frame | None:
        if self.header is None:
            if len(self.buffer) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack_from(self.buffer)
            _require(
                0 < length <= self.limits.header, f"a header of 1 to {self.limits.header} bytes", f"{length}"
            )
            if len(self.buffer) < LENGTH.size + length:
                return None
            text = bytes(self.buffer[LENGTH.size : LENGTH.size + length])
            del self.buffer[: LENGTH.size + length]
            self.header = _parse_header(text, self.limits)
            self.needed = _payload_bytes(self.header["arrays"])
            if (
                len(self.buffer) <= self.needed
            ):  # what will be taken over whole; else each frame of many copies all
                self.buffer = bytearray(self.buffer)  # aligned again
        if len(self.buffer) < self.needed:
            return None
        if len(self.buffer) == self.needed:  # nearly always: the arrays take this memory over
            payload, self.buffer = self.buffer, bytearray()
        else:
            payload = self.buffer[: self.needed]
            del self.buffer[: self.needed]
        header, self.header = self.header, None
        return _decode(header, payload, self.limits, self.from_judge)


class _Encoder:
    """Walks a value, leaving arrays in `specs` and `payload`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.specs: list[dict[str, Any]] = []
        self.payload: list[Buffer] = []
        self.total = 0

    def node(self, value: Any, depth: int) -> Any:
        _require(
            depth <= self.limits.depth, f"a value at most {self.limits.depth} levels deep", "a deeper one"
        )
        if value is None or type(value) in (bool, float, str):
            return value
        if isinstance(value, (np.ndarray, np.generic)) or _is_tensor(value):
            return {"array": self._array(value)}
        exactly: dict[type, Any] = {int: int.__int__, float: float.__float__, str: str.__str__}
        for plain, convert in exactly.items():
            if isinstance(value, plain):  # an enumeration or a version travels as the number or text it is
                return _in_64_bits(convert(value))
        if isinstance(value, Layout):
            runs = [[[run.start, run.step, run.length] for run in rank] for rank in value.ranks]
            return {"layout": {"S": value.S, "P": value.P, "name": value.name, "runs": runs}}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.node(item, depth + 1) for item in value]}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": [[key, self.node(item, depth + 1)] for key, item in value.items()]}
        raise ProtocolError(
            "arrays, numbers, text, None, and lists, tuples or dicts of them", f"a {type(value).__name__}"
        )

    def _array(self, value: Any) -> int:
        _require(len(self.specs) < self.limits.arrays, f"at most {self.limits.arrays} arrays", "more")
        dtype = _dtype(value)
        _require(
            dtype in ITEMSIZE and getattr(value.dtype, "isnative", True),
            f"an array of {', '.join(ITEMSIZE)}",
            dtype,
        )
        reach = _reach(value.shape, dtype)
        _require(reach <= self.limits.array, f"arrays of at most {self.limits.array} bytes", f"{reach}")
        _require(
            len(value.shape) <= self.limits.dimensions,
            f"at most {self.limits.dimensions} dimensions",
            f"an array of {len(value.shape)}",
        )
        data = _tensor_bytes(value) if _is_tensor(value) else _array_bytes(value)
        self.specs.append({"dtype": dtype, "shape": list(value.shape), **_flags(value)})
        self.payload += [data, bytes(_padded(data.nbytes) - data.nbytes)]
        self.total += _padded(data.nbytes)
        return len(self.specs) - 1


def _parse_header(text: bytes, limits: Limits) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"))
        json.dumps(header, ensure_ascii=False).encode(
            "utf-8"
        )  # refuses lone surrogates, which cannot be printed
    except (ValueError, RecursionError) as error:  # also Unicode errors and too many digits
        raise ProtocolError("a header that is JSON", type(error).__name__) from None
    _require(isinstance(header, dict), "a header that is an object", type(header).__name__)
    _require(
        set(header) == {"kind", "fields", "value", "arrays"}, "kind, fields, value, arrays", "other keys"
    )
    _require(isinstance(header["kind"], str) and len(header["kind"]) <= 32, "a short kind", "another")
    _require(isinstance(header["fields"], dict), "fields that are an object", "others")
    specs = header["arrays"]
    _require(
        isinstance(specs, list) and len(specs) <= limits.arrays, f"at most {limits.arrays} arrays", "others"
    )
    for spec in specs:
        _check_spec(spec, limits)
    total = _payload_bytes(specs)
    _require(total <= limits.total, f"at most {limits.total} bytes of arrays", f"{total}")
    return header


def _check_spec(spec: Any, limits: Limits) -> None:
    _require(isinstance(spec, dict) and set(spec) == SPEC, ", ".join(sorted(SPEC)), "other keys")
    _require(isinstance(spec["dtype"], str) and spec["dtype"] in ITEMSIZE, "a known dtype", "another")
    _require(type(spec["torch"]) is bool and type(spec["grad"]) is bool, "flags: true or false", "others")
    _require(spec["torch"] or spec["dtype"] != "bfloat16", "bfloat16 in torch only", "NumPy")
    shape = spec["shape"]
    _require(
        isinstance(shape, list) and len(shape) <= limits.dimensions, "a shape of few dimensions", "another"
    )
    _require(all(type(n) is int and 0 <= n <= limits.array for n in shape), "lengths from 0", "others")
    _require(
        _reach(shape, spec["dtype"]) <= limits.array,
        f"arrays of at most {limits.array} bytes",
        "a larger one",
    )


def _reach(shape: Sequence[int], dtype: str) -> int:
    """Bytes as if no length were 0: NumPy and torch cannot make (0, 2**28, 2**28, 2**28), though it holds nothing."""
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
        # In the frame it would lie where the next array begins, and Triton's interpreter tells tensors apart by that.
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
    _require(depth <= limits.depth, f"a value at most {limits.depth} levels deep", "a deeper one")
    if node is None or type(node) in (bool, float, str):
        return node
    if type(node) is int:
        return _in_64_bits(node)
    _require(isinstance(node, dict) and len(node) == 1, "a node of one kind", "another")
    ((kind, content),) = node.items()
    if kind == "array":
        _require(type(content) is int and 0 <= content < len(arrays), "the number of an array", "another")
        return arrays[content]
    if kind == "layout":
        _require(from_judge, "no layouts in this direction", "one")
        return _layout(content)
    _require(
        kind in ("list", "tuple", "dict") and isinstance(content, list), "list, tuple or dict", "another"
    )
    if kind != "dict":
        items = [_value(item, arrays, depth + 1, limits, from_judge) for item in content]
        return tuple(items) if kind == "tuple" else items
    pairs = all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in content)
    _require(pairs, "pairs of a text and a value", "others")
    return {key: _value(item, arrays, depth + 1, limits, from_judge) for key, item in content}


def _in_64_bits(value: Any) -> Any:
    _require(type(value) is not int or abs(value) < 1 << 63, "integers of 64 bits", "a larger integer")
    return value


def _layout(content: dict[str, Any]) -> Layout:
    # Only the judge sends layouts, and only to workers: no bounds are needed on this side.
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
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _torch() -> Any:
    import torch  # late: NumPy exercises never pay for it

    return torch


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _tensor_bytes(tensor: Any) -> memoryview:
    torch, tensor = _torch(), tensor.detach().to("cpu").resolve_neg()
    # NumPy has no bfloat16; its own view knows that strides of empty arrays do not matter.
    return _array_bytes((tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


def _array_bytes(array: Any) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _require(holds: bool, needed: str, got: str) -> None:
    if not holds:
        raise ProtocolError(needed, got)

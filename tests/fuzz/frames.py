"""Bytes that a worker may write to its socket, and properties of the frames that the judge reads from them.

Wrong inputs have JSON values of a wrong type, odd texts and numbers, or damaged bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.protocol import ITEMSIZE, LENGTH, Frame, FrameReader, Limits, ProtocolError, pack
from ringlab_course.judge.exchanges import EXCHANGES, Posted, read_exchange, read_label

TEXTS = (
    "", "x", "é", "\x00", "\ud800", "a\udfffb", "\u202e", "日本", "😀", "05", "05.forward", "torch", "float32", "bfloat16",
    "code", "x" * 33, "x" * 201, "%magic", "!ls", "__proto__", "\ufeff", "\r\n", "NaN",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 4, 5, 255, 256, 511, 512, 513, 4096, 1 << 15, 1 << 28, (1 << 28) + 1, 1 << 31, 1 << 32, 1 << 40,
    (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 10**100, 0.0, -0.0, 4.0, 1e308, 1e-300, float("nan"), float("inf"),
    float("-inf"), True, False,
)  # fmt: skip
SPLICES = (
    b"[" * 60,
    b"]" * 60,
    b'{"a":' * 40,
    b"9" * 4400,
    b"\xff",
    b"\x00" * 16,
    b'"\\ud800"',
    b"\xed\xa0\x80",
    b"1e999",
)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Return any JSON value, sometimes with lone surrogates or numbers that JSON does not have."""
    draw = rng.random()
    if draw < 0.3 or depth == 0:
        return rng.choice(NUMBERS)
    if draw < 0.6:
        return rng.choice(TEXTS)
    if draw < 0.65:
        return None
    count = rng.choice((0, 1, 1, 2, 3))
    if draw < 0.85:
        return [value(rng, depth - 1) for _ in range(count)]
    return {rng.choice(TEXTS): value(rng, depth - 1) for _ in range(count)}


def spoil(rng: random.Random, document: Any, times: int) -> Any:
    """Change `document` in place, with `times` parts replaced, dropped, doubled or moved, and return it."""
    holder = [document]
    for _ in range(times):
        places = list(_places(holder))
        where, key = rng.choice(places)
        draw = rng.random()
        if draw < 0.6:
            where[key] = value(rng)
        elif draw < 0.7:
            other, name = rng.choice(places)
            where[key] = json.loads(json.dumps(other[name]))
        elif isinstance(where, dict):
            where[rng.choice((*where, *TEXTS[:6]))] = where.pop(key)
        elif where is not holder:
            where.insert(key, where[key]) if draw < 0.85 else where.pop(key)
    return holder[0]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) for each key or index of each container in a document, outer ones first."""
    keys: Any = range(len(node)) if isinstance(node, list) else list(node)
    for key in keys:
        yield node, key
        if isinstance(node[key], (list, dict)):
            yield from _places(node[key])


def damage(rng: random.Random, data: bytearray, times: int) -> bytearray:
    """Damage `data` in place `times` times (a flip, cut, repeat, splice or wrong length), and return it."""
    for _ in range(times):
        at, draw = rng.randrange(len(data) + 1), rng.random()
        until = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 200)))
        if draw < 0.4 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif draw < 0.55:
            del data[at:until]
        elif draw < 0.65:
            data[at:at] = data[at:until]
        elif draw < 0.75:
            data[at:at] = rng.choice(SPLICES)
        elif draw < 0.85:
            data[at:until] = rng.randbytes(until - at)
        elif draw < 0.95:
            data[:4] = rng.choice(
                (0, 1, len(data), abs(len(data) - 4), len(data) + 1, 1 << 20, 1 << 31)
            ).to_bytes(4, "little")
        else:
            del data[at:]
    return data


NARROW = Limits(header=1500, array=256, total=512, arrays=4, dimensions=3, depth=4)
GENEROUS = Limits(header=1 << 26, array=1 << 29, total=1 << 40, arrays=1 << 20)
"""The limits for sending frames that were read. An array that a value contains twice is sent twice."""
KINDS = ("exchange", "exchange", "result", "hello", "loaded", "error", "begin", "wait", "x" * 33)
WORLD = 3


@dataclass(frozen=True)
class Stream:
    """Bytes from a worker, the offsets at which they are cut into pieces, and the limits that apply."""

    data: bytes
    cuts: tuple[int, ...]
    limits: Limits


def draw(rng: random.Random) -> Stream:
    """Return a stream of one to three frames that are valid, have wrong headers, or are damaged."""
    frames = [_frame(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    data = bytearray(b"".join(frames))
    if rng.random() < 0.35:
        damage(rng, data, rng.choice((1, 1, 2, 4)))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 2, 5, 20))))
    return Stream(bytes(data), tuple(cuts), NARROW if rng.random() < 0.5 else Limits())


def _frame(rng: random.Random) -> bytes:
    specs = [_spec(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 5)))]
    document = {
        "kind": rng.choice(KINDS),
        "fields": _fields(rng),
        "value": _value(rng, len(specs)),
        "arrays": specs,
    }
    payload = b"".join(_payload(rng, spec) for spec in specs)
    if rng.random() < 0.4:
        document = spoil(rng, document, rng.choice((1, 1, 2, 3)))
    header = json.dumps(document, ensure_ascii=rng.random() < 0.5, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    return LENGTH.pack(len(header)) + header + payload


def _spec(rng: random.Random) -> dict[str, Any]:
    shape = [rng.choice((0, 1, 2, 3, 4)) for _ in range(rng.choice((0, 1, 1, 2, 3, 4)))]
    if rng.random() < 0.03:
        shape += rng.choices((0, 1 << 28, 1 << 27, 1), k=4)
    is_torch = rng.random() < 0.7
    names = [name for name in ITEMSIZE if is_torch or name != "bfloat16"]
    return {"dtype": rng.choice(names), "shape": shape, "torch": is_torch, "grad": rng.random() < 0.1}


def _payload(rng: random.Random, spec: dict[str, Any]) -> bytes:
    nbytes = int(np.prod(spec["shape"], dtype=object)) * ITEMSIZE[spec["dtype"]]
    if nbytes > 1 << 12:
        return rng.randbytes(40)  # fewer than the header claims: the rest never comes
    data = rng.randbytes(nbytes)
    if spec["dtype"] == "bool" and rng.random() < 0.9:
        data = bytes(byte & 1 for byte in data)
    return data + bytes(-nbytes % 16)


def _fields(rng: random.Random) -> dict[str, Any]:
    shape = rng.choice(([], [2], [1, 4], [0], [1 << 40], [2] * 9))
    receive = [[rng.choice(list(ITEMSIZE)), shape] for _ in range(rng.choice((0, 1, 2)))]
    fields = {"call": 1, "index": rng.choice((0, 0, 0, 1)), "tag": "t", "to": rng.choice((0, 1, 2, 3, None)),
              "source": rng.choice((0, 1, 2, -1, None)), "receive": receive, "label": "l"}  # fmt: skip
    return {"call": 1} if rng.random() < 0.3 else fields


def _value(rng: random.Random, arrays: int, depth: int = 0) -> Any:
    draw = rng.random()
    if depth == 0 and draw < 0.03:
        node: Any = None
        for _ in range(rng.choice((3, 4, 5, 12, 13, 40))):
            node = {rng.choice(("list", "tuple")): [node]}
        return node
    if depth == 0 and draw < 0.4:  # what an exchange sends
        return {"tuple": [{"array": number} for number in range(arrays)]}
    if draw < 0.6 and arrays:
        return {"array": rng.randrange(arrays)}
    if draw < 0.75 or depth > rng.choice((1, 2, 14)):
        return rng.choice((None, True, 1, -5, 1.5, "text", "é"))
    if draw < 0.76:
        return {"layout": {"S": 4, "P": 1, "name": "x", "runs": [[[0, 1, 4]]]}}
    items = [_value(rng, arrays, depth + 1) for _ in range(rng.choice((0, 1, 2, 3)))]
    kind = rng.choice(("list", "tuple", "dict"))
    return {kind: [[f"k{n}", item] for n, item in enumerate(items)] if kind == "dict" else items}


def check(stream: Stream) -> str:
    """Return "read", "waits" or "refused". Raises: AssertionError, or an error forbidden to the judge."""
    whole, refusal, pending = _fed(stream, ())
    apart, refusal_apart, pending_apart = _fed(stream, stream.cuts)
    assert refusal == refusal_apart, f"refusal in pieces {refusal_apart!r}, as a whole {refusal!r}"
    if refusal:
        return "refused"
    assert pending == pending_apart and len(whole) == len(apart), "the pieces change the frames"
    for frame, other in zip(whole, apart, strict=True):
        _obeys(frame, stream.limits)
        assert same(
            [frame.kind, _text(frame.fields), frame.value], [other.kind, _text(other.fields), other.value]
        )
        (again,) = FrameReader(GENEROUS).feed(b"".join(bytes(part) for part in pack(frame, GENEROUS)))
        assert same(again.value, frame.value) and _text(again.fields) == _text(frame.fields), (
            "the frame differs after it is packed and read again"
        )
        _listened_to(frame)
    return "read" if whole else "waits"


def _fed(stream: Stream, cuts: tuple[int, ...]) -> tuple[list[Frame], str, bool]:
    """Return the frames, the refusal ("" if none), and whether an incomplete frame has begun."""
    reader, frames, bounds = FrameReader(stream.limits), list[Frame](), (0, *cuts, len(stream.data))
    try:
        for start, end in itertools.pairwise(bounds):
            frames += reader.feed(stream.data[start:end])
            held = reader.buffer.__sizeof__()
            assert held <= 2 * end + 1000, f"the buffer holds {held} bytes after {end} bytes arrived"
    except ProtocolError as error:
        assert not reader.buffer, "the buffer keeps bytes that were refused"
        try:
            reader.feed(b"")
        except ProtocolError:
            return [], str(error), False
        raise AssertionError("listens on after a malformed frame") from None
    return frames, "", reader.unparsed > 0


def _obeys(frame: Frame, limits: Limits) -> None:
    assert isinstance(frame.kind, str) and len(frame.kind) <= 32 and isinstance(frame.fields, dict)
    assert len(_text(frame.fields).encode("utf-8")) <= 8 * limits.header, (
        "a text exceeds the limit of the header"
    )
    found: dict[int, Any] = {}
    _walk(frame.value, 0, limits, found)
    sizes = [array.nbytes for array in found.values()]
    assert (
        len(sizes) <= limits.arrays and sum(sizes) <= limits.total and max(sizes, default=0) <= limits.array
    )


def _walk(node: Any, depth: int, limits: Limits, found: dict[int, Any]) -> None:
    assert depth <= limits.depth, "a value is nested too deeply"
    if isinstance(node, (np.ndarray, torch.Tensor)):
        name = str(node.dtype).removeprefix("torch.")
        assert (
            type(node) in (np.ndarray, torch.Tensor) and name in ITEMSIZE and node.ndim <= limits.dimensions
        )
        assert not getattr(node, "requires_grad", False)
        if name == "bool" and node.nbytes:
            raw = node.view(torch.uint8) if isinstance(node, torch.Tensor) else node.view(np.uint8)
            assert raw.max() <= 1, "a boolean has a byte other than 0 and 1"
        found[id(node)] = node
    elif isinstance(node, dict):
        assert all(type(key) is str for key in node)
        for item in node.values():
            _walk(item, depth + 1, limits, found)
    elif type(node) in (list, tuple):
        for item in node:
            _walk(item, depth + 1, limits, found)
    else:
        assert node is None or type(node) in (bool, int, float, str), f"a {type(node).__name__}"
        assert type(node) is not int or abs(node) < 1 << 63
        assert type(node) is not str or node.encode("utf-8") is not None


def _listened_to(frame: Frame) -> None:
    """Check that the fields of an exchange and of a label are within bounds unless the judge refuses them."""
    with contextlib.suppress(ProtocolError):
        assert len(read_label(frame, 0)) <= 200
    try:
        posted: Posted = read_exchange(frame, 1, WORLD, 0, 0.0)
    except ProtocolError:
        return
    assert 0 <= posted.index < EXCHANGES and len(posted.tag) <= 200 and isinstance(posted.tag, str)
    assert all(type(peer) is int and 0 <= peer < WORLD for peer in {posted.to, posted.source} - {None})
    for half in posted.open_ends:
        assert half.pair and half.tensor.dtype is not None and half.tensor.nbytes >= 0
    assert posted.sent == sum(tensor.nbytes for tensor in frame.value) and posted.received >= 0


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same, including NaN and dtypes."""
    if isinstance(a, (np.ndarray, torch.Tensor)):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return alike and _bytes(a) == _bytes(b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or a != a)


def _bytes(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    return bytes(array.tobytes())

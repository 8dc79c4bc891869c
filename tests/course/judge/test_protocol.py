"""Every value survives the protocol between judge and worker, and malformed frames are refused."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ringlab.layout import zigzag
from ringlab.merge import Partial
from ringlab_course.checking.protocol import (
    ITEMSIZE,
    LENGTH,
    Frame,
    FrameReader,
    Limits,
    ProtocolError,
    carried,
    pack,
)

REAL = [name for name in ITEMSIZE if not name.startswith("complex")]
NUMPY = [name for name in REAL if name != "bfloat16"]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def arrays(draw):
    shape, seed = draw(shapes), draw(st.integers(0, 2**32 - 1))
    data = np.random.default_rng(seed).integers(0, 2, shape) * 1.5
    if draw(st.booleans()):
        return torch.from_numpy(np.asarray(data)).to(getattr(torch, draw(st.sampled_from(REAL))))
    return np.asarray(data).astype(draw(st.sampled_from(NUMPY)))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(),
    arrays(),
    st.integers(-128, 127).map(np.int8),
    st.sets(st.integers(-5, 5), max_size=3),
)
keys = st.one_of(st.text(), st.integers(-5, 5), st.tuples(st.integers(-5, 5), st.text()))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def flat(frame: Frame) -> bytes:
    return b"".join(bytes(part) for part in pack(frame))


def raw(document: object, payload: bytes = b"") -> bytes:
    header = document if isinstance(document, bytes) else json.dumps(document).encode()
    return LENGTH.pack(len(header)) + header + payload


@given(values, st.integers(1, 1000), st.integers(0, 2**32))
def test_any_value_survives_in_pieces_of_any_size(value, piece, call) -> None:
    data, reader, frames = flat(Frame("result", {"call": call}, value)) * 2, FrameReader(), []
    for start in range(0, len(data), piece):
        frames += reader.feed(data[start : start + piece])
    assert [f.kind for f in frames] == ["result"] * 2 and not reader.unparsed
    assert all(same(value, f.value) and f.fields == {"call": call} for f in frames)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_wait_for_more(data) -> None:
    reader = FrameReader()
    try:
        frames = reader.feed(data)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            reader.feed(flat(Frame("result")))  # after an error, further frames are refused too
    else:
        assert not frames and (reader.unparsed or not data)


@settings(max_examples=400)
@given(values, st.randoms(use_true_random=False), st.integers(1, 8))
def test_damaged_frames_never_crash(value, rng: random.Random, damages) -> None:
    data = bytearray(flat(Frame("result", {"call": 1}, value)))
    for _ in range(damages):
        data[rng.randrange(4, len(data))] = rng.randrange(256)
    try:
        for frame in FrameReader().feed(data):
            pack(frame)  # every accepted frame can be packed again
    except ProtocolError:
        pass


GOOD = {"kind": "result", "fields": {}, "value": None, "arrays": []}
ARRAY = {"dtype": "float32", "shape": [2], "torch": False, "grad": False}
MALFORMED = {
    "empty header": LENGTH.pack(0),
    "endless header": LENGTH.pack(0xFFFFFFFF),
    "no JSON": raw(b"{"),
    "no UTF-8": raw(b'"\xff"'),
    "lone surrogate": raw(b'{"kind":"\\ud800","fields":{},"value":null,"arrays":[]}'),
    "deep JSON": raw(b"[" * 100_000),
    "pickle": raw(b"\x80\x04\x95\x1a\x00\x00\x00"),
    "a list": raw([]),
    "missing keys": raw({"kind": "result"}),
    "a verdict": raw({**GOOD, "verdict": "passed"}),
    "kind no text": raw({**GOOD, "kind": 1}),
    "long kind": raw({**GOOD, "kind": "x" * 100}),
    "fields no object": raw({**GOOD, "fields": []}),
    "object dtype": raw({**GOOD, "arrays": [{**ARRAY, "dtype": "object"}]}),
    "dtype no text": raw({**GOOD, "arrays": [{**ARRAY, "dtype": ["float32"]}]}),
    "structured dtype": raw({**GOOD, "arrays": [{**ARRAY, "dtype": "f4,f4"}]}),
    "NumPy bfloat16": raw({**GOOD, "arrays": [{**ARRAY, "dtype": "bfloat16"}]}),
    "negative shape": raw({**GOOD, "arrays": [{**ARRAY, "shape": [-1]}]}),
    "true as a length": raw({**GOOD, "arrays": [{**ARRAY, "shape": [True]}]}),
    "float shape": raw({**GOOD, "arrays": [{**ARRAY, "shape": [1.0]}]}),
    "many dimensions": raw({**GOOD, "arrays": [{**ARRAY, "shape": [1] * 9}]}),
    "huge array": raw({**GOOD, "arrays": [{**ARRAY, "shape": [1 << 27]}]}),
    "huge empty array": raw({**GOOD, "arrays": [{**ARRAY, "shape": [0, 1 << 60]}]}),
    "empty but endless": raw({**GOOD, "arrays": [{**ARRAY, "shape": [0, 1 << 28, 1 << 28, 1 << 28]}]}),
    "empty but endless tensor": raw(
        {**GOOD, "arrays": [{**ARRAY, "shape": [0, 1 << 28, 1 << 28, 1 << 28], "torch": True}]}
    ),
    "huge total": raw({**GOOD, "arrays": [{**ARRAY, "shape": [1 << 26]}] * 3}),
    "many arrays": raw({**GOOD, "arrays": [{**ARRAY, "shape": [0]}] * 1000}),
    "no such array": raw({**GOOD, "value": {"array": 0}}),
    "negative array": raw({**GOOD, "value": {"array": -1}, "arrays": [ARRAY]}, bytes(16)),
    "unknown node": raw({**GOOD, "value": {"object": "os.system"}}),
    "two kinds": raw({**GOOD, "value": {"list": [], "tuple": []}}),
    "a bare list": raw({**GOOD, "value": [1]}),
    "a bare dict": raw({**GOOD, "value": {}}),
    "dict of odd pairs": raw({**GOOD, "value": {"dict": [["a"]]}}),
    "dict with an array as a key": raw(
        {**GOOD, "value": {"dict": [[{"array": 0}, 2]]}, "arrays": [ARRAY]}, bytes(16)
    ),
    "dict with a list as a key": raw({**GOOD, "value": {"dict": [[{"list": []}, 2]]}}),
    "set of sets": raw({**GOOD, "value": {"set": [{"set": []}]}}),
    "set without end": raw({**GOOD, "value": {"set": [*range(20_000)]}}),
    "array as a number": raw({**GOOD, "value": {"scalar": 0}, "arrays": [ARRAY]}, bytes(16)),
    "complex answer": raw({**GOOD, "arrays": [{**ARRAY, "dtype": "complex64"}]}, bytes(16)),
    "endless integer": raw(b'{"kind":"r","fields":{},"arrays":[],"value":' + b"9" * 5000 + b"}"),
    "large integer": raw({**GOOD, "value": 1 << 64}),
    "layout from a worker": raw(
        {**GOOD, "value": {"layout": {"S": 1 << 40, "P": 1, "name": "x", "runs": []}}}
    ),
    "bool that is none": raw({**GOOD, "value": None, "arrays": [{**ARRAY, "dtype": "bool"}]}, b"\x02" * 16),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_frames_are_refused(name) -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(MALFORMED[name])


def test_the_well_formed_neighbour_of_the_malformed_frames_is_read() -> None:
    document = {**GOOD, "value": {"array": 0}, "arrays": [ARRAY]}
    (frame,) = FrameReader().feed(raw(document, np.array([1, 2, 0, 0], np.float32).tobytes()))
    assert frame.value.tolist() == [1.0, 2.0]


def test_depth_is_bounded_on_both_sides() -> None:
    deep: list = []
    for _ in range(20):
        deep = [deep]
    with pytest.raises(ProtocolError, match="levels deep"):
        pack(Frame("result", {}, deep))
    wire = flat_deep = None
    for _ in range(20):
        flat_deep = {"list": [flat_deep] if flat_deep else []}
    wire = raw({**GOOD, "value": flat_deep})
    with pytest.raises(ProtocolError, match="levels deep"):
        FrameReader().feed(wire)


def test_sizes_are_bounded_when_sending() -> None:
    small = Limits(array=64, total=100, arrays=2, header=1000)
    for value in (np.zeros(9), [np.zeros(8), np.zeros(8)], [np.zeros(1)] * 3, "x" * 2000, np.zeros((0, 9))):
        with pytest.raises(ProtocolError):
            pack(Frame("result", {}, value), small)


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", 1j, np.array([1j]), np.array([None]), {frozenset({1}): 2}, print, 1 << 63, Fraction(10**400),
     zigzag(4, 2), set(range(20_000))],
)  # fmt: skip
def test_what_cannot_travel_is_refused_where_it_is_sent(value) -> None:
    with pytest.raises(ProtocolError):
        pack(Frame("result", {}, value))


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    ("answer", "arrives"),
    [
        (np.int64(3), np.int64(3)),
        (np.longdouble(0.5), np.float64(0.5)),
        (Fraction(1, 4), 0.25),
        (Pair(1, 2), (1, 2)),
        (range(3), [0, 1, 2]),
        (frozenset({(0, 1)}), {(0, 1)}),
    ],
)
def test_what_a_notebook_takes_for_a_number_or_a_set_the_judge_takes_for_one(answer, arrives) -> None:
    assert same(carried(answer), arrives)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex64,
        torch.int16,
    ],
)
def test_messages_may_hold_what_is_no_answer(dtype) -> None:
    """Messages may have dtypes that answers may not, such as complex numbers, or int16 in place of bfloat16."""
    sent = torch.arange(6).view(2, 3).to(dtype)
    (frame,) = FrameReader().feed(flat(Frame("exchange", {}, (sent,))))
    assert same(frame.value, (sent,))


def test_layouts_travel_to_workers_and_dataclasses_as_tuples() -> None:
    layout = zigzag(13, 3)
    (frame,) = FrameReader(from_judge=True).feed(flat(Frame("arguments", {}, [layout])))
    assert frame.value == [layout]
    partial = Partial(torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2))
    (frame,) = FrameReader().feed(flat(Frame("result", {}, partial)))
    assert same(frame.value, (partial.out, partial.lse))


def test_requires_grad_travels_to_workers_only() -> None:
    data = flat(Frame("call", {}, torch.ones(2, requires_grad=True)))
    assert FrameReader(from_judge=True).feed(data)[0].value.requires_grad
    assert not FrameReader().feed(data)[0].value.requires_grad


def test_special_numbers_survive() -> None:
    value = np.array([np.nan, np.inf, -np.inf, -0.0])
    (frame,) = FrameReader().feed(flat(Frame("result", {}, [value, math.inf])))
    assert frame.value[0].tobytes() == value.tobytes() and frame.value[1] == math.inf


def test_what_was_received_may_be_written() -> None:
    (frame,) = FrameReader().feed(flat(Frame("result", {}, np.zeros(3))))
    frame.value += 1
    assert frame.value.tolist() == [1, 1, 1]


def test_an_empty_tensor_does_not_lie_where_another_one_begins() -> None:
    """Tensors of a frame have different addresses, since Triton's interpreter identifies tensors by address."""
    sent = (torch.zeros(1, 0, 4), torch.ones(4), torch.zeros(0, dtype=torch.bfloat16), torch.ones(2))
    frames = FrameReader(from_judge=True).feed(b"".join(bytes(p) for p in pack(Frame("call", {}, sent))))
    got = frames[0].value
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in sent]
    assert len({x.untyped_storage().data_ptr() for x in got if x.numel()}) == 2
    addresses = {x.untyped_storage().data_ptr() for x in got if x.numel()}
    assert not addresses & {x.untyped_storage().data_ptr() for x in got if not x.numel()}

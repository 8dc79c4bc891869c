"""Wrong material: JSON of the wrong kind anywhere, odd texts and numbers, and damage done to bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

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
    """Return any JSON value, lone surrogates and numbers that are no JSON among them."""
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
    """Return `document`, which is changed, with `times` of its parts replaced, dropped, doubled or moved."""
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
    """Yield every container with every key it has, from the outside inwards."""
    keys: Any = range(len(node)) if isinstance(node, list) else list(node)
    for key in keys:
        yield node, key
        if isinstance(node[key], (list, dict)):
            yield from _places(node[key])


def damage(rng: random.Random, data: bytearray, times: int) -> bytearray:
    """Return `data`, which is changed, after `times` flips, cuts, repeats, splices and wrong lengths."""
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

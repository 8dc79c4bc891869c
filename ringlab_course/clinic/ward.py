"""The patients of lesson 16, each as edits of a sound ring (sound.py). Their faults are meant: do not mend them."""

from __future__ import annotations

import inspect
from functools import cache

from ringlab_course.clinic import sound
from ringlab_course.clinic.edits import Changes, edited

_STATE = "    out, lse = nothing_seen(q)\n"
_LAST = "        last = step == ring.world_size - 1\n"
_POST = "        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))\n"
_SEES = "        visible = sees(positions, ring.rank, ring.origin(step), causal)\n"
_ATTEND = "        out, lse = attend(q, k, v, visible, out, lse)\n"
_ARRIVES = "        if work is not None:\n            k, v = work.wait()\n"
_RESULT = "    return out.to(q.dtype), lse\n"
_IN_ORDER = (_LAST, ""), (_POST, "")
"""Nothing is under way while a block is attended to."""

_SUMS = "    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))\n"
_ADDED = "        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]\n"
_LENGTH = "        length = len(positions[ring.origin(step + 1)])\n"
_COURIERS = '            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")\n'
_BLOCKS = '        if step < P - 1:\n            k, v = ring.shift(k, v, length=length, tag="kv")\n'
_GRADIENTS = "    return dq, dk, dv\n"

_ASH = """\
        if visible.any():
            scores = scores_of(q, k, visible)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            block_lse = (top + total.log())[..., 0]
            merged = torch.logaddexp(lse, block_lse)
            old, new = torch.exp(lse - merged)[..., None], torch.exp(block_lse - merged)[..., None]
            out, lse = out * old + weights @ v.to(out.dtype) / total * new, merged
"""
_BIRCH = """\
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            kept, weights = torch.exp(top - safe), torch.exp(scores - safe[..., None])
            total = total * kept + weights.sum(-1)
            out = out * kept[..., None] + weights @ v.to(out.dtype)
            out = out / total.masked_fill(total == 0, 1.0)[..., None]
            top = new_top
"""
_CEDAR = """\
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        if causal and origin == ring.rank:
            visible = visible.tril()
        if origin <= ring.rank or not causal:
            out, lse = attend(q, k, v, visible, out, lse)
"""
_ELM = """\
        if ring.world_size > 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
"""
_FIR = """\
        if step == ring.world_size - 1:
            break
        length = len(positions[ring.origin(step + 1)])
        if ring.rank % 2 == 0:
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
        else:
            next_k, next_v = receive(ring, k, length), receive(ring, v, length)
            send(ring, v)
            send(ring, k)
            k, v = next_k, next_v
"""
_YEW = """\
        if step < ring.world_size - 1:
            length = len(positions[ring.origin(step + 1)])
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
"""
_HAZEL = """\
            room = tuple(x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in (dk, dv))
            back = ring.comm.exchange(
                send=(dk, dv), to=ring.previous, receive=room, source=ring.next, tag="dkv"
            )
            dk, dv = back.wait()
"""
_LARCH = """\
        scratch.copy_(part[0])
        if dq is None:
            dq = scratch.to(lse.dtype)
        else:
            dq += scratch.to(lse.dtype)
        dk, dv = dk + part[1], dv + part[2]
"""
_ROWAN = '''
    def passed(*tensors, length, tag):
        """Return what arrived, followed by what was sent."""
        return *ring.post(*tensors, length=length, tag=tag).wait(), *tensors

    P, delta ='''

FORWARDS: dict[str, tuple[str, Changes]] = {
    "ash": ("the softmax of each block, merged by lse; hidden blocks are skipped.", ((_ATTEND, _ASH),)),
    "birch": (
        "running maximum, running sum, and out normalised after every block.",
        (
            (_STATE, "    out, top = nothing_seen(q)\n    total = torch.zeros_like(top)\n"),
            (_SEES + _ATTEND, _BIRCH),
            (_RESULT, "    return out.to(q.dtype), top + total.log()\n"),
        ),
    ),
    "cedar": (
        "own block triangular, blocks of earlier ranks full, later ones skipped.",
        (
            (_LAST, "        last, origin = step == ring.world_size - 1, ring.origin(step)\n"),
            (_SEES + _ATTEND, _CEDAR),
        ),
    ),
    "elm": ("attend, shift, attend, shift.", (*_IN_ORDER, (_ARRIVES, _ELM))),
    "fir": (
        "even ranks send first, odd ranks receive first, so that nobody deadlocks.",
        (*_IN_ORDER, (_ARRIVES, _FIR)),
    ),
    "yew": ("every rank sends its block, then receives the next one.", (*_IN_ORDER, (_ARRIVES, _YEW))),
}
"""By patient: its docstring and its changes."""
BACKWARDS: dict[str, tuple[str, Changes]] = {
    "hazel": ("blocks go forward; gradients go back to where they came from.", ((_COURIERS, _HAZEL),)),
    "larch": (
        "each block's dq goes into one scratch tensor, as a kernel writes it.",
        (
            (
                _SUMS,
                "    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))\n"
                "    scratch, dq = torch.empty_like(q), None\n",
            ),
            (_ADDED, _LARCH),
        ),
    ),
    "oak": (
        "the next block is under way while this one is computed.",
        (
            (_SUMS, f"{_SUMS}    block = k, v\n"),
            (_LENGTH, ""),
            (
                _SEES,
                f"{_LENGTH}"
                '        work = ring.post(*block, length=length, tag="kv") if step < P - 1 else None\n'
                f"{_SEES}",
            ),
            (_BLOCKS, "        if work is not None:\n            block = work.wait()\n"),
        ),
    ),
    "rowan": (
        "blocks and their gradients travel together.",
        (
            ("    P, delta =", _ROWAN),
            (_COURIERS, '            dk, _, _, dv = passed(dk, dv, length=length, tag="dkv")\n'),
            ("k, v = ring.shift(k, v, l", "k, v, _, _ = passed(k, v, l"),
        ),
    ),
    "willow": (
        "sums in the state's dtype, dq handed back as the kernel writes it.",
        ((_GRADIENTS, "    return dq.to(torch.bfloat16), dk, dv\n"),),
    ),
}
"""The same for those whose backward is wrong."""


@cache
def source_of(name: str) -> str:
    """Return the text of a patient's program, or of the one called `forward` or `backward`, which is sound."""
    if name in ("forward", "backward"):
        return inspect.getsource(getattr(sound, name))
    kind, wards, returns = (
        ("forward", FORWARDS, "(out, lse)") if name in FORWARDS else ("backward", BACKWARDS, "(dq, dk, dv)")
    )
    does, changes = wards[name]
    before = f"def {kind}(", f"Return this rank's {returns}."
    after = f"def {name}(", f"Return this rank's {returns}: {does}"
    return edited(source_of(kind), (*zip(before, after, strict=True), *changes))

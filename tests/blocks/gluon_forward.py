"""A step of the ring forward in Gluon, for sm_90: `kernel_variants` compiles it for its figures, and nothing has run it.

A program computes one tile of rows on one segment of keys, and carries its state, as `forward_step` does in a middle
step. One warp copies tiles of K and V by TMA. Two warpgroups own half of the rows each. By its source, each
computes the softmax of a tile while the values of the previous tile are multiplied, but ptxas makes these
products wait (C7514).

Source: arXiv 2407.08608 (FlashAttention-3).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _turn(number, STAGES: gl.constexpr):
    """Return the place of a tile in the buffers, and the phase of its barriers."""
    return number % STAGES, (number // STAGES) & 1


@gluon.jit
def _copy(tiles, barriers, begin, end, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Copy the tiles of a segment, each as soon as both warpgroups have left its place."""
    k_tensor, v_tensor, k_tiles, v_tiles = tiles
    k_here, v_here, k_free, v_free = barriers
    for key in range(begin, end, BLOCK_N):
        place, phase = _turn((key - begin) // BLOCK_N, STAGES)
        mbarrier.wait(k_free.index(place), phase ^ 1)
        mbarrier.expect(k_here.index(place), k_tensor.nbytes_per_cta)
        tma.async_copy_global_to_shared(k_tensor, [key, 0], k_here.index(place), k_tiles.index(place))
        mbarrier.wait(v_free.index(place), phase ^ 1)
        mbarrier.expect(v_here.index(place), v_tensor.nbytes_per_cta)
        tma.async_copy_global_to_shared(v_tensor, [key, 0], v_here.index(place), v_tiles.index(place))


@gluon.jit
def _weigh(scores, m, total, rows, key, end, shift, scale, MASKED: gl.constexpr):
    """Return a tile's weights, the factor for earlier weights, and the new m and total, as `kernels._attend` does."""
    layout: gl.constexpr = scores.type.layout
    if MASKED:
        keys = key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
        visible = (keys < end)[None, :] & (keys[None, :] <= rows[:, None] + shift)
        scores = gl.where(visible, scores * scale, -float("inf"))
        factor = 1.0
    else:
        factor = scale
    m_new = gl.maximum(m, gl.max(scores, 1) * factor)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    weights = gl.exp2(scores * factor - m_safe[:, None])
    decay = gl.exp2(m - m_safe)
    return weights, decay, m_new, total * decay + gl.sum(weights, 1)


@gluon.jit
def _scores(q, k_tiles, k_here, number, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Begin the product of q with the keys of a tile."""
    place, phase = _turn(number, STAGES)
    mbarrier.wait(k_here.index(place), phase)
    nothing = gl.full([q.shape[0], BLOCK_N], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(q, k_tiles.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _walk(
    acc, weights, m, total, number, q, tiles, barriers, rows, first, last, end, shift, scale,
    MASKED: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the state after the tiles first … last. `weights` belong to the previous tile, and are not yet in acc."""
    _, _, k_tiles, v_tiles = tiles
    k_here, v_here, k_free, v_free = barriers
    for key in range(first, last, BLOCK_N):
        scores = _scores(q, k_tiles, k_here, number, LAYOUT, BLOCK_N, STAGES)
        before, phase = _turn(number - 1, STAGES)
        mbarrier.wait(v_here.index(before), phase)
        adding = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_free.index(number % STAGES))
        new, decay, m, total = _weigh(scores, m, total, rows, key, end, shift, scale, MASKED)
        acc, weights = warpgroup_mma_wait(0, deps=(adding, weights))
        mbarrier.arrive(v_free.index(before))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = gl.convert_layout(new.to(gl.bfloat16), weights.type.layout)
        number += 1
    return acc, weights, m, total, number


@gluon.jit
def _attend(
    given, begin, split, end, row, shift, scale,
    HALF: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one half of the rows in one warpgroup."""
    q_tiles, q_here, tiles, barriers, state = given
    ROWS: gl.constexpr = q_tiles.shape[1]
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 2)
    ACC, M, TOTAL = state
    k_here, v_here, k_free, _ = barriers
    rows = row + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    own = row + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_OUT))
    wide = own[:, None] * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OF_OUT))[None, :]
    acc, m, total = gl.load(ACC + wide), gl.load(M + rows), gl.load(TOTAL + rows)

    q = q_tiles.index(HALF)
    mbarrier.wait(q_here.index(HALF), 0)
    scores = _scores(q, tiles[2], k_here, 0, OF_SCORES, BLOCK_N, STAGES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0))
    new, decay, m, total = _weigh(scores, m, total, rows, begin, end, shift, scale, True)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OF_OUT))[:, None]
    weights, number = gl.convert_layout(new.to(gl.bfloat16), OF_WEIGHTS), 1
    acc, weights, m, total, number = _walk(
        acc, weights, m, total, number, q, tiles, barriers, rows, begin + BLOCK_N, split, end, shift, scale,
        False, OF_SCORES, BLOCK_N, STAGES,
    )  # fmt: skip
    acc, weights, m, total, number = _walk(
        acc, weights, m, total, number, q, tiles, barriers, rows, begin + BLOCK_N * number, end, end, shift,
        scale, True, OF_SCORES, BLOCK_N, STAGES,
    )  # fmt: skip
    place, phase = _turn(number - 1, STAGES)
    mbarrier.wait(v_here.index(place), phase)
    acc = warpgroup_mma(weights, tiles[3].index(place), acc)

    gl.store(ACC + wide, acc)
    gl.store(M + rows, m)
    gl.store(TOTAL + rows, total)


@gluon.jit
def forward_step(
    Q, K, V, ACC, M, TOTAL, n_rows, n_keys, row, begin, split, end, shift, scale,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Carry the state of BLOCK_M rows over the keys begin … end, of which those before `split` need no mask.

    All tensors are dense, and the segment has a key. Grid: B · H.
    """
    ROWS: gl.constexpr = BLOCK_M // 2
    head = gl.program_id(0).to(gl.int64)
    of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], gl.bfloat16)
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], gl.bfloat16)
    q_tensor = tma.make_tensor_descriptor(
        Q + head * n_rows * HEAD_DIM, [n_rows, HEAD_DIM], [HEAD_DIM, 1], [ROWS, HEAD_DIM], of_q
    )
    k_tensor = tma.make_tensor_descriptor(
        K + head * n_keys * HEAD_DIM, [n_keys, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_N, HEAD_DIM], of_keys
    )
    v_tensor = tma.make_tensor_descriptor(
        V + head * n_keys * HEAD_DIM, [n_keys, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_N, HEAD_DIM], of_keys
    )
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, HEAD_DIM], of_q)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], of_keys)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], of_keys)
    q_here = mbarrier.allocate_mbarrier(2)
    k_here, v_here = mbarrier.allocate_mbarrier(STAGES), mbarrier.allocate_mbarrier(STAGES)
    k_free, v_free = mbarrier.allocate_mbarrier(STAGES), mbarrier.allocate_mbarrier(STAGES)
    for half in gl.static_range(2):
        mbarrier.init(q_here.index(half), 1)
    for place in gl.static_range(STAGES):
        mbarrier.init(k_here.index(place), 1)
        mbarrier.init(v_here.index(place), 1)
        mbarrier.init(k_free.index(place), 2)
        mbarrier.init(v_free.index(place), 2)
    for half in gl.static_range(2):
        mbarrier.expect(q_here.index(half), q_tensor.nbytes_per_cta)
        tma.async_copy_global_to_shared(
            q_tensor, [row + half * ROWS, 0], q_here.index(half), q_tiles.index(half)
        )
    tiles, barriers = (k_tensor, v_tensor, k_tiles, v_tiles), (k_here, v_here, k_free, v_free)
    of_head = head * n_rows
    state = (ACC + of_head * HEAD_DIM, M + of_head, TOTAL + of_head)
    given = (q_tiles, q_here, tiles, barriers, state)
    gl.warp_specialize(
        [
            (_attend, (given, begin, split, end, row, shift, scale, 0, HEAD_DIM, BLOCK_N, STAGES)),
            (_attend, (given, begin, split, end, row, shift, scale, 1, HEAD_DIM, BLOCK_N, STAGES)),
            (_copy, (tiles, barriers, begin, end, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )

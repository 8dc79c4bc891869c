"""Pictures of serving: who waits for a chunk, the time of a decode step, masks, bytes, each rank's cache.

A colour means the same in all of them: orange is cached tokens, blue is a chunk or its queries, green is weights,
grey is messages, and black is a token that a user gets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.cost.planner.memory_table import most_sequences
from ringlab.viz.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RULE,
    WIDE,
    new_figure,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringlab.cost.planner.serve_request import ServeRequest
    from ringlab.cost.planner.serve_time import ServeTime


def turns(
    runs: Mapping[str, Sequence[tuple[float, float]]], step_s: float, both_s: float, window_s: float = 10.0
) -> Figure:
    """Return a picture of Ada's chunks and Ben's tokens in the last `window_s` seconds of her prompt.

    runs: by title, the seconds of each chunk, in two parts: what every chunk takes, and what the cached tokens
    add. A decode step for Ben, of `step_s`, follows each chunk. After the prompt both decode in steps of
    `both_s`.
    """
    after_s = 0.1 * window_s
    with styled():
        drawn = new_figure((8.0, 4.4))
        axes = drawn.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (title, chunks) in zip(axes, runs.items(), strict=True):
            end, tokens = 0.0, []
            for same, more in reversed(chunks):
                start = end - same - more
                for left, wide, colour in ((start, same, BLUE), (start + same, more, ORANGE)):
                    panel.add_rectangle(ax, (left, 1), wide, 0.8, facecolor=colour, linewidth=0)
                tokens.append(start)  # Ben's step ends when the next chunk begins
                end = start - step_s
                if end < -window_s:
                    break
            ax.vlines(tokens, 0.0, 0.8, color=INK, linewidth=1)
            longest = max(sum(each) for each in chunks)
            if longest > 0.3 * window_s:
                ax.annotate("", (-longest, 0.4), (0, 0.4), arrowprops={"arrowstyle": "<->", "color": QUIET})
                label = f"Ben gets nothing for {1e3 * longest:,.0f} ms"
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
                ax.text(-longest / 2, 0.4, label, ha="center", va="center", fontsize=9.5, bbox=box)
                ax.text(-longest / 2, 1.4, "one chunk", ha="center", va="center", fontsize=9.5)
            for low in (0, 1):  # the tokens come too fast to be drawn one by one
                panel.add_rectangle(ax, (0.01 * window_s, low), after_s, 0.8, facecolor=INK, linewidth=0)
                every = f"every\n{1e3 * both_s:.0f} ms"
                middle = (0.01 * window_s + after_s) / 2 + 0.005 * window_s, low + 0.4
                ax.text(*middle, every, ha="center", va="center", color=PAPER, fontsize=8.5)
            ax.axvline(0.005 * window_s, color=QUIET, linewidth=1, linestyle=":")
            ax.set(xlim=(-window_s, after_s), ylim=(-0.1, 1.9), yticks=[0.4, 1.4])
            ax.set_yticklabels(["Ben", "Ada"], color=INK)
            ax.set_title(f"{title}: Ben waits up to {1e3 * longest:,.0f} ms")
            panel.bare(ax)
        axes[-1].set_xlabel("seconds, counted from Ada's first token (dotted)")
        axes[-1].set_xticks([tick for tick in axes[-1].get_xticks() if -window_s <= tick <= 0])
        keys = [panel.patch(facecolor=BLUE), panel.patch(facecolor=ORANGE), panel.patch(facecolor=INK)]
        names = [
            "Ada's chunk: as long as her first one took",
            "how much longer it takes now",
            "a token arrives",
        ]
        drawn.legend(keys, names, loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def describe_turns(
    runs: Mapping[str, Sequence[tuple[float, float]]], step_s: float, both_s: float, window_s: float = 10.0
) -> str:
    """Return the picture of `turns` in words."""
    words = [
        f"{title}: Ben gets a token between two chunks and waits up to {1e3 * max(sum(each) for each in chunks):,.0f} ms; "
        f"her last chunk takes {sum(chunks[-1]) / chunks[-1][0]:.0f} times as long as her first"
        for title, chunks in runs.items()
    ]
    return (
        f"The last {window_s:g} seconds of Ada's prompt. {'. '.join(words)}. "
        f"After the prompt both get a token every {1e3 * both_s:.0f} ms."
    )


def step_bars(
    steps: Mapping[tuple[int, str], ServeTime], title: str, unfit: Collection[tuple[int, str]] = ()
) -> Figure:
    """Return a bar for each decode step, made of milliseconds for weights, caches and messages.

    steps: by (users, how they are divided). Bars in `unfit` are pale, because their caches do not fit into
    the memory.
    """
    groups = list(dict.fromkeys(users for users, _ in steps))
    gap = 0.5 if len(steps) > len(groups) else 0.0
    with styled():
        drawn = new_figure((8.0, 1.35 + 0.36 * len(steps) + 0.36 * gap * len(groups)))
        ax = drawn.subplots()
        longest, where = max(1e3 * served.token_s for served in steps.values()), {}
        for number, (key, served) in enumerate(steps.items()):
            y = where[key] = number + gap * groups.index(key[0])
            left, fits = 0.0, key not in unfit
            for value, colour in zip(_parts_ms(served), (GREEN, ORANGE, GREY), strict=True):
                look = {} if fits else {"alpha": 0.45, "hatch": "//"}
                panel.add_rectangle(
                    ax, (left, y - 0.38), value, 0.76, facecolor=colour, edgecolor=PAPER, **look
                )
                if value > 0.03 * longest:
                    size = 9 if value > 0.06 * longest else 7.5
                    middle = left + value / 2, y
                    ax.text(*middle, f"{value:.1f}", ha="center", va="center", color=INK, fontsize=size)
                left += value
            ax.text(left + 0.01 * longest, y, _speed(served, fits), va="center", color=INK, fontsize=9)
        ax.set(xlim=(0, 1.36 * longest), ylim=(max(where.values()) + 0.6, -0.6), title=title)
        ax.set_xlabel("milliseconds of a decode step, in which every user gets one token")
        ax.set_yticks([*where.values()], [f"{_counted(users)}  {name}".strip() for users, name in steps])
        panel.bare(ax, axis="y", labelcolor=INK)
        keys = [panel.patch(facecolor=colour) for colour in (GREEN, ORANGE, GREY)]
        names = ["reading weights", "reading caches", "messages"]
        drawn.legend(keys, names, loc="outside lower center", ncols=3)
    return drawn


def describe_step_bars(
    steps: Mapping[tuple[int, str], ServeTime], title: str, unfit: Collection[tuple[int, str]] = ()
) -> str:
    """Return the picture of `step_bars` in words."""
    words = []
    for (users, name), served in steps.items():
        weights, caches, messages = _parts_ms(served)
        parts = f"weights {weights:.1f}, caches {caches:.1f}, messages {messages:.1f} ms"
        speed = _speed(served, (users, name) not in unfit)
        words.append(f"{f'{_counted(users)} {name}'.strip()}: {parts}, {speed}")
    return f"{title}. {'. '.join(words)}."


def _parts_ms(served: ServeTime) -> tuple[float, float, float]:
    token = served.token
    return 1e3 * token.weights_s, 1e3 * token.cache_s, 1e3 * token.exposed_s


def _speed(served: ServeTime, fits: bool) -> str:
    together = served.tokens_per_s
    return f"{together:.0f} tokens/s, {together / served.sequences:.0f} each" if fits else "does not fit"


def _counted(users: int) -> str:
    return f"{users} user{'s' * (users > 1)}"


def chunk_masks(chunks: int) -> Figure:
    """Return a picture of the keys that a prompt's queries see: chunk by chunk, and in the last by is_causal=True."""
    with styled():
        drawn = new_figure((8.0, 3.7))
        axes = drawn.subplots(1, 2, sharey=True)
        last = chunks - 1
        for ax, title in zip(
            axes, ("what each chunk must see", f"chunk {chunks} with is_causal=True"), strict=True
        ):
            right = ax is axes[0]
            for row in range(chunks):
                pale = 1.0 if right or row == last else 0.25
                panel.add_rectangle(
                    ax, (0, row), chunks, 1, facecolor="#F2F4F7", edgecolor=PAPER, linewidth=2
                )
                for column in range(row if right or row < last else 0):
                    look = {"facecolor": ORANGE, "edgecolor": PAPER, "linewidth": 2, "alpha": pale}
                    panel.add_rectangle(ax, (column, row), 1, 1, **look)
                at = row if right or row < last else 0
                ax.fill([at, at, at + 1], [row, row + 1, row + 1], color=BLUE, linewidth=0, alpha=pale)
            ax.set(title=title, xlim=(0, chunks), ylim=(chunks, 0), xticks=[n + 0.5 for n in range(chunks)])
            ax.set_xticklabels([f"chunk {n + 1}" for n in range(chunks)])
            ax.set(yticks=[n + 0.5 for n in range(chunks)], xlabel="keys of …")
            ax.set_yticklabels([f"chunk {n + 1}" for n in range(chunks)])
            ax.set_aspect("equal")
            panel.bare(ax)
        axes[0].set_ylabel("queries of …")
        keys = [panel.patch(facecolor=ORANGE), panel.patch(facecolor=BLUE)]
        names = ["the cached prefix: a rectangle", "the chunk itself: a triangle"]
        drawn.legend(keys, names, loc="outside lower center", ncols=2)
    return drawn


def describe_chunk_masks(chunks: int) -> str:
    """Return the two masks of `chunk_masks` in words."""
    return (
        f"Queries by keys, in {chunks} chunks. Left: the queries of chunk n see n − 1 whole squares, the cached prefix, and half of "
        f"the square of their own chunk. Right: with is_causal=True the queries of chunk {chunks} see half of the square of chunk 1, "
        "and nothing else."
    )


def travellers(P: int) -> Figure:
    """Return two pictures of P ranks: in one, K/V blocks travel; in the other, queries travel.

    In the second picture, the partials of rank 0's queries then return to rank 0.
    """
    with styled():
        drawn = new_figure((8.0, 3.6))
        axes = drawn.subplots(1, 2)
        for ax, title in zip(axes, ("keys and values travel", "queries travel"), strict=True):
            keys_move = title.startswith("keys")
            at, left, right = (1.4, 0.32, 1.04) if keys_move else (0.75, 0.74, 1.36)
            for rank in range(P):
                _draw_box(ax, (rank + 0.06, 1.0), (0.24, 0.8), ORANGE, str(rank))
                _draw_box(ax, (rank + 0.38, 0.6), (0.34, 0.3), BLUE, str(rank))
                ax.text(rank + 0.4, 0.3, f"rank {rank}", ha="center", color=QUIET, fontsize=9)
                _arrow(ax, (rank + left, at), (rank + right, at))
            ends = f"to rank 0;\n{P - 1} hops"
            ax.text(P + (0.1 if keys_move else 0.4), at, ends, va="center", color=INK, fontsize=8.5)
            for rank in range(1, P) if not keys_move else ():
                low = 2.15 + 0.34 * (rank - 1)
                for place in (0.38, rank + 0.38):  # on rank 0, and where the partial is computed
                    _draw_partial(ax, (place, low), (0.34, 0.26), 0, rank)
                _arrow(ax, (rank + 0.36, low + 0.13), (0.76, low + 0.13))
            ax.set(xlim=(0, P + 1.1), ylim=(0.15, 2.2 + 0.34 * (P - 1)), title=title)
            ax.set_axis_off()
        words = "partials of rank 0's\nqueries go home; the\nother ranks get theirs\nthe same way"
        axes[1].text(P + 0.02, 2.3, words, color=INK, fontsize=8.5)
        _explain_boxes(drawn)
    return drawn


def _draw_box(
    ax: Any, corner: tuple[float, float], size: tuple[float, float], colour: str, text: str
) -> None:
    panel.add_rectangle(ax, corner, *size, facecolor=colour, edgecolor=PAPER)
    middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    ink = PAPER if colour == BLUE else INK
    ax.text(*middle, text, ha="center", va="center", color=ink, fontsize=8.5)


def _draw_partial(
    ax: Any, corner: tuple[float, float], size: tuple[float, float], asks: int, has: int
) -> None:
    """Draw the partial of the queries of rank `asks` over the keys of rank `has`, half in each colour."""
    half = size[0] / 2, size[1]
    _draw_box(ax, corner, half, BLUE, str(asks))
    _draw_box(ax, (corner[0] + half[0], corner[1]), half, ORANGE, str(has))


def _explain_boxes(drawn: Figure) -> None:
    keys = [panel.patch(facecolor=ORANGE), panel.patch(facecolor=BLUE)]
    names = [
        "keys and values of rank …",
        "queries of rank …   both in one box: a partial of these queries over these keys",
    ]
    drawn.legend(keys, names, loc="outside lower center", ncols=2, fontsize=9)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4})


def describe_travellers(P: int) -> str:
    """Return the two pictures of `travellers` in words."""
    return (
        f"{P} ranks, each with a tall block of keys and values and a small one of queries. Left: tall blocks go from rank to "
        "rank. Right: small blocks do, and the partials of rank 0's queries come home to rank 0 from every other rank."
    )


def bytes_by_prefix(prefixes: Sequence[int], lines: Mapping[str, Sequence[float]], meet: int) -> Figure:
    """Return a picture of the bytes that a rank sends, by cached tokens. The lines cross at `meet` tokens."""
    with styled():
        drawn = new_figure(WIDE)
        ax = drawn.subplots()
        for (name, values), colour, mark in zip(lines.items(), (ORANGE, BLUE), ("o", "s"), strict=True):
            ax.plot(prefixes, [value / 1e6 for value in values], color=colour, marker=mark, label=name)
        ax.axvline(meet, color=INK, linewidth=1, linestyle=":")
        ax.annotate(
            f"{meet:,} tokens",
            (meet, 0.9),
            (6, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )
        ax.set(xscale="log", yscale="log", xlabel="cached tokens before the chunk", ylabel="MB that a rank sends, per layer",
               title="Prefill of a chunk: keys and values travel, or queries do")  # fmt: skip
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.legend(loc="upper left")
    return drawn


def describe_bytes(prefixes: Sequence[int], lines: Mapping[str, Sequence[float]], meet: int) -> str:
    """Return the two lines of `bytes_by_prefix` in words."""
    ends = "; ".join(
        f"{name}: {values[0] / 1e6:,.1f} to {values[-1] / 1e6:,.1f} MB" for name, values in lines.items()
    )
    return f"Bytes of a rank with {prefixes[0]:,} to {prefixes[-1]:,} cached tokens. {ends}. They meet at {meet:,} tokens."


def hand_over(P: int) -> Figure:
    """Return a picture of each rank's partials (heads × tokens) after attending, and after the hand-over."""
    with styled():
        drawn = new_figure((8.0, 4.6))
        axes = drawn.subplots(2, P, squeeze=False)
        for rows, what in ((0, "after step 2"), (1, "after step 3")):
            for rank in range(P):
                ax = axes[rows][rank]
                for head in range(P):
                    for token in range(P):
                        panel.add_rectangle(
                            ax, (token, head), 0.94, 0.94, facecolor="#F2F4F7", edgecolor=RULE
                        )
                        if (token if rows == 0 else head) == rank:
                            _draw_partial(ax, (token, head), (0.94, 0.94), head, token)
                ax.set(
                    xlim=(-0.1, P),
                    ylim=(P, -0.1),
                    xticks=[],
                    yticks=[],
                    title=f"on rank {rank}" if rows == 0 else "",
                )
                ax.set_aspect("equal")
                ax.grid(False)
            axes[rows][0].set_ylabel(f"{what}\nheads of rank 0 … {P - 1}", fontsize=9.5)
            for rank in range(P):
                axes[rows][rank].set_xlabel(f"tokens of rank 0 … {P - 1}", fontsize=9)
        _explain_boxes(drawn)
    return drawn


def describe_hand_over(P: int) -> str:
    """Return the picture of `hand_over` in words."""
    return (
        f"Squares of heads by tokens for {P} ranks. After attending, rank r has column r: all heads over its own tokens. "
        "After the hand-over it has row r: its own heads over the tokens of all ranks."
    )


def shares(ways: Mapping[str, ServeRequest]) -> Figure:
    """Return a picture of each rank's part of a user's cache, and of its bytes, for each way to divide them."""
    with styled():
        drawn = new_figure((8.0, 3.9))
        axes = drawn.subplots(1, len(ways), sharey=True, squeeze=False)[0]
        for ax, (name, request) in zip(axes, ways.items(), strict=True):
            for (head, token), ranks in _holders(request).items():
                alone = len(ranks) == 1
                heads, tokens = 1 / _cut_heads(request), 1 / request.token_ranks
                look = {"facecolor": ORANGE, "hatch": "" if alone else "//"}
                corner = token * tokens, head * heads
                panel.add_rectangle(ax, corner, tokens, heads, edgecolor=PAPER, linewidth=2, **look)
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
                middle, names = (corner[0] + tokens / 2, corner[1] + heads / 2), " and ".join(map(str, ranks))
                ax.text(*middle, names, ha="center", va="center", color=INK, fontsize=9, bbox=box)
            words = f"tokens of the cache\n{_held(request)}"
            ax.set(title=name, xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], xlabel=words)
        axes[0].set_ylabel("K/V heads")
        keys = [
            panel.patch(facecolor=ORANGE),
            panel.patch(facecolor=ORANGE, edgecolor=PAPER, hatch="//"),
        ]
        meanings = ["one rank has this part of the cache", "two ranks have the same part"]
        drawn.legend(keys, meanings, loc="outside lower center", ncols=2)
    return drawn


def describe_shares(ways: Mapping[str, ServeRequest]) -> str:
    """Return the alternative text of `shares`: each way to divide a cache, in words."""
    parts = [
        f"{name}: {len(_holders(request))} different parts on {request.gpus} ranks, {' '.join(_held(request).split())}"
        for name, request in ways.items()
    ]
    return f"Which part of a cache of heads and tokens each rank has. {'; '.join(parts)}."


def _cut_heads(request: ServeRequest) -> int:
    """Return into how many parts a cache is cut by K/V heads."""
    return min(request.head_ranks, request.sized.main.dealt_heads)


def _holders(request: ServeRequest) -> dict[tuple[int, int], list[int]]:
    """Return the ranks that have each part of a cache, by the numbers of its heads and of its tokens.

    If the ranks of a row have copies of their weights, ranks with the same tokens are neighbours. Otherwise
    ranks with the same heads are.
    """
    held: dict[tuple[int, int], list[int]] = {}
    copies = request.head_ranks // _cut_heads(request)
    for rank in range(request.gpus):
        if request.sharing == "copies":
            token, head = divmod(rank, request.head_ranks)
        else:
            head, token = divmod(rank, request.token_ranks)
        held.setdefault((head // copies, token), []).append(rank)
    return held


def _held(request: ServeRequest) -> str:
    weights, cache = request.weight_bytes / 1e9, request.cache_bytes(request.context, 1) / 1e9
    fit = most_sequences(request, request.machine.memory_bytes)
    return f"{weights:.1f} GB of weights and\n{cache:.1f} GB a user: {fit} users fit"

"""Pictures of serving: who waits for a chunk, the time of a decode step, masks, bytes, copies of weights and caches.

Colours: orange for keys and values, blue for a chunk or its queries, green for weights, dark grey for messages, black
for a token that a user gets, and purple for the time of a first chunk. Keys and values are cached, except for those of
the chunk itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    QUIET,
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

    runs: by title, the seconds of each chunk in two parts: the time that every chunk takes, and the time that
    the cached tokens add. A decode step for Ben, of `step_s` seconds, follows each chunk. After the prompt,
    both users decode in steps of `both_s` seconds.
    """
    after_s = 0.12 * window_s
    with styled():
        drawn = new_figure((8.0, 4.4))
        axes = drawn.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (title, chunks) in zip(axes, runs.items(), strict=True):
            end, tokens = 0.0, []
            longest = max(sum(each) for each in chunks)
            named = longest > 0.3 * window_s
            for number, (same, more) in reversed(list(enumerate(chunks, 1))):
                start = end - same - more
                colour = (ORANGE, 0.4) if named and number < len(chunks) else ORANGE
                panel.add_rectangle(
                    ax, (start, 1), same + more, 0.8, facecolor=colour, edgecolor=PAPER, linewidth=0.8
                )
                seen = max(start, -window_s), end
                if named and seen[1] - seen[0] > 0.08 * window_s:
                    ax.plot([seen[0], *seen, seen[1]], [1.86, 1.93, 1.93, 1.86], color=QUIET, linewidth=1)
                    middle = sum(seen) / 2, 1.98
                    ax.text(*middle, f"chunk {number}", ha="center", va="bottom", color=INK, fontsize=9)
                if same > 0.01 * window_s:  # a thinner rectangle would look like a line between chunks
                    panel.add_rectangle(
                        ax, (start, 1), same, 0.8, facecolor=PURPLE, edgecolor=PAPER, linewidth=0.8
                    )
                tokens.append(start)  # Ben's step ends when the next chunk begins
                end = start - step_s
                if end < -window_s:
                    break
            ax.vlines(tokens, 0.0, 0.8, color=INK, linewidth=1)
            if named:
                ax.annotate("", (-longest, 0.4), (0, 0.4), arrowprops={"arrowstyle": "<->", "color": QUIET})
                label = f"Ben waits for the chunk: {1e3 * longest:,.0f} ms"
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
                ax.text(-longest / 2, 0.4, label, ha="center", va="center", fontsize=9.5, bbox=box)
                same, more = chunks[-1]
                for at, words in ((same / 2, f"{same:.1f} s"), (same + more / 2, f"{more:.1f} s more")):
                    ax.text(at - longest, 1.4, words, ha="center", va="center", color=INK, fontsize=9.5)
            for low in (0, 1):  # the tokens come too fast to be drawn one by one
                panel.add_rectangle(
                    ax, (0.01 * window_s, low), 0.11 * window_s, 0.8, facecolor=INK, linewidth=0
                )
                every = f"then both,\nevery\n{1e3 * both_s:.0f} ms"
                middle = (0.01 * window_s + after_s) / 2, low + 0.4
                ax.text(*middle, every, ha="center", va="center", color=PAPER, fontsize=8)
            ax.set(xlim=(-window_s, after_s), ylim=(-0.1, 2.3 if named else 1.9), yticks=[0.4, 1.4])
            ax.set_yticklabels(["Ben", "Ada"], color=INK)
            ax.set_title(f"{title}: Ben waits up to {1e3 * longest:,.0f} ms")
            panel.bare(ax)
        axes[-1].set_xlabel("seconds, counted from Ada's first token")
        axes[-1].set_xticks([tick for tick in axes[-1].get_xticks() if -window_s <= tick <= 0])
        keys = [panel.patch(facecolor=PURPLE), panel.patch(facecolor=ORANGE), panel.patch(facecolor=INK)]
        names = [
            "as long as Ada's first chunk",
            "the time beyond it (below: all of the chunk)",
            "a token arrives",
        ]
        drawn.legend(keys, names, loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def describe_turns(
    runs: Mapping[str, Sequence[tuple[float, float]]], step_s: float, both_s: float, window_s: float = 10.0
) -> str:
    """Return the picture of `turns` in words."""
    words = [
        f"{title}: Ben gets a token between two chunks, and the longest keeps him waiting {1e3 * max(sum(each) for each in chunks):,.0f} ms; "
        f"her last chunk takes {sum(chunks[-1]) / chunks[-1][0]:.0f} times as long as her first"
        for title, chunks in runs.items()
    ]
    return (
        f"The last {window_s:g} seconds of Ada's prompt. {'. '.join(words)}. "
        f"After the prompt both get a token every {1e3 * both_s:.0f} ms."
    )


def step_bars(steps: Mapping[str, ServeTime], title: str, group: int = 1) -> Figure:
    """Return a bar for each decode step: milliseconds for weights, caches and messages.

    group: the number of bars that stand together. The others are compared with the first.
    """
    ends = _ends(steps, group)
    names = ["reading weights", "reading caches", "messages"]
    label = "milliseconds of a decode step, in which every user gets one token"
    return _bars(steps, ends, names, (title, label), group)


def describe_step_bars(steps: Mapping[str, ServeTime], title: str, group: int = 1) -> str:
    """Return the picture of `step_bars` in words."""
    words = []
    for (name, served), end in zip(steps.items(), _ends(steps, group), strict=True):
        weights, caches, messages = _parts_ms(served)
        parts = f"weights {weights:.1f}, caches {caches:.1f}, messages {messages:.1f} ms"
        words.append(f"{name}: {parts}, {end}")
    return f"{title}. {'. '.join(words)}."


def read_bars(steps: Mapping[str, ServeTime], title: str, group: int = 1) -> Figure:
    """Return a bar for each decode step like `step_bars`, without messages."""
    ends = [f"{_reading_ms(served):.1f} ms" for served in steps.values()]
    label = "milliseconds of reading in a decode step"
    return _bars(steps, ends, ["reading weights", "reading caches"], (title, label), group)


def describe_read_bars(steps: Mapping[str, ServeTime], title: str, group: int = 1) -> str:
    """Return the picture of `read_bars` in words."""
    words = []
    for name, served in steps.items():
        weights, caches, _ = _parts_ms(served)
        words.append(
            f"{name}: weights {weights:.1f} and caches {caches:.1f}, together {_reading_ms(served):.1f} ms"
        )
    return f"{title}. {'. '.join(words)}."


def _bars(
    steps: Mapping[str, ServeTime],
    ends: Sequence[str],
    names: Sequence[str],
    words: tuple[str, str],
    group: int,
) -> Figure:
    """Draw the parts of each step that have a name in `names`. words: the title, and the name of the axis."""
    title, label = words
    colours = (GREEN, ORANGE, QUIET)[: len(names)]
    parts = [_parts_ms(served)[: len(names)] for served in steps.values()]
    middles = [row + 0.5 * (row // group) * (group > 1) for row in range(len(parts))]
    with styled():
        drawn = new_figure((8.0, 1.71 + 0.36 * middles[-1]))
        ax = drawn.subplots()
        longest = max(map(sum, parts))
        for y, values, end in zip(middles, parts, ends, strict=True):
            left = 0.0
            for value, colour in zip(values, colours, strict=True):
                panel.add_rectangle(ax, (left, y - 0.38), value, 0.76, facecolor=colour, edgecolor=PAPER)
                if value > 0.03 * longest:
                    size = 9 if value > 0.06 * longest else 7.5
                    middle, ink = (left + value / 2, y), PAPER if colour == QUIET else INK
                    ax.text(*middle, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=size)
                left += value
            ax.text(left + 0.01 * longest, y, end, va="center", color=INK, fontsize=9)
        room = 1.1 + 0.016 * max(map(len, ends))  # leaves space for the words after a bar
        ax.set(xlim=(0, room * longest), ylim=(middles[-1] + 0.6, -0.6), title=title, xlabel=label)
        ax.set_xticks([tick for tick in ax.get_xticks() if tick <= 1.02 * longest])
        ax.set_yticks(middles, list(steps))
        panel.bare(ax, axis="y", labelcolor=INK)
        keys = [panel.patch(facecolor=colour) for colour in colours]
        drawn.legend(keys, names, loc="outside lower center", ncols=3)
    return drawn


def _parts_ms(served: ServeTime) -> tuple[float, float, float]:
    token = served.token
    return 1e3 * token.weights_s, 1e3 * token.cache_s, 1e3 * token.exposed_s


def _reading_ms(served: ServeTime) -> float:
    return sum(_parts_ms(served)[:2])


def _ends(steps: Mapping[str, ServeTime], group: int) -> list[str]:
    """Return the words after each bar: in a group, how much longer or shorter a step is than the group's first."""
    drawn = list(steps.values())
    if group == 1:
        return [_speed(served) for served in drawn]
    ends = []
    for at, served in enumerate(drawn):
        more_ms = 1e3 * (served.token_s - drawn[at - at % group].token_s)
        than_first = f" ({more_ms:+.1f})".replace("-", "−") if at % group else ""
        each = served.tokens_per_s / served.sequences
        ends.append(f"{1e3 * served.token_s:.1f} ms{than_first}: {each:.0f} tokens/s each")
    return ends


def _speed(served: ServeTime) -> str:
    together, step_ms = served.tokens_per_s, 1e3 * served.token_s
    return f"{step_ms:.1f} ms: {together:.0f} tokens/s, {together / served.sequences:.0f} each"


def chunk_masks(chunks: int) -> Figure:
    """Return a picture of the keys that the queries of each chunk of a prompt see."""
    with styled():
        drawn = new_figure((8.0, 3.7))
        ax = drawn.subplots()
        for row in range(chunks):
            _draw_chunk(ax, row, row, chunks)
            halves = f"{2 * row + 1} half of a square" if row == 0 else f"{2 * row + 1} halves of a square"
            ax.text(chunks + 0.15, row + 0.5, halves, va="center", color=INK)
        ax.set(title="The triangle stays, the rectangle grows", xlim=(0, chunks), ylim=(chunks, 0))
        _name_chunks(ax, chunks)
        ax.set_yticks([n + 0.5 for n in range(chunks)], [f"chunk {n + 1}" for n in range(chunks)])
        ax.set_ylabel("queries of …")
        _explain_chunks(drawn, "the cached prefix: a rectangle", "the chunk itself: a triangle")
    return drawn


def describe_chunk_masks(chunks: int) -> str:
    """Return the picture of `chunk_masks` in words."""
    return (
        f"Queries by keys, in {chunks} chunks. The queries of chunk n see n − 1 whole squares, the cached prefix, and half of the "
        f"square of their own chunk. So chunk {chunks} sees {2 * chunks - 1} half squares."
    )


def last_chunk(chunks: int) -> Figure:
    """Return a picture of the keys that the last chunk must see, and of those that it sees with is_causal=True."""
    with styled():
        drawn = new_figure((8.0, 2.2))
        titles = f"Chunk {chunks} must see all of this", "With is_causal=True it sees only this"
        for ax, title, before in zip(drawn.subplots(1, 2), titles, (chunks - 1, 0), strict=True):
            _draw_chunk(ax, 0, before, chunks, BLUE if before else ORANGE)
            ax.set(title=title, xlim=(0, chunks), ylim=(1, 0), yticks=[])
            _name_chunks(ax, chunks)
            if before:
                ax.set_yticks([0.5], [f"queries of\nchunk {chunks}"])
        _explain_chunks(drawn, "keys of the cached prefix", "keys of the chunk itself")
    return drawn


def describe_last_chunk(chunks: int) -> str:
    """Return the picture of `last_chunk` in words."""
    return (
        f"The keys that the queries of chunk {chunks} see. They must see {chunks - 1} whole squares and half of their own. With "
        "is_causal=True they see half of the square of chunk 1, and nothing else."
    )


def _draw_chunk(ax: Any, row: int, before: int, chunks: int, half: str = BLUE) -> None:
    """Draw a row of a mask: queries that see `before` whole squares and half of the next one, in the colour `half`."""
    panel.add_rectangle(ax, (0, row), chunks, 1, facecolor="#F2F4F7", edgecolor=PAPER, linewidth=2)
    for column in range(before):
        panel.add_rectangle(ax, (column, row), 1, 1, facecolor=ORANGE, edgecolor=PAPER, linewidth=2)
    ax.fill([before, before, before + 1], [row, row + 1, row + 1], facecolor=half, linewidth=0)


def _name_chunks(ax: Any, chunks: int) -> None:
    ax.set_xticks([n + 0.5 for n in range(chunks)], [f"chunk {n + 1}" for n in range(chunks)])
    ax.set(xlabel="keys of …", aspect="equal")
    panel.bare(ax)


def _explain_chunks(drawn: Figure, prefix: str, itself: str) -> None:
    keys = [panel.patch(facecolor=ORANGE), panel.patch(facecolor=BLUE)]
    drawn.legend(keys, [prefix, itself], loc="outside lower center", ncols=2)


def travellers(P: int) -> Figure:
    """Return two pictures of P ranks: in one, K/V blocks travel; in the other, queries travel.

    In the second picture, the partials of rank 0's queries then return to rank 0.
    """
    with styled():
        drawn = new_figure((8.0, 4.2))
        axes = drawn.subplots(1, 2)
        for ax, title in zip(
            axes, ("Keys and values travel", "Queries travel, and partials go home"), strict=True
        ):
            keys_move = title.startswith("Keys")
            at, left, right = (1.65, 0.32, 1.04) if keys_move else (0.75, 0.74, 1.36)
            for rank in range(P):
                _draw_box(ax, (rank + 0.06, 1.0), (0.24, 1.3), ORANGE, str(rank))
                _draw_box(ax, (rank + 0.38, 0.6), (0.34, 0.3), BLUE, str(rank))
                ax.text(rank + 0.4, 2.45, f"rank {rank}", ha="center", color=QUIET, fontsize=9)
                _arrow(ax, (rank + left, at), (rank + right, at))
            ends = f"to rank 0;\n{P - 1} hops"
            ax.text(P + (0.1 if keys_move else 0.4), at, ends, va="center", color=INK, fontsize=8.5)
            for rank in range(1, P) if not keys_move else ():
                low = 0.1 - 0.34 * (rank - 1)
                for place in (0.38, rank + 0.38):  # on rank 0, and where the partial is computed
                    _draw_partial(ax, (place, low), (0.34, 0.26), 0, rank)
                _arrow(ax, (rank + 0.36, low + 0.13), (0.76, low + 0.13))
            ax.set(xlim=(0, P + 1.1), ylim=(0.4 - 0.34 * (P - 1), 2.7), title=title)
            ax.set_axis_off()
        words = "this partial is of queries 0\nover keys and values 1"
        axes[1].text(1.8, 0.23, words, va="center", color=INK, fontsize=8.5)
        words = "the other ranks\nget theirs\nthe same way"
        axes[1].text(P + 0.02, -0.45, words, va="center", color=INK, fontsize=8.5)
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
            sent = [value / 1e6 for value in values]
            ax.plot(prefixes, sent, color=colour, marker=mark)
            label = f"{name}:\n{sent[-1]:,.{1 if sent[-1] > 10 else 2}f} MB"
            ax.annotate(label, (prefixes[-1], sent[-1]), (8, 0), textcoords="offset points", va="center")
        ax.axvline(meet, color=INK, linewidth=1, linestyle=":")
        ax.annotate(
            f"{meet:,} tokens",
            (meet, 0.9),
            (6, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )
        high, low = (values[-1] / 1e6 for values in lines.values())
        ax.annotate("", (prefixes[-1], low), (prefixes[-1], high), arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 6, "shrinkB": 6})  # fmt: skip
        ax.annotate(f"{high / low:.0f} ×", (prefixes[-1], (high * low) ** 0.5), (-6, 0), textcoords="offset points", ha="right", va="center")  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="cached tokens before the chunk", ylabel="MB that a rank sends, per layer",
               xlim=(prefixes[0] / 1.3, prefixes[-1] * 12), title="After a long prefix, queries and partials are far fewer bytes")  # fmt: skip
        ax.set_xticks([10**n for n in range(2, 8) if prefixes[0] <= 10**n <= prefixes[-1]])
        ax.minorticks_off()
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:,g}")
    return drawn


def describe_bytes(prefixes: Sequence[int], lines: Mapping[str, Sequence[float]], meet: int) -> str:
    """Return the two lines of `bytes_by_prefix` in words."""
    ends = "; ".join(
        f"{name}: {values[0] / 1e6:,.1f} to {values[-1] / 1e6:,.1f} MB" for name, values in lines.items()
    )
    return f"Bytes of a rank with {prefixes[0]:,} to {prefixes[-1]:,} cached tokens. {ends}. They meet at {meet:,} tokens."


def hand_over(P: int) -> Figure:
    """Return a picture of all partials (heads × tokens): who has them after attending, and after the hand-over."""
    with styled():
        drawn = new_figure((8.0, 4.6))
        sides = ("After step 2 each rank has a column", "After step 3 each rank has a row")
        for ax, title, by_tokens in zip(drawn.subplots(1, 2), sides, (True, False), strict=True):
            for asks in range(P):
                for has in range(P):
                    _draw_partial(ax, (has + 0.12, asks + 0.14), (0.76, 0.72), asks, has)
            for rank in range(P):
                corner, size = ((rank, 0), (1, P)) if by_tokens else ((0, rank), (P, 1))
                inset = corner[0] + 0.04, corner[1] + 0.04
                look = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.6}
                panel.add_rectangle(ax, inset, size[0] - 0.08, size[1] - 0.08, **look)
                at = (rank + 0.5, -0.2) if by_tokens else (P + 0.08, rank + 0.5)
                ha = "center" if by_tokens else "left"
                ax.text(*at, f"rank {rank}", ha=ha, va="center", color=INK, fontsize=9.5)
            ax.set(title=title, xlim=(0, P + 0.6), ylim=(P, -0.45), xticks=[], yticks=[], aspect="equal")
            ax.set(xlabel="tokens", ylabel="heads")
            panel.bare(ax)
        _explain_boxes(drawn)
    return drawn


def describe_hand_over(P: int) -> str:
    """Return the picture of `hand_over` in words."""
    return (
        f"The partials of {P} ranks, as a square of heads by tokens. After attending, rank r has column r: all heads over its own "
        "tokens. After the hand-over it has row r: its own heads over the tokens of all ranks."
    )


def copies(ways: Mapping[str, ServeRequest]) -> Figure:
    """Return a picture of all copies of the weights and of a user's cache, each cut into the parts of the ranks.

    ways: requests with `sharing="copies"`, in which ranks with different tokens have copies of the same weights.
    """
    from matplotlib.legend_handler import HandlerTuple

    with styled():
        drawn = new_figure((8.0, 0.4 + 2.2 * len(ways)))
        for ax, (name, request) in zip(
            drawn.subplots(len(ways), 1, squeeze=False)[:, 0], ways.items(), strict=True
        ):
            for left, what, colour, parts in (
                (0.0, "the weights", GREEN, _weight_copies(request)),
                (2.4, "a user's cache", ORANGE, _cache_copies(request)),
            ):
                for number, ranks in enumerate(parts):
                    _draw_copy(ax, left + 1.1 * number, ranks, colour, request.machine.ranks_per_node)
                    below = "tokens" if colour == ORANGE else f"{sum(map(len, ranks))} parts"
                    middle = left + 1.1 * number + 0.5
                    ax.text(middle, 1.06, below, ha="center", va="top", color=QUIET, fontsize=9)
                words = f"{what}, twice" if len(parts) > 1 else what
                ax.text(left, -0.06, words, va="bottom", color=INK, fontsize=9.5)
            ax.text(2.36, 0.5, "K/V heads", rotation=90, ha="right", va="center", color=QUIET, fontsize=9)
            ax.text(4.7, 0.5, _reads(request), va="center", color=INK, fontsize=9.5)
            ax.set(
                title=f"{name}: {_twice(request)}", xlim=(0, 6.3), ylim=(1.25, -0.25), xticks=[], yticks=[]
            )
            panel.bare(ax)
        keys: list[Any] = [
            tuple(panel.patch(facecolor=(colour, alpha)) for colour in (GREEN, ORANGE))
            for alpha in NODE_ALPHAS
        ]
        pairs = {tuple: HandlerTuple(ndivide=None)}
        drawn.legend(keys, ["on node 0", "on node 1"], loc="outside lower center", ncols=2, handler_map=pairs)
    return drawn


NODE_ALPHAS = 1.0, 0.4
"""How opaque parts are on the first node and on the second."""


def _draw_copy(ax: Any, left: float, ranks: Sequence[Sequence[int]], colour: str, per_node: int) -> None:
    """Draw a copy as a square of parts, each with the number of its rank. Parts are paler on the second node."""
    high = 1 / len(ranks)
    for row, columns in enumerate(ranks):
        wide = 1 / len(columns)
        for column, rank in enumerate(columns):
            corner = left + column * wide, row * high
            look = {
                "facecolor": (colour, NODE_ALPHAS[rank // per_node % 2]),
                "edgecolor": PAPER,
                "linewidth": 1.5,
            }
            panel.add_rectangle(ax, corner, wide, high, **look)
            middle = corner[0] + wide / 2, corner[1] + high / 2
            ax.text(*middle, str(rank), ha="center", va="center", color=INK, fontsize=8)


def describe_copies(ways: Mapping[str, ServeRequest]) -> str:
    """Return the picture of `copies` in words."""
    parts = [
        f"{name}: {_twice(request)}, {' '.join(_reads(request).split())}" for name, request in ways.items()
    ]
    return f"The weights and a user's cache, each cut into the parts of {next(iter(ways.values())).gpus} ranks. {'. '.join(parts)}."


def _weight_copies(request: ServeRequest) -> list[list[list[int]]]:
    """Return the ranks of each part of the weights, for each copy, in rows."""
    ranks, cut = list(range(request.gpus)), request.head_ranks
    rows = request.sized.main.dealt_heads
    return [_in_rows(ranks[n : n + cut], rows) for n in range(0, len(ranks), cut)]


def _cache_copies(request: ServeRequest) -> list[list[list[int]]]:
    """Return the ranks of each part of a cache, for each copy, in rows of K/V heads and columns of tokens."""
    rows = min(request.head_ranks, request.sized.main.dealt_heads)
    same = request.head_ranks // rows
    return [
        [
            [token * request.head_ranks + head * same + copy for token in range(request.token_ranks)]
            for head in range(rows)
        ]
        for copy in range(same)
    ]


def _in_rows(ranks: Sequence[int], rows: int) -> list[list[int]]:
    wide = len(ranks) // rows
    return [list(ranks[n : n + wide]) for n in range(0, len(ranks), wide)]


def _twice(request: ServeRequest) -> str:
    doubled = [
        what
        for what, parts in (("the weights", _weight_copies(request)), ("every cache", _cache_copies(request)))
        if len(parts) > 1
    ]
    return f"two copies of {' and '.join(doubled)}" if doubled else "one copy of everything"


def _reads(request: ServeRequest) -> str:
    weights, cache = request.weight_bytes / 1e9, request.cache_bytes(request.context, 1) / 1e9
    return f"Each rank reads\n{weights:.1f} GB of weights and\n{cache:.1f} GB of each cache"

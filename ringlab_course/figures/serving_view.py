"""Pictures of serving: who waits for a chunk, the time of a decode step, pages, masks, bytes, each rank's cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.cost.planner.memory_table import most_sequences
from ringlab.viz.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RULE,
    WIDE,
    YELLOW,
    new_figure,
    rank_colour,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringlab.cost.planner.serve_request import ServeRequest
    from ringlab.cost.planner.serve_time import ServeTime
    from ringlab.serving import PagedCache


def turns(
    runs: Mapping[str, Sequence[tuple[float, float]]], step_s: float, both_s: float, window_s: float = 10.0
) -> Figure:
    """Return when Ada's chunks are computed and when Ben gets tokens, in the last `window_s` seconds of her prompt.

    runs: by title, the seconds of each chunk, in two parts: what every chunk takes, and what the cached tokens
    add. A decode step for Ben, of `step_s`, follows each chunk. After the prompt both decode in steps of
    `both_s`.
    """
    after_s = 0.06 * window_s
    with styled():
        drawn = new_figure((8.0, 4.2))
        axes = drawn.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (title, chunks) in zip(axes, runs.items(), strict=True):
            end, tokens = 0.0, [n * both_s for n in range(1, int(after_s / both_s))]
            ax.vlines(tokens, 1.0, 1.8, color=INK, linewidth=0.8)
            for same, more in reversed(chunks):
                start, share = end - same - more, same / (same + more)
                for low, height, colour in ((0, share, BLUE), (share, 1 - share, ORANGE)):
                    look = {"facecolor": colour, "edgecolor": PAPER, "linewidth": 0.5}
                    panel.add_rectangle(ax, (start, 1 + 0.8 * low), end - start, 0.8 * height, **look)
                tokens.append(start)  # Ben's step ends when the next chunk begins
                end = start - step_s
                if end < -window_s:
                    break
            ax.vlines(tokens, 0.0, 0.8, color=INK, linewidth=0.8)
            longest = max(sum(each) for each in chunks)
            if longest > 0.3 * window_s:
                ax.annotate("", (-longest, 0.4), (0, 0.4), arrowprops={"arrowstyle": "<->", "color": QUIET})
                label = f"Ben gets nothing for {1e3 * longest:,.0f} ms"
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
                ax.text(-longest / 2, 0.4, label, ha="center", va="center", fontsize=9.5, bbox=box)
                ax.text(-longest / 2, 1.45, "one chunk", ha="center", va="center", fontsize=9.5)
            ax.axvline(0, color=QUIET, linewidth=1, linestyle=":")
            ax.text(after_s, 1.9, "both decode", ha="right", va="bottom", color=QUIET, fontsize=8.5)
            ax.set(xlim=(-window_s, after_s), ylim=(-0.1, 1.9), yticks=[0.4, 1.4])
            ax.set_yticklabels(["Ben", "Ada"], color=INK)
            ax.set_title(f"{title}: Ben waits up to {1e3 * longest:,.0f} ms")
            panel.bare(ax)
        axes[-1].set_xlabel("seconds, counted from Ada's first token (dotted)")
        keys = [panel.patch(facecolor=BLUE), panel.patch(facecolor=ORANGE), panel.patch(facecolor=INK)]
        names = [
            "chunk of Ada's prompt: as long as her first chunk took",
            "what her cached tokens add to it",
            "a token arrives",
        ]
        drawn.legend(keys, names, loc="outside lower center", ncols=3, fontsize=8.5)
    return drawn


def describe_turns(
    runs: Mapping[str, Sequence[tuple[float, float]]], step_s: float, both_s: float, window_s: float = 10.0
) -> str:
    """Return the picture of `turns` in words."""
    words = [
        f"{title}: Ben gets a token between two chunks and waits up to {1e3 * max(sum(each) for each in chunks):,.0f} ms; "
        f"of her last chunk {chunks[-1][1] / sum(chunks[-1]):.0%} is due to cached tokens"
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
            for value, colour in zip(_parts_ms(served), (BLUE, ORANGE, GREY), strict=True):
                look = {} if fits else {"alpha": 0.45, "hatch": "//"}
                panel.add_rectangle(
                    ax, (left, y - 0.38), value, 0.76, facecolor=colour, edgecolor=PAPER, **look
                )
                if value > 0.03 * longest:
                    ink = PAPER if colour == BLUE and fits else INK
                    size = 9 if value > 0.06 * longest else 7.5
                    middle = left + value / 2, y
                    ax.text(*middle, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=size)
                left += value
            ax.text(left + 0.01 * longest, y, _speed(served, fits), va="center", color=INK, fontsize=9)
        ax.set(xlim=(0, 1.36 * longest), ylim=(max(where.values()) + 0.6, -0.6), title=title)
        ax.set_xlabel("milliseconds of a decode step, in which every user gets one token")
        ax.set_yticks([*where.values()], [f"{_counted(users)}  {name}".strip() for users, name in steps])
        panel.bare(ax, axis="y", labelcolor=INK)
        keys = [panel.patch(facecolor=colour) for colour in (BLUE, ORANGE, GREY)]
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


def held_pages(
    cache: PagedCache, sequences: Mapping[str, int], pages: int
) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return for each page of the pool its first token, and each owner with the tokens that it has there."""
    span = cache.page * cache.ring.world_size
    held: list[tuple[int, list[tuple[str, int]]]] = [(0, []) for _ in range(pages)]
    for name, number in sequences.items():
        for at, page in enumerate(cache.tables.pages[number]):
            owner = name, min(span, cache.length(number) - at * span)
            held[page] = at * span, [*held[page][1], owner]
    return held


def pages(
    held: Sequence[tuple[int, Sequence[tuple[str, int]]]], page: int, sequences: Sequence[str], ranks: int
) -> Figure:
    """Return the pool of pages. held[p] = (first token, ((sequence, tokens), …)), with an entry for each owner.

    A page is a column with a band for each of `ranks`, and has room for page / ranks tokens in each band.
    """
    with styled():
        drawn = new_figure((8.0, 2.9))
        ax = drawn.subplots()
        room = page // ranks
        for number, (first, owners) in enumerate(held):
            colours = [rank_colour(sequences.index(name)) for name, _ in owners]
            tokens, shared = max((tokens for _, tokens in owners), default=0), len(owners) > 1
            for rank in range(ranks):
                low, height = 1 - (rank + 1) / ranks, 0.9 / ranks
                panel.add_rectangle(ax, (number, low), 0.92, height, facecolor="#F2F4F7", edgecolor=RULE)
                if (filled := min(room, tokens - rank * room)) > 0:
                    look = {"facecolor": colours[0], "edgecolor": colours[1] if shared else PAPER}
                    width, hatch = 0.92 * filled / room, "///" if shared else ""
                    panel.add_rectangle(ax, (number, low), width, height, hatch=hatch, **look)
                    start = first + rank * room
                    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
                    middle = number + width / 2, low + height / 2
                    ax.text(
                        *middle,
                        f"{start}–{start + filled - 1}",
                        ha="center",
                        va="center",
                        fontsize=8.5,
                        bbox=box,
                    )
                if number == 0:
                    at, name = (-0.06, low + height / 2), f"rank {rank}"
                    ax.text(*at, name, ha="right", va="center", color=QUIET, fontsize=9)
            free = "" if owners else ", free"
            ax.text(
                number + 0.46, -0.06, f"page {number}{free}", ha="center", va="top", color=QUIET, fontsize=9
            )
        boxes = [panel.rectangle((0, 0), 1, 1, facecolor=rank_colour(n)) for n in range(len(sequences))]
        shared_box = panel.rectangle(
            (0, 0), 1, 1, facecolor=rank_colour(0), edgecolor=rank_colour(1), hatch="///"
        )
        drawn.legend([*boxes, shared_box], [*sequences, "both"], loc="outside lower center", ncols=3)
        ax.set(xlim=(-0.5, len(held)), ylim=(-0.2, 1.02), title="Which tokens lie on which page and rank")
        ax.set_axis_off()
    return drawn


def describe_pages(held: Sequence[tuple[int, Sequence[tuple[str, int]]]]) -> str:
    """Return the picture of `pages` in words."""
    words = [
        f"page {number}: "
        + (
            " and ".join(f"{tokens} tokens of {name} from token {first} on" for name, tokens in owners)
            or "free"
        )
        for number, (first, owners) in enumerate(held)
    ]
    return f"{len(held)} pages. {'; '.join(words)}."


def chunk_masks(chunks: int) -> Figure:
    """Return the keys that a prompt's queries see, chunk by chunk; and with is_causal=True for the last chunk."""
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
        drawn = new_figure((8.0, 3.1))
        axes = drawn.subplots(1, 2)
        for ax, title in zip(axes, ("keys and values travel", "queries travel"), strict=True):
            keys_move = title.startswith("keys")
            at, left, right = (1.4, 0.3, 1.06) if keys_move else (0.75, 0.74, 1.36)
            for rank in range(P):
                colour = rank_colour(rank)
                panel.add_rectangle(ax, (rank + 0.08, 1.0), 0.2, 0.8, facecolor=colour, edgecolor=RULE)
                panel.add_rectangle(ax, (rank + 0.38, 0.6), 0.34, 0.3, facecolor=colour, edgecolor=RULE)
                ax.text(rank + 0.4, 0.3, f"rank {rank}", ha="center", color=QUIET, fontsize=9)
                _arrow(ax, (rank + left, at), (rank + right, at), colour)
            ends = f"to rank 0;\n{P - 1} hops"
            ax.text(P + (0.1 if keys_move else 0.4), at, ends, va="center", color=QUIET, fontsize=8)
            ax.text(0.18, 1.86, "K, V", ha="center", fontsize=9)
            ax.text(0.3, 0.75, "q", ha="right", va="center", fontsize=9)
            for rank in range(1, P) if not keys_move else ():
                low = 2.15 + 0.34 * (rank - 1)
                for place in (0.38, rank + 0.38):  # on rank 0, and where the partial is computed
                    _draw_partial(ax, (place, low), rank)
                _arrow(ax, (rank + 0.36, low + 0.13), (0.76, low + 0.13), rank_colour(0))
            ax.set(xlim=(0, P + 1.1), ylim=(0.15, 2.2 + 0.34 * (P - 1)), title=title)
            ax.set_axis_off()
        axes[1].text(
            P + 0.05,
            2.3,
            "partials of rank 0's\nqueries; the other\nranks get theirs\nthe same way",
            color=QUIET,
            fontsize=8,
        )
    return drawn


def _draw_partial(ax: Any, corner: tuple[float, float], rank: int) -> None:
    """Draw the partial of rank 0's queries over the keys of `rank`, half in each rank's colour."""
    for part, whose in enumerate((0, rank)):
        place = (corner[0] + 0.17 * part, corner[1]), 0.17, 0.26
        panel.add_rectangle(ax, *place, facecolor=rank_colour(whose), edgecolor=RULE)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})


def describe_travellers(P: int) -> str:
    """Return the two pictures of `travellers` in words."""
    return (
        f"{P} ranks, each with a tall block of keys and values and a small one of queries. Left: tall blocks go from rank to "
        "rank. Right: small blocks do, and the partials of rank 0's queries come home to rank 0 from every other rank."
    )


def bytes_by_prefix(prefixes: Sequence[int], lines: Mapping[str, Sequence[float]], meet: int) -> Figure:
    """Return the bytes that a rank sends, against cached tokens; the lines cross at `meet` tokens."""
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
    """Return the partials (heads × tokens) of each of P ranks after attending, and after the hand-over."""
    with styled():
        drawn = new_figure((8.0, 4.0))
        axes = drawn.subplots(2, P, squeeze=False)
        for rows, what in ((0, "after step 2"), (1, "after step 3")):
            for rank in range(P):
                ax = axes[rows][rank]
                for head in range(P):
                    for token in range(P):
                        has = (token if rows == 0 else head) == rank
                        colour = rank_colour(token) if has else "#F2F4F7"
                        panel.add_rectangle(ax, (token, head), 0.94, 0.94, facecolor=colour, edgecolor=RULE)
                ax.set(
                    xlim=(-0.1, P),
                    ylim=(P, -0.1),
                    xticks=[],
                    yticks=[],
                    title=f"rank {rank}" if rows == 0 else "",
                )
                ax.set_aspect("equal")
                ax.grid(False)
            axes[rows][0].set_ylabel(f"{what}\nheads of rank 0 … {P - 1}", fontsize=9.5)
        drawn.supxlabel(
            f"in each square: tokens of rank 0 … {P - 1}; a filled box is a partial that the rank has",
            fontsize=9.5,
        )
    return drawn


def describe_hand_over(P: int) -> str:
    """Return the picture of `hand_over` in words."""
    return (
        f"Squares of heads by tokens for {P} ranks. After attending, rank r has column r: all heads over its own tokens. "
        "After the hand-over it has row r: its own heads over the tokens of all ranks."
    )


def shares(ways: Mapping[str, ServeRequest]) -> Figure:
    """Return the part of one user's cache that each rank has, and the bytes on a rank, for each way to divide them."""
    with styled():
        drawn = new_figure((8.0, 3.9))
        axes = drawn.subplots(1, len(ways), sharey=True, squeeze=False)[0]
        for ax, (name, request) in zip(axes, ways.items(), strict=True):
            for (head, token), ranks in _holders(request).items():
                alone = len(ranks) == 1
                heads, tokens = 1 / _cut_heads(request), 1 / request.token_ranks
                look = {
                    "facecolor": (ORANGE, YELLOW)[token % 2] if alone else "#F7DDA8",
                    "hatch": "" if alone else "//",
                }
                corner = token * tokens, head * heads
                panel.add_rectangle(ax, corner, tokens, heads, edgecolor=PAPER, linewidth=2, **look)
                box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
                middle, names = (corner[0] + tokens / 2, corner[1] + heads / 2), " and ".join(map(str, ranks))
                ax.text(*middle, names, ha="center", va="center", color=INK, fontsize=9, bbox=box)
            words = f"tokens of the cache\n{_held(request)}"
            ax.set(title=name, xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], xlabel=words)
        axes[0].set_ylabel("K/V heads")
        keys = [panel.patch(facecolor="#F7DDA8", edgecolor=PAPER, hatch="//")]
        drawn.legend(keys, ["two ranks have the same part"], loc="outside lower center")
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

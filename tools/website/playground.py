"""The controls, machines and models of the playground, on its own page and in brief on the first page.

Machines and models are those of ringlab's tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.models import model

TEXT = Path(__file__).parent / "text" / "play.md"
NAME = "play"
FIVE, FIVE_NAME = TEXT.with_name("five_minutes.md"), "five-minutes"
"""The text and the name of the page of five figures."""
FIGURES = ("who", "ring", "merge", "hop", "zigzag")
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKENS = (12, 24)
"""The smallest and the largest number of tokens, as powers of 2."""
HEADS = (8, 16, 32, 64, 128)
"""The choices for the number of query heads."""
KV_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
HEAD_DIM = 128
LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEDULES = ("ring", "allgather")
MACHINES = ("h100", "a100", "h200", "b200", "h800", "laptops")
SPEEDS = (-6, 2)
"""The slowest and the fastest link relative to the machine's own link, as powers of 2."""
DTYPE = "bfloat16"
VIEWS = ("ring_model", "play_views")
"""The programs that all figures need."""
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "qwen3-32b", "gpt3-175b")


def machine(known: Hardware) -> dict[str, Any]:
    """Return a machine in the form of ring_model.js: FLOP/s reached in forward, links, bytes of memory."""
    links = {
        name: {"name": link.name, "bandwidth": link.bytes_per_s, "latency": link.latency_s}
        for name, link in (("inside", known.inside), ("between", known.between))
    }
    return {
        "name": known.name,
        "title": known.title,
        "perNode": known.ranks_per_node,
        "memory": known.memory_bytes,
        "memoryBandwidth": known.memory_bytes_per_s,
        "peak": known.peak(DTYPE),
        "reached": known.reached.attention_forward,
        "flops": known.peak(DTYPE) * known.reached.attention_forward,
        **links,
    }


def choices() -> dict[str, Any]:
    """Return all choices of the controls as data for JSON."""
    models = {name: model(name) for name in MODELS}
    return {
        "ranks": RANKS,
        "tokens": TOKENS,
        "heads": HEADS,
        "kvHeads": KV_HEADS,
        "headDim": HEAD_DIM,
        "speeds": SPEEDS,
        "machines": [machine(hardware(name)) for name in MACHINES],
        "models": [
            {"name": name, "title": it.title, "heads": it.H, "kvHeads": it.K}
            for name, it in models.items()
            if it.D == HEAD_DIM
        ],
    }


def page() -> str:
    """Return the playground's page."""
    without = "<p>The playground needs JavaScript. <code>ringlab simulate --details</code> prints the same numbers.</p>"
    return TEXT.read_text(encoding="utf-8").replace(
        "{playground}", embedded(f"<noscript>{without}</noscript>")
    )


def embedded(fallback: str, brief: bool = False) -> str:
    """Return the HTML of the playground, for a page in the top folder of the site.

    fallback: HTML that is shown until the playground's program runs.
    brief: whether to show only the controls and views of the first page.
    """
    box = f'<div id="playground" class="playground"{" data-brief" if brief else ""}>\n{fallback}\n</div>\n'
    return box + _programs("play")


def five_minutes() -> str:
    """Return the page "Ring attention in five minutes"."""
    without = "<noscript><p>The pictures need JavaScript.</p></noscript>\n"
    text = FIVE.read_text(encoding="utf-8").replace("{programs}", without + _programs("five"))
    for name in FIGURES:  # drawn at once, so that the text below does not move when the page has loaded
        figure = f'<div class="playground" data-five="{name}"></div>\n<script>fiveMinutes("{name}");</script>'
        text = text.replace(f"{{{name}}}", figure)
    return text


def _programs(page: str) -> str:
    """Return the HTML with which a page loads its program, the views, and their data."""
    data = json.dumps(choices()).replace("</", "<\\/")
    programs = "".join(f'<script src="_static/{name}.js"></script>\n' for name in (*VIEWS, page))
    style = '<link rel="stylesheet" href="_static/play.css">\n'
    return f'{style}<script type="application/json" id="playground-choices">{data}</script>\n{programs}'

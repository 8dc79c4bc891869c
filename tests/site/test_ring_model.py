"""For random settings, the playground's numbers in Chromium equal the simulator's numbers in Python."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringlab.cost.hardware import hardware, hardware_names
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.layout import get_layout
from tools.browser import Window
from tools.website import playground

pytestmark = pytest.mark.thorough

SETTINGS = 200
RELATIVE = 1e-12
"""The allowed relative error: both sides sum at most some hundreds of doubles, each rounded by 1.1e-16."""
MODEL = Path(playground.__file__).parent / "static" / "ring_model.js"


def drawn(seed: int) -> dict[str, Any]:
    """Return a setting as the playground's controls would make it."""
    draw = random.Random(seed)
    few = [P for P in playground.RANKS if P <= 8]  # at most 8 ranks, because the simulator's time grows as P²
    P = draw.choice(few if draw.random() < 0.85 else playground.RANKS)
    heads = draw.choice(playground.HEADS)
    machine = playground.machine(hardware(draw.choice(playground.MACHINES)))
    speed = 2.0 ** draw.randint(*playground.SPEEDS)
    for link in ("inside", "between"):
        machine[link] = {**machine[link], "bandwidth": machine[link]["bandwidth"] * speed}
    return {
        "layout": draw.choice(playground.LAYOUTS),
        "causal": draw.random() < 0.8,
        "schedule": draw.choice(playground.SCHEDULES),
        "P": P,
        "S": 2 ** draw.randint(*playground.TOKENS) + draw.choice([0, 0, 0, 1, 77]),
        "H": heads,
        "K": draw.choice([K for K in playground.KV_HEADS if K <= heads]),
        "D": playground.HEAD_DIM,
        "machine": machine,
        "speed": speed,
    }


def right(setting: dict[str, Any]) -> dict[str, Any]:
    """Return the simulator's results for a setting of the playground."""
    known = hardware(setting["machine"]["name"])
    faster = {
        link: replace(getattr(known, link), bytes_per_s=setting["machine"][link]["bandwidth"])
        for link in ("inside", "between")
    }
    sizes = Attention(H=setting["H"], K=setting["K"], D=setting["D"], causal=setting["causal"])
    layout = get_layout(setting["layout"], setting["S"], setting["P"])
    found = simulate(sizes, layout, replace(known, **faster), schedule=setting["schedule"])
    return {
        "makespan": found.makespan_s,
        "exposed": found.exposed_s,
        "busyFraction": found.busy_fraction,
        "busy": found.busy_s.tolist(),
        "waited": found.waited_s.tolist(),
        "bytesSent": int(found.recording.program.sent_bytes.sum()),
        "peaks": found.peak_bytes.tolist(),
    }


@pytest.fixture(scope="module")
def page(browser: Window) -> Window:
    """Open an empty page with the model's script."""
    browser.page.goto("about:blank")
    browser.page.add_script_tag(path=str(MODEL))
    return browser


def test_two_hundred_settings_give_the_numbers_of_the_simulator(page: Window) -> None:
    settings = [drawn(seed) for seed in range(SETTINGS)]
    found = page.page.evaluate("settings => settings.map(ringModel.simulate)", settings)
    for setting, got in zip(settings, found, strict=True):
        expected = right(setting)
        scale = expected["makespan"]
        for name, value in expected.items():
            differences = name in ("exposed", "waited")  # these are small differences of large times
            near = pytest.approx(value, rel=RELATIVE, abs=RELATIVE * scale if differences else None)
            assert got[name] == near, (name, setting)


def test_all_machines_of_the_playground_are_known_and_have_no_measured_times() -> None:
    """The playground's machines have no measured times, because the model could not take them into account."""
    assert set(playground.MACHINES) <= set(hardware_names())
    assert not any(hardware(name).block_times for name in playground.MACHINES)

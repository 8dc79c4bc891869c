"""The known machines' links as pictures name them, from the cost room's table."""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.hardware import Hardware, Link, hardware

MACHINES = ("a100", "h100", "b200", "tpu-v4", "tpu-v5e", "laptop")


@dataclass(frozen=True)
class KnownLink:
    """A link of a known machine: `name` as in "A100, NVLink 3", and the dense peak of its ranks in FLOP/s."""

    name: str
    F: float
    link: Link


def known_links(dtype: str = "bfloat16") -> list[KnownLink]:
    """Return the links inside and between nodes of the machines that compute in `dtype`."""
    machines = [hardware(name) for name in MACHINES]
    return [
        KnownLink(f"{short(machine)}, {link.name}", machine.peak(dtype), link)
        for machine in machines
        if dtype in machine.flops_per_s
        for link in (machine.inside, machine.between)
    ]


def short(machine: Hardware) -> str:
    """Return a machine's title without its maker and its form."""
    name = machine.title.split(",")[0].removeprefix("NVIDIA ").removeprefix("Google ")
    return name.split(" of ")[0].removesuffix(" (HGX)").removesuffix(" SXM")

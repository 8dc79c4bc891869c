"""One implementation of ring attention, checked against a float64 oracle.

The public names are loaded at first use, so that `import ringlab` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ring_attention": "ringlab.attention",
    "sdpa_over": "ringlab.sdpa",
    "latent_attention": "ringlab.latent",
    "contiguous": "ringlab.layout",
    "striped": "ringlab.layout",
    "zigzag": "ringlab.layout",
    "dealt": "ringlab.layout",
    "per_document": "ringlab.layout",
    "Layout": "ringlab.layout",
    "Run": "ringlab.layout",
    "Mask": "ringlab.mask",
    "Partial": "ringlab.merge",
    "VirtualCluster": "ringlab.comm.virtual.cluster",
    "Ring": "ringlab.comm.ring",
    "ShardedCache": "ringlab.schedules.cache",
    "decode": "ringlab.schedules.decode",
    "linear_attention": "ringlab.scan.attention",
    "launch": "ringlab.comm.processes.launch",
    "connect": "ringlab.comm.processes.connect",
}
_MODULES = ("oracle", "errors")
__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from ringlab import errors as errors
    from ringlab import oracle as oracle
    from ringlab.attention import ring_attention as ring_attention
    from ringlab.comm.processes.connect import connect as connect
    from ringlab.comm.processes.launch import launch as launch
    from ringlab.comm.ring import Ring as Ring
    from ringlab.comm.virtual.cluster import VirtualCluster as VirtualCluster
    from ringlab.latent import latent_attention as latent_attention
    from ringlab.layout import Layout as Layout
    from ringlab.layout import Run as Run
    from ringlab.layout import contiguous as contiguous
    from ringlab.layout import dealt as dealt
    from ringlab.layout import per_document as per_document
    from ringlab.layout import striped as striped
    from ringlab.layout import zigzag as zigzag
    from ringlab.mask import Mask as Mask
    from ringlab.merge import Partial as Partial
    from ringlab.scan.attention import linear_attention as linear_attention
    from ringlab.schedules.cache import ShardedCache as ShardedCache
    from ringlab.schedules.decode import decode as decode
    from ringlab.sdpa import sdpa_over as sdpa_over


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"ringlab.{name}")
    else:
        raise AttributeError(f"module 'ringlab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

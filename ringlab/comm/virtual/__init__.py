"""Virtual ranks: threads of one process that run one at a time, so that every run gives the same result."""

from __future__ import annotations

from ringlab.comm.virtual.cluster import Costs, VirtualCluster

__all__ = ["Costs", "VirtualCluster"]

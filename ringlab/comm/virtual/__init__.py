"""Virtual ranks: threads of one process that run one at a time, so that all runs are equal."""

from __future__ import annotations

from ringlab.comm.virtual.cluster import Costs, VirtualCluster

__all__ = ["Costs", "VirtualCluster"]

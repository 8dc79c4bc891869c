"""Ranks whose messages are recorded and then timed on a network: cluster, recording and timeline."""

from __future__ import annotations

from ringlab.comm.clocked.cluster import ClockedCluster

__all__ = ["ClockedCluster"]

"""Ranks whose messages are recorded and then timed on a network: a cluster, its recording, its timeline."""

from __future__ import annotations

from ringlab.comm.clocked.cluster import ClockedCluster

__all__ = ["ClockedCluster"]

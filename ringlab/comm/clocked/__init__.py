"""Ranks whose messages are recorded, and whose times on a network are computed from the recording."""

from __future__ import annotations

from ringlab.comm.clocked.cluster import ClockedCluster

__all__ = ["ClockedCluster"]

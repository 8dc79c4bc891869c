"""Ranks whose messages are recorded and then timed on a network: a cluster, its recording, its timeline."""

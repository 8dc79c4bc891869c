"""Paired timings: the ratio of the times of two ways to do the same work, measured in turn in one run."""

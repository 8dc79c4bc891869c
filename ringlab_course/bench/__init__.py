"""Benchmarks of the judge and of the time for which learners wait."""

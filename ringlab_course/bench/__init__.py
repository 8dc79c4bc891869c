"""Benchmarks of the judge."""

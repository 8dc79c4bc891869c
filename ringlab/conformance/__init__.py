"""Checks for anybody's ring attention, and the bounds they hold results to."""

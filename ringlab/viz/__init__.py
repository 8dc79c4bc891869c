"""Figures of runs and profiles, each with a text for readers who cannot see the figure."""

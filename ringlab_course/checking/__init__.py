"""Contracts of exercises, and everything that several of them need to check an answer."""

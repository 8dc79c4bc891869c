"""Exercise 17's machinery: a program of one device, written in JAX, on a mesh of simulated devices.

blocks   attention of one block, its backward, and the merge: given, as lesson 17 wrote them
jaxpr    what a program sends, by type, as JAX writes it down before it is compiled
compiled what a compiled program sends, read off its text
examine  such a program compiled and run: what it answers, sends and holds

Importing this package imports no JAX.
"""

from __future__ import annotations

AXIS = "ring"
"""The name of the mesh's axis."""
HOST = {"pure_callback", "io_callback"}
"""JAX's operations in which Python is called: what by them devices exchange, nobody counts."""
DEVICES = 8
"""Simulated devices; a program on P of them uses the first P."""

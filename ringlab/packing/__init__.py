"""Packed and variable-length batches: from a collator's batch to every rank's part, and back.

packing.py   Packing: where documents lie, all that travels with their tokens, and the way back
reading.py   the forms in which data loaders describe documents
picking.py   picking tokens of arrays and tensors alike

assigning.py   dynamic context parallelism: each sequence on as many ranks as its length deserves
assignment.py  Assignment: which ranks hold which sequence, in which micro-batch
groups.py      GroupedContext: attention in which each sequence goes around its own group of ranks
comparison.py  by how much dynamic beats static, for given lengths; a command, python -m ringlab.packing
"""

from __future__ import annotations

from ringlab.packing.assigning import assign, least_seconds, static
from ringlab.packing.assignment import Assignment, Placement
from ringlab.packing.comparison import Comparison, compare
from ringlab.packing.groups import GroupedContext
from ringlab.packing.packing import Packing

__all__ = [
    "Assignment",
    "Comparison",
    "GroupedContext",
    "Packing",
    "Placement",
    "assign",
    "compare",
    "least_seconds",
    "static",
]

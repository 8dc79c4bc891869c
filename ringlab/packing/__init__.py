"""Packed and variable-length batches: from a collator's batch to every rank's part, and back.

packing.py   Packing: the places of documents in a sequence, the ranks' parts of it, and the way back
reading.py   the forms in which data loaders describe documents
picking.py   picking tokens of arrays or tensors

assigning.py   dynamic context parallelism: the number of ranks of each sequence depends on its length
assignment.py  Assignment: which ranks hold which sequence, in which micro-batch
groups.py      GroupedContext: attention in which each sequence goes around its own group of ranks
comparison.py  the speedup of dynamic context parallelism over static; python -m ringlab.packing prints it
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

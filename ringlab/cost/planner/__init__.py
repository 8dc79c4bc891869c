"""Plans: does a context fit on a cluster, how is it divided, how long does a step take, and what limits it?

`print(plan(Request("llama3-70b", 1_000_000, "h100", nodes=8, logits_chunk=4096)).answer)` answers in a line.
"""

from ringlab.cost.planner.plan import Plan, plan
from ringlab.cost.planner.request import Request

__all__ = ["Plan", "Request", "plan"]

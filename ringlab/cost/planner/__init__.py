"""Plans: whether a context fits on a cluster, how the work is divided, how long a step takes, and its limit.

`print(plan(Request("llama3-70b", 1_000_000, "h100", nodes=8, logits_chunk=4096)).answer)` answers in a line.
"""

from ringlab.cost.planner.plan import Plan, plan
from ringlab.cost.planner.request import Request

__all__ = ["Plan", "Request", "plan"]

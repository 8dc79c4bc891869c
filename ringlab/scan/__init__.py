"""Linear attention over ranks by a scan of states. Read `plain` first.

plain       the recurrence, the chunk form, and a relay over ranks, on one page
oracle      the recurrence in float64 NumPy, with gradients by hand
chunk       one chunk of tokens as products of matrices, and the way back
local_scan  one rank's tokens, chunk by chunk
graph       what states pass through, and scans as data: who sends to whom
executor    sends and receives the states of a graph: one executor for all scans
program     one rank's part of a call, forward and backward
arguments   the checks of a call
attention   `linear_attention`, the front door
halo        the few tokens before a rank's own, for the short convolution in front of these layers
"""

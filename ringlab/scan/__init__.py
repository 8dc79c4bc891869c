"""Linear attention over ranks by a scan of states. Read the module `plain` first.

plain       the recurrence, the chunk form, and a relay over ranks, on one page
oracle      the recurrence in float64 NumPy, with gradients by hand
chunk       one chunk of tokens as products of matrices, and its gradients
local_scan  one rank's tokens, chunk by chunk
graph       the stretches that states pass through, and scans as data: which stretch sends to which
executor    sends and receives the states of a graph, with the same code for all scans
program     one rank's part of a call, forward and backward
arguments   the checks of a call
attention   `linear_attention`, the function that users call
halo        the few tokens before a rank's own tokens, for the short convolution before these layers
"""

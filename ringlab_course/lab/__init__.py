"""Labs that an instructor runs on several GPUs, or on gloo processes of one machine.

L1 measures bandwidth and overlap, L2 compares layouts and scaling, and L3 is a contest.
"""

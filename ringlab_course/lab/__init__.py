"""Labs that an instructor runs on several GPUs, or on gloo processes of one machine.

Their subjects are bandwidth, scaling, and a contest.
"""

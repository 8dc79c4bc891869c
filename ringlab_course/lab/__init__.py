"""Labs that an instructor runs on several GPUs, or on gloo processes of one machine: bandwidth, scaling, a contest."""

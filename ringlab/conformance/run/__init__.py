"""Makes runs of a target on virtual ranks in this process, on processes, or on torchrun's ranks."""

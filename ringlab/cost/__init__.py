"""What ring attention costs: hardware and models as data, FLOPs, bytes, memory, and a simulator."""

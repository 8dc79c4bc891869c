"""The cost of ring attention: hardware and models as data, FLOPs, bytes, memory, and a simulator."""

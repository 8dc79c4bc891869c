# expects: check=00.ring:sum misconception=own_twice
def ring_sum(ring, x):
    total = x
    for _ in range(ring.world_size):
        x = ring.shift(x)
        total = total + x
    return total

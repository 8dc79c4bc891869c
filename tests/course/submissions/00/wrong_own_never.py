# expects: check=00.ring:sum misconception=own_never
def ring_sum(ring, x):
    total = 0 * x
    for _ in range(ring.world_size - 1):
        x = ring.shift(x)
        total = total + x
    return total

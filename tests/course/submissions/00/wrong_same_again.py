# expects: check=00.ring:sum misconception=same_again
def ring_sum(ring, x):
    total = x
    for _ in range(ring.world_size - 1):
        total = total + ring.shift(x)
    return total

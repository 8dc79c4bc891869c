# expects: check=00.ring:sum misconception=forwards_the_total
def ring_sum(ring, x):
    total = x
    for _ in range(ring.world_size - 1):
        total = total + ring.shift(total)
    return total

# expects: check=00.ring:sum misconception=neighbour_only
def ring_sum(ring, x):
    return x + ring.shift(x)

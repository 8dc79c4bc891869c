# expects: check=00.ring:any-world misconception=-
def ring_sum(ring, x):
    total = x
    for _ in range(min(ring.world_size, 5) - 1):
        x = ring.shift(x)
        total = total + x
    return total

# expects: check=00.ring:shifts misconception=one_shift_too_many
def ring_sum(ring, x):
    total = 0 * x
    for _ in range(ring.world_size):
        total = total + x
        x = ring.shift(x)
    return total

# expects: check=13.seconds:rounds misconception=best_round

def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return counted.max(axis=1).min()

# expects: check=13.seconds:rounds misconception=mean_of_rounds

def seconds(times_s, warmup):
    counted = times_s[warmup:]
    return counted.max(axis=1).mean()

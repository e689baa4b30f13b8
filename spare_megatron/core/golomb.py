"""Offsets whose differences repeat as little as possible."""


def golomb_offsets(num_groups: int, redundancy: int) -> tuple[int, ...]:
    chosen = [0]
    used = {0}
    x = 1
    while len(chosen) < redundancy:
        d = [(x - c) % num_groups for c in chosen] + [(c - x) % num_groups for c in chosen]
        if len(set(d)) == len(d) and not set(d) & used:
            chosen.append(x); used |= set(d)
        x += 1
    return tuple(chosen)

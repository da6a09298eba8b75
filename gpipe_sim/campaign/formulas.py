"""How often to save, in closed form: failures at a constant rate strike a job that saves every so often.

A job computes for an interval t, saves for d, and so on. Failures come with a mean time m between them; each loses what
was computed since the last save and costs a restart r, during which the next failure may come.

    Young (CACM 17(9), 1974)                  best interval    sqrt(2 d m)
    Daly (FGCS 22(3), 2006, equation 37)      best interval    sqrt(2 d m) (1 + sqrt(d / 2m) / 3 + (d / 2m) / 9) - d
    exact for Poisson failures (Daly, eq. 20) time / work      m e^(r/m) (e^((t+d)/m) - 1) / t
                                              best interval    t with (1 - t/m) e^((t+d)/m) = 1

The exact one holds where all failures cost the same, training is as fast after them as before, and saves are blocking.
"""

import math


def young_interval_s(save_s: float, between_failures_s: float) -> float:
    """Young's best interval."""
    return math.sqrt(2 * save_s * between_failures_s)


def daly_interval_s(save_s: float, between_failures_s: float) -> float:
    """Daly's best interval; where saving takes longer than twice the time between failures, that time."""
    share = save_s / (2 * between_failures_s)
    if share >= 1:
        return between_failures_s
    return young_interval_s(save_s, between_failures_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def exact_stretch(interval_s: float, save_s: float, restart_s: float, between_failures_s: float) -> float:
    """Expected time over the work that is done in it; infinite where a float cannot hold it."""
    if math.isinf(between_failures_s):
        return (interval_s + save_s) / interval_s
    try:
        of_a_save = math.expm1((interval_s + save_s) / between_failures_s)
        return between_failures_s * math.exp(restart_s / between_failures_s) * of_a_save / interval_s
    except OverflowError:
        return math.inf


def exact_interval_s(save_s: float, between_failures_s: float) -> float:
    """The interval with the smallest `exact_stretch`, which does not depend on the restart; 0 where saving is free."""
    if math.isinf(between_failures_s):
        return math.inf
    low, high = 0.0, 1.0  # of the time between failures
    delay = save_s / between_failures_s
    for _ in range(200):
        middle = (low + high) / 2
        # The derivative's sign: computed with logarithms, since the exponential may overflow.
        if math.log1p(-middle) + middle + delay > 0:
            low = middle
        else:
            high = middle
        if high - low <= 1e-15 * high:
            break
    return between_failures_s * (low + high) / 2

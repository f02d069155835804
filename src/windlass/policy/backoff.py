"""Delays before retries. Pure: the random number `jitter`, from 0 to 1, is an argument."""

RETRY_FIRST_S = 5.0
# Reached after eight failed attempts. Waiting longer does not help such a task.
RETRY_CEILING_S = 900.0
RECONNECT_FIRST_S = 0.1
# A database that is available again is found within this time.
RECONNECT_CEILING_S = 5.0
# 2**30 times any first delay exceeds every ceiling. More would overflow.
_MAX_DOUBLINGS = 30


def retry_delay_s(attempts: int, jitter: float) -> float:
    """Delay after `attempts` failed attempts of a task. The SQL function retry_delay_s() has the same formula."""
    return _doubling(RETRY_FIRST_S, RETRY_CEILING_S, attempts, jitter)


def reconnect_delay_s(failures: int, jitter: float) -> float:
    """Delay after `failures` failed connection attempts in a row."""
    return _doubling(RECONNECT_FIRST_S, RECONNECT_CEILING_S, failures, jitter)


def _doubling(first_s: float, ceiling_s: float, count: int, jitter: float) -> float:
    doublings = min(max(count, 1), _MAX_DOUBLINGS) - 1
    # Jitter removes up to half, so that clients that failed together do not retry together.
    return float(min(first_s * 2.0**doublings, ceiling_s) * (1.0 - 0.5 * jitter))

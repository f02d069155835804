"""How long to wait before trying again. Pure: chance comes in as `jitter`, a number from 0 to 1."""

RETRY_FIRST_S = 5.0
# A task that failed eight times in a row is not helped by waiting longer than this.
RETRY_CEILING_S = 900.0
RECONNECT_FIRST_S = 0.1
# A database that comes back is found within this time.
RECONNECT_CEILING_S = 5.0
# 2**30 times any first delay is beyond every ceiling; more would only overflow.
_MAX_DOUBLINGS = 30


def retry_delay_s(attempts: int, jitter: float) -> float:
    """Before the attempt after `attempts` failed ones. The SQL function retry_delay_s() has the same formula."""
    return _doubling(RETRY_FIRST_S, RETRY_CEILING_S, attempts, jitter)


def reconnect_delay_s(failures: int, jitter: float) -> float:
    """Before the next try to reach the database after `failures` in a row."""
    return _doubling(RECONNECT_FIRST_S, RECONNECT_CEILING_S, failures, jitter)


def _doubling(first_s: float, ceiling_s: float, count: int, jitter: float) -> float:
    doublings = min(max(count, 1), _MAX_DOUBLINGS) - 1
    # A random half is left out, so that those who failed together do not come back together.
    return float(min(first_s * 2.0**doublings, ceiling_s) * (1.0 - 0.5 * jitter))

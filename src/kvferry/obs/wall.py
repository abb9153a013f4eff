"""The calendar, for people: never compared with another process's, never used to decide anything."""

import time


def unix_s() -> float:
    """Seconds since 1970."""
    return time.time()

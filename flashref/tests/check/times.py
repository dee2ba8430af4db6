"""How long the checks take, as a table: right answers, known mistakes and other wrong answers.

    python -m flashref.tests.check.times

prints seconds of processor time of this machine for each check: how many functions were checked,
the median, and the slowest with its name. PyTorch, JAX and Numba are included where they are
installed.
"""

import statistics
import time

from flashref import check
from flashref.tests.check.solutions import correct
from flashref.tests.check.solutions.odd import ODD
from flashref.tests.check.solutions.wrong import WRONG


def timed(name, function):
    """Return the seconds that a check takes."""
    start = time.process_time()
    getattr(check, name)(function)
    return time.process_time() - start


def table():
    """Yield the lines of the table."""
    work = [(name, function) for name, function, missing in correct.solutions() if missing is None]
    work += [(name, function) for _, name, function in ODD]
    work += [(name, function) for name, _, function in WRONG]
    seconds = {}
    for name, function in work:
        called = getattr(function, "__name__", type(function).__name__)
        seconds.setdefault(name, []).append((timed(name, function), called))
    yield f"{'check':24} {'functions':>9} {'median s':>9} {'most s':>7}  slowest"
    for name, times in seconds.items():
        most, called = max(times)
        median = statistics.median(t for t, _ in times)
        yield f"{name:24} {len(times):9} {median:9.2f} {most:7.2f}  {called}"
    everything = [t for times in seconds.values() for t, _ in times]
    median, most = statistics.median(everything), max(everything)
    yield f"{'all':24} {len(everything):9} {median:9.2f} {most:7.2f}"


if __name__ == "__main__":
    for line in table():
        print(line)

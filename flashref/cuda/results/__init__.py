"""Runs of `python -m flashref bench gpu`: the ones stored here, and the tables that a run makes."""

import json
from pathlib import Path


def stored():
    """Return the newest run that is stored with the package.

    Examples
    --------
    >>> print(stored()["card"])
    NVIDIA H200
    """
    files = Path(__file__).parent.glob("*.json")
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return max(runs, key=lambda run: run["date"])


def table_title(d, causal, dtype="float16", backward=False):
    """Return the heading of a table: what its runs have in common, the length left out.

    Examples
    --------
    >>> print(table_title(64, causal=True))
    float16, d = 64, causal, forward
    """
    direction = "backward" if backward else "forward"
    return f"{dtype}, d = {d}, {'causal, ' * causal}{direction}"


def tables(results):
    """Return title to kernel to length to run; of several runs with other blocks, the fastest."""
    found = {}
    for run in results["runs"]:
        backward = run.get("pass") == "backward"
        title = table_title(run["d"], run["causal"], run["dtype"], backward)
        row = found.setdefault(title, {}).setdefault(run["kernel"], {})
        if run["n"] not in row or run["tflops"] > row[run["n"]]["tflops"]:
            row[run["n"]] = run
    return found

"""Runs of `python -m flashref bench gpu`: the ones stored here, and the tables that a run makes."""

import collections
import json
import statistics
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


def report(results):
    """Return a run as text: TFLOP/s by length, the share of the card's peak, the error."""
    peaks = ", ".join(f"{name}: {value:g}" for name, value in results["peaks"].items())
    found = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    lines = [
        f"{results['card']}, driver {results['driver']}, {results['date']}; {found}",
        f"measured peaks: {peaks}",
        results["how"],
    ]
    for title, rows in tables(results).items():
        lengths = sorted({n for row in rows.values() for n in row})
        half = title.startswith(("float16", "bfloat16"))
        peak = "fp16 matrix product, 8192³" if half else "fp32 multiply-add"
        lines += ["", f"TFLOP/s, {title}; the best as a share of the card's {peak}"]
        lines += [f"  {'N':22}" + "".join(f"{n:>8}" for n in lengths) + "    best     error"]
        top = results["peaks"][f"{peak}, TFLOP/s"]
        for name, row in rows.items():
            cells = "".join(f"{row[n]['tflops']:8.1f}" if n in row else " " * 8 for n in lengths)
            best = max(run["tflops"] for run in row.values()) / top
            errors = [run["error"] for run in row.values() if "error" in run]
            error = f"{max(errors):.1e}" if errors else ""
            lines += [f"  {name:22}{cells}    {best:4.0%}  {error:>8}"]
    for part, lines_of in REPORTS.items():
        lines += lines_of(results[part]) if results.get(part) else []
    if results.get("call_us"):
        costs = ", ".join(f"{name} {cost} µs" for name, cost in results["call_us"].items())
        lines += ["", f"what a call costs the host: {costs}"]
    lines += [f"left out: {line}" for line in results.get("left_out", ())]
    return "\n".join(lines)


def report_sparse(runs):
    """Return the lines about block-sparse attention: how much faster than with all tiles."""
    shares = sorted({run["one_in"] for run in runs})
    lines = [
        "",
        f"block-sparse tensor_core, N = {runs[0]['n']}: times faster than the dense kernel",
        f"  {'one tile in':22}" + "".join(f"{x:>8}" for x in shares) + "     error",
    ]
    for direction in ("forward", "backward"):
        for d in (64, 128):
            row = [run for run in runs if (run["pass"], run["d"]) == (direction, d)]
            by_share = {run["one_in"]: run for run in row}
            cells = "".join(
                f"{by_share[x]['speedup']:8.2f}" if x in by_share else " " * 8 for x in shares
            )
            error = max((run["error"] for run in row), default=0)
            lines += [f"  {f'{direction}, d = {d}':22}{cells}  {error:>8.1e}"]
    return lines


def report_ragged(runs):
    """Return the lines about lengths that leave tiles nearly empty: their share of the TFLOP/s."""
    by_kernel = collections.defaultdict(dict)
    for run in runs:
        by_kernel[run["pass"], run["kernel"]][run["d"], run["causal"]] = f"{run['share']:8.3f}"
    columns = sorted({(run["d"], run["causal"]) for run in runs})
    heads = "".join(f"{d:>6}{' c' if causal else '  '}" for d, causal in columns)
    lines = [
        "",
        f"N = {runs[0]['n']}: share of the TFLOP/s at {runs[0]['full_n']}, by d; c is causal",
        f"  {'':38}{heads}",
    ]
    for (direction, kernel), row in by_kernel.items():
        cells = "".join(row.get(column, " " * 8) for column in columns)
        lines += [f"  {f'{direction}, {kernel}':38}{cells}"]
    return lines


def report_long(runs):
    """Return a line for each pass over one long head: its time, and the memory that it takes."""
    return [
        f"one head, N = {run['n']:,}, d = {run['d']}, {run['pass']}, {run['kernel']}: "
        f"{statistics.median(run['ms']):.1f} ms, {run['tflops']} TFLOP/s; "
        f"{run['more_bytes'] / 2**20:.2f} MiB beyond inputs ({run['input_bytes'] / 2**20:g} "
        f"MiB) and results; error {run['error']:.1e}"
        for run in runs
    ]


def report_kernels(kernels):
    """Return a line for each kind of kernel: the seconds that it takes to compile one."""
    seconds = collections.defaultdict(list)
    for kernel in kernels:
        seconds[kernel["function"]].append(kernel["seconds"])
    return [
        f"compiling {function}: {statistics.median(spent):.1f} s a kernel, {len(spent)} kernels"
        for function, spent in seconds.items()
    ]


REPORTS = {
    "block_sparse": report_sparse,
    "ragged": report_ragged,
    "long": report_long,
    "kernels": report_kernels,
}

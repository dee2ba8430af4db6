"""What machine this is: `python -m flashref info`, for a bug report; `machine`, beside timings.

Nothing personal in either: no user, no folder, no address.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform

import flashref
from flashref.heads import num_threads

PACKAGES = (
    "numpy",
    "threadpoolctl",
    "numba",
    "numba-cuda",
    "matplotlib",
    "ipywidgets",
    "jupyterlab",
    "notebook",
    "torch",
)
SETTINGS = (  # they change speed or results, and their values name no folder
    "FLASHREF_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_ENABLE_CUDASIM",
    "CUDA_VISIBLE_DEVICES",
)


def facts():
    """Return what there is to know, as a dict of text."""
    return {
        "flashref": flashref.__version__,
        "python": f"{platform.python_version()}, {platform.python_implementation()}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **{name: _version(name) for name in PACKAGES},
        "BLAS": _blas(),
        "cores": _cores(),
        "threads": _threads(),
        "settings": ", ".join(f"{k}={os.environ[k]}" for k in SETTINGS if k in os.environ) or "-",
        "GPU": _gpu(),
    }


def machine():
    """Return what a reader must know to compare timings: processor, versions, threads, BLAS.

    Returns
    -------
    machine : dict
        Values that JSON holds; `torch` is there where it is installed.

    Examples
    --------
    >>> list(machine())[:4]
    ['processor', 'python', 'numpy', 'threads']
    """
    known = {
        "processor": _processor(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "threads": num_threads(),
    }
    if importlib.util.find_spec("torch") is not None:
        known["torch"] = _version("torch")
    kernels = {f"{pool['internal_api']} {pool.get('architecture', '')}" for pool in _pools() or ()}
    return known | {"blas": sorted(kernels)}


def _processor():
    """Return what the processor calls itself; Python does not know it on every Linux."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            ]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _blas():
    """Return which library multiplies matrices, with which kernel: both change the speed."""
    pools = _pools()
    if pools is None:
        return "unknown: threadpoolctl is not installed, so flashref starts no threads of its own"
    return "; ".join(map(_pool, pools)) or "not recognised by threadpoolctl"


def _pools():
    """Return what threadpoolctl knows of each BLAS that is loaded, or None without it."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return None
    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def _pool(pool):
    kernel = f", kernel {pool['architecture']}" if "architecture" in pool else ""
    return f"{pool['internal_api']} {pool['version']}{kernel}, {pool['num_threads']} threads"


def _cores():
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    usable = f", {len(affinity(0))} of them usable here" if affinity else ""
    return f"{os.cpu_count()}{usable}"


def _threads():
    try:
        threads = num_threads()
        return "1" if _pools() is None else f"up to {threads} in a call"
    except ValueError as error:
        return f"none: {error}"


def _gpu():
    if importlib.util.find_spec("flashref.cuda") is None:
        return "not asked: this copy of flashref has no GPU kernels"
    return " ".join(str(flashref.cuda.status()).split())  # on one line


def main(argv=None):
    """Print the facts and return 0."""
    argparse.ArgumentParser(prog="python -m flashref info", description=__doc__).parse_args(argv)
    known = facts()
    width = max(map(len, known)) + 2
    print("```text", *(f"{name:{width}}{value}" for name, value in known.items()), "```", sep="\n")
    return 0

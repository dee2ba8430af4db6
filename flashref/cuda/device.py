"""What this machine can do with CUDA, and what is missing, in words.

Numba, the driver and the compiler each report trouble in their own way and from deep below; here
each known trouble gets one sentence that says what to do.
"""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

import numpy as np

SIMULATOR = (
    "Without a GPU, the rungs naive, tiled and registers run in Numba's simulator, slowly: set "
    "NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts."
)

TROUBLES = (  # what the report contains; what it means
    (
        ("driver library cannot be found", "libcuda.so", "CUDA_ERROR_STUB_LIBRARY"),
        "no NVIDIA driver: this machine has none, or its libcuda is not where Numba looks "
        "(NUMBA_CUDA_DRIVER can name it).",
    ),
    (
        ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device"),
        "an NVIDIA driver, but no GPU that it shows (CUDA_VISIBLE_DEVICES may hide one).",
    ),
    (
        ("UNSUPPORTED_PTX_VERSION", "Unsupported .version", "INSUFFICIENT_DRIVER"),
        "the driver is older than the compiler's PTX: update the driver, or install the older "
        "compiler, pip install 'numba-cuda[cu12]'.",
    ),
    (
        ("libNVVM", "libnvvm", "nvvm.dll", "NvvmSupportError", "NVVM library"),
        "the compiler library libnvvm is missing: pip install 'flashref[gpu]'.",
    ),
    (
        ("nvrtc", "NVRTC"),
        "the compiler library nvrtc is missing: pip install 'flashref[gpu]'.",
    ),
    (
        ("nvjitlink", "nvJitLink"),
        "the linker library nvjitlink is missing: pip install 'flashref[gpu]'.",
    ),
    (
        ("OUT_OF_MEMORY",),
        "not enough memory on the GPU.",
    ),
)


class GpuError(RuntimeError):
    """The machine cannot run the kernel that was asked for; the message says why."""


class FallbackWarning(UserWarning):
    """The kernel that was asked for cannot run here, and another one does; it says why."""


@dataclass(frozen=True)
class Status:
    """What `flashref.cuda` can run here; as text, one sentence."""

    usable: bool
    simulated: bool
    text: str
    name: str | None = None
    compute_capability: tuple | None = None
    shared_bytes: int | None = None

    def __str__(self):
        """Return the sentence."""
        return self.text


def status():
    """Return what this machine can run: never raises, and leaves no kernel compiled.

    Returns
    -------
    Status
        With `usable`, `simulated`, `name`, `compute_capability`, `shared_bytes` (what one block
        can have), and `text`, which is also its `str`.
    """
    try:
        cuda = import_cuda()
    except (ImportError, GpuError) as error:
        return Status(False, False, f"No GPU kernels: {error}")
    if simulated():
        text = "Numba's CUDA simulator: naive, tiled and registers, slowly, on the CPU."
        return Status(True, True, text)
    try:
        gpu = cuda.get_current_device()
        name = gpu.name if isinstance(gpu.name, str) else gpu.name.decode()
        capability, shared = tuple(gpu.compute_capability), shared_limit(gpu)
    except Exception as error:  # whatever driver and compiler raise
        return Status(False, False, f"No GPU kernels: {explain(error)}")
    text = (
        f"{name}, compute capability {capability[0]}.{capability[1]}, {shared} bytes of shared "
        f"memory a block, {_versions()}."
    )
    return Status(True, False, text, name, capability, shared)


def import_cuda():
    """Return numba.cuda, or raise ImportError or GpuError with the reason in words."""
    if importlib.util.find_spec("numba") is None:
        raise ImportError("flashref.cuda needs numba: pip install numba", name="numba")
    if importlib.util.find_spec("numba_cuda") and not hasattr(np, "row_stack"):
        raise ImportError(
            f"numba-cuda 0.30 calls np.row_stack, which NumPy {np.__version__} no longer has: "
            f"pip install 'numpy<2.5'"
        )
    from numba import cuda

    asked = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    if asked and not simulated():
        raise GpuError(
            "NUMBA_ENABLE_CUDASIM was set after numba had been imported, which is too late: set "
            "it before Python starts, or before the first import of numba."
        )
    return cuda


def simulated():
    """Return whether kernels run in Numba's simulator."""
    from numba import config

    return bool(config.ENABLE_CUDASIM)


def has_numba_cuda():
    """Return whether numba.cuda is NVIDIA's package: inline PTX and launch bounds need it."""
    return importlib.util.find_spec("numba_cuda") is not None


def shared_limit(gpu):
    """Return the bytes of shared memory that a block of this GPU can have, once asked for."""
    return int(gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def explain(error):
    """Return what an exception of the driver or the compiler means, and what to do."""
    report = " ".join(f"{type(error).__name__}: {error}".split())
    for signs, meaning in TROUBLES:
        if any(sign in report for sign in signs):
            no_gpu = "no NVIDIA driver" in meaning or "no GPU" in meaning
            return f"{meaning} {SIMULATOR}" if no_gpu else meaning
    return report


def _versions():
    packages = ("numba", "numba-cuda")
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)

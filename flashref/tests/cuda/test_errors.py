"""What the ladder says when it cannot: every refusal in words, before any work."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import flashref

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.cuda import arrays, device, launch
from flashref.cuda.device import GpuError

ROOT = Path(flashref.__file__).parents[1]
STATUS = device.status()
no_gpu = pytest.mark.skipif(STATUS.usable, reason="this machine has a GPU, or simulates one")


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def python(source, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-W", "error", "-c", source]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@no_gpu
def test_without_a_gpu_one_sentence_and_the_recipe():
    text = str(flashref.cuda.status())
    assert text.startswith("No GPU kernels: no NVIDIA driver") or "no GPU" in text
    assert "NUMBA_ENABLE_CUDASIM=1" in text and "\n" not in text
    with pytest.raises(GpuError, match="NUMBA_ENABLE_CUDASIM=1"):
        flashref.cuda.flash_attention_2(ones(2, 4), ones(2, 4), ones(2, 4))


@pytest.mark.parametrize(
    "report, meaning",
    [
        ("CUDA driver library cannot be found", "no NVIDIA driver"),
        ("[CUDA_ERROR_NO_DEVICE]", "no GPU that it shows"),
        ("[222] Call to cuLinkAddData: UNSUPPORTED_PTX_VERSION", "driver is older"),
        ("ptxas fatal: Unsupported .version 9.5; current version is 9.0", "driver is older"),
        ("libNVVM cannot be found", "libnvvm is missing"),
        ("libnvrtc.so: cannot open shared object", "nvrtc is missing"),
        ("libnvJitLink.so.13: cannot open", "nvjitlink is missing"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "not enough memory"),
    ],
)
def test_known_troubles_get_a_sentence(report, meaning):
    assert meaning in device.explain(RuntimeError(report))


def test_unknown_trouble_is_passed_on():
    assert device.explain(RuntimeError("something\n new")) == "RuntimeError: something new"


def test_the_simulator_switched_on_too_late():
    source = """
import numba, os
from numba import config
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
import flashref
print(flashref.cuda.status())
"""
    assert "too late" in python(source, NUMBA_ENABLE_CUDASIM="0")


def test_the_simulator_says_what_it_is_and_refuses_ptx():
    source = """
import numpy as np, flashref
print(flashref.cuda.status())
x = np.ones((2, 8), np.float16)
try:
    flashref.cuda.flash_attention_2(x, x, x)
except RuntimeError as error:
    print(error)
"""
    out = python(source, NUMBA_ENABLE_CUDASIM="1")
    assert "simulator: naive, tiled and registers" in out
    assert "knows no PTX" in out and "flashref.cuda.emulator" in out


def test_numba_cuda_with_a_numpy_that_it_does_not_know(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "numba_cuda" or real(name)
    )
    monkeypatch.setattr(np, "row_stack", None, raising=False)
    monkeypatch.delattr(np, "row_stack")
    assert "pip install 'numpy<2.5'" in str(device.status())


def test_importing_the_package_imports_no_numba():
    assert python("import sys, flashref.cuda; print('numba' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    "call, error, words",
    [
        (dict(q=ones(3)), ValueError, "q has shape (3,)"),
        (dict(q=ones(2, 5)), ValueError, "q (2, 5)"),
        (dict(q=ones(3, 2, 4), k=ones(2, 2, 4), v=ones(2, 2, 4)), ValueError, "3 heads"),
        (dict(q=ones(2, 4, dtype=np.float64)), TypeError, "q float64, k float32"),
        (dict(zip("qkv", [ones(2, 4, dtype=np.float64)] * 3, strict=True)), TypeError,
         "registers takes float32"),
        (dict(zip("qkv", [ones(2, 8, dtype=np.float16)] * 3, strict=True), kernel="tiled"),
         TypeError, "tiled takes float32"),
        (dict(kernel="tensor_core"), TypeError, "takes float16 or bfloat16"),
        (dict(kernel="fast"), ValueError, "kernel='fast' must be one of auto, naive, tiled"),
        (dict(zip("qkv", [ones(2, 5)] * 3, strict=True), kernel="registers"), ValueError,
         "pad its last axis with zeros to a multiple of 4"),
        (dict(zip("qkv", [ones(2, 132)] * 3, strict=True), kernel="tiled"), ValueError,
         "at most 128 columns"),
        (dict(causal="bottom"), ValueError, "causal='bottom'"),
        (dict(scale=np.nan), ValueError, "scale=nan"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, words):
    q, k, v = (call.pop(name, ones(2, 4)) for name in "qkv")
    with pytest.raises(error) as caught:
        flashref.cuda.flash_attention_2(q, k, v, **call)
    assert words in str(caught.value)


def test_backward_checks_what_the_forward_returned():
    x = ones(2, 4)
    with pytest.raises(TypeError, match="lse float32"):
        flashref.cuda.flash_attention_2_backward(x, x, x, x, x, ones(2, dtype=np.float64))
    half = ones(2, 8, dtype=np.float16)
    with pytest.raises(TypeError, match="tiled takes float32"):
        flashref.cuda.flash_attention_2_backward(
            half, half, half, half, half, ones(2), kernel="tiled"
        )
    with pytest.raises(ValueError, match=r"lse has shape \(3,\); q and v ask for \(2,\)"):
        flashref.cuda.flash_attention_2_backward(half, half, half, half, half, ones(3))
    with pytest.raises(TypeError, match="do float32, q float16"):
        flashref.cuda.flash_attention_2_backward(ones(2, 8), half, half, half, half, ones(2))


@pytest.mark.parametrize("scale", [1e39, -1e308, 3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_scale_that_float32_cannot_hold_is_refused_before_any_work(scale, dtype):
    """3e38 is within float32, and its product with log₂ e is not."""
    x = ones(2, 8, dtype=dtype)
    with pytest.raises(ValueError, match=re.escape(f"scale={scale!r} must be within ±2.3e+38")):
        flashref.cuda.flash_attention_2(x, x, x, scale=scale)


@pytest.mark.parametrize("deterministic", [1, None, "yes", np.ones(2, bool)])
def test_deterministic_is_true_or_false(deterministic):
    x, half, mask = ones(2, 4), ones(64, 8, dtype=np.float16), np.ones((1, 1), bool)
    rules = {"deterministic": deterministic}
    with pytest.raises(TypeError, match="must be True or False"):
        flashref.cuda.flash_attention_2_backward(x, x, x, x, x, ones(2), **rules)
    with pytest.raises(TypeError, match="must be True or False"):
        flashref.cuda.block_sparse_attention_backward(
            half, half, half, half, half, ones(64), mask, block_q=64, block_k=64, **rules
        )


@pytest.mark.parametrize("deterministic", [True, False, np.True_])
def test_deterministic_reaches_the_rung(deterministic, monkeypatch):
    seen = []
    monkeypatch.setattr(launch._Call, "run", lambda self, *given: seen.append(given[-1]))
    monkeypatch.setattr(launch._Call, "card_objection", lambda self, rung: None)
    x, half, mask = ones(2, 4), ones(64, 8, dtype=np.float16), np.ones((1, 1), bool)
    rules = {"deterministic": deterministic}
    flashref.cuda.flash_attention_2_backward(x, x, x, x, x, ones(2), **rules)
    flashref.cuda.block_sparse_attention_backward(
        half, half, half, half, half, ones(64), mask, block_q=64, block_k=64, **rules
    )
    flashref.cuda.flash_attention_2_backward(x, x, x, x, x, ones(2))
    assert seen == [bool(deterministic)] * 2 + [False]


def test_backward_copies_do_and_o_too():
    """Rows that start between multiples of 16 bytes are refused, on the GPU; here: told of."""
    wide, thin = (arrays.Described(0, (2, 8), (s, 2), "float16", 0, None) for s in (16, 24))
    of = dict.fromkeys(("q", "k", "v", "o"), wide)
    assert launch._objection("tensor_core", of | {"do": wide}) is None
    assert "the rows of do" in launch._objection("tensor_core", of | {"do": thin})


class Elsewhere:
    """A GPU array as far as the checks look."""

    def __init__(self, gpu):
        self.gpu = gpu

    def __dlpack_device__(self):
        return 2, self.gpu

    def __dlpack__(self, stream=None):
        raise AssertionError("nothing is shared before the checks are done")


def test_arrays_that_lie_apart():
    with pytest.raises(ValueError, match="q on a GPU, k in main memory"):
        flashref.cuda.flash_attention_2(Elsewhere(0), ones(2, 4), ones(2, 4))
    with pytest.raises(ValueError, match="q on 0, k on 1, v on 0"):
        flashref.cuda.flash_attention_2(Elsewhere(0), Elsewhere(1), Elsewhere(0))


def test_too_little_shared_memory_says_what_would_fit():
    kernels = [
        launch.Kernel(len, (), 1, shared_bytes=n, name=name)
        for n, name in ((98304, "128 × 64"), (81920, "64 × 64"))
    ]
    run = launch.Run(None, shared_limit=90000)
    assert run.first_that_fits(kernels).name == "64 × 64"
    run.shared_limit = 65536
    with pytest.raises(GpuError, match=r"65536 bytes.*128 × 64 needs 98304.*64 × 64 needs 81920"):
        run.first_that_fits(kernels)


def test_a_grid_that_cuda_does_not_allow():
    run = launch.Run(None)
    with pytest.raises(ValueError, match="70000 blocks along y"):
        run(launch.Kernel(len, (), 1), (1, 70000, 1))


def test_views_of_any_batch():
    """Strides in bytes; axes of length 1 do not count; batch axes must follow each other."""
    assert arrays.merged("q", (5, 4), (16, 4), 4) == ((1, 1, 5, 4), (0, 0, 16, 4))
    shape, strides = (2, 3, 7, 5, 4), (1680, 560, 80, 16, 4)
    assert arrays.merged("q", shape, strides, 4) == ((6, 7, 5, 4), (560, 80, 16, 4))
    transposed = arrays.merged("q", (2, 7, 5, 4), (560, 16, 112, 4), 4)
    assert transposed == ((2, 7, 5, 4), (560, 16, 112, 4))
    with pytest.raises(ValueError, match="make it contiguous"):
        arrays.merged("q", (2, 3, 7, 5, 4), (560, 1120, 80, 16, 4), 4)


def test_dlpack_is_read_without_a_copy():
    """NumPy's own capsule: the same address, shape and strides."""
    x = np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(1, 0, 2)
    told = arrays._from_capsule(x.__dlpack__(), x)
    assert told.pointer == x.__array_interface__["data"][0]
    assert (told.shape, told.strides, told.dtype) == (x.shape, x.strides, "float16")


def test_the_cuda_array_interface_is_read_without_a_copy():
    interface = dict(data=(4096, False), shape=(2, 8), typestr="<f4", version=3)
    told = arrays._from_interface(types.SimpleNamespace(__cuda_array_interface__=interface))
    assert (told.pointer, told.strides, told.dtype) == (4096, (32, 4), "float32")


def test_numbers_with_swapped_bytes_are_read_as_what_they_are():
    swapped = np.arange(6, dtype=">f4").reshape(2, 3)
    described = arrays.HostArrays().describe("q", swapped)
    assert described.owner.dtype.isnative and described.dtype == "float32"
    np.testing.assert_array_equal(described.owner, swapped)
    told = {"typestr": ">f4", "shape": (2, 3), "data": (4096, False), "version": 3}
    on_gpu = types.SimpleNamespace(__cuda_array_interface__=told)
    with pytest.raises(TypeError, match=r"dtype >f4: its bytes are swapped"):
        arrays.GpuArrays(0).describe("q", on_gpu)


def test_a_masked_block_mask_is_refused():
    from flashref.cuda.block_mask import BlockMask

    mask = np.ma.masked_array(np.ones((1, 1), bool), mask=True)
    with pytest.raises(TypeError, match="block_mask is a masked array"):
        BlockMask(mask, 64, 64, 10, 10)

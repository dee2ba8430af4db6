"""What the compiler makes of the kernels, for two cards, without one: needs numba-cuda.

    pip install 'numba-cuda[cu13]' 'numpy<2.5'      and, for what ptxas says, nvidia-cuda-nvcc

An array whose index is not known at compile time goes to local memory, which is device memory; a
bare 0.0 makes float64 arithmetic, which most cards do at 1/64 of the speed. Neither is an error.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest

pytest.importorskip(
    "numba_cuda", reason="needs numba-cuda: pip install 'numba-cuda[cu13]' 'numpy<2.5'"
)

import numba.cuda.dispatcher
from numba import cuda
from numba import types as numba_types

from flashref.cuda import naive, registers, tensor_core, tensor_core_backward, tiled

CARDS = ((8, 0), (9, 0))
SHARED_LIMIT = {(8, 0): 163 * 1024, (9, 0): 227 * 1024}
SPILLED_BYTES = 128  # a thread may keep this much outside its registers: values not in inner loops

TC = tensor_core.forward_kernel
KEYS, QUERIES = tensor_core_backward.keys_kernel, tensor_core_backward.queries_kernel
BLOCKS = {"forward": tensor_core.BLOCKS, "keys": tensor_core_backward.KEYS}
BLOCKS["queries"] = tensor_core_backward.QUERIES
KERNELS = {
    "naive scores": naive.SCORES,
    "naive softmax": naive.SOFTMAX,
    "naive product": naive.PRODUCT,
    "tiled 64": tiled.forward_kernel(64, *tiled.blocks(64)),
    "tiled 128": tiled.forward_kernel(128, *tiled.blocks(128)),
    "tiled delta": tiled.DELTA,
    "tiled dq 128": tiled.dq_kernel(128, 32, 8),
    "tiled dk 128": tiled.dk_kernel(128, 32, 8),
    "tiled dv 128": tiled.dv_kernel(128, 32, 8),
    "registers 64": registers.forward_kernel(64, *registers.BLOCKS[64][0]),
    "registers 128": registers.forward_kernel(128, *registers.BLOCKS[128][0]),
    "tensor_core 64": TC(64, "float16", *tensor_core.BLOCKS[64][0]),
    "tensor_core 128": TC(128, "float16", *tensor_core.BLOCKS[128][0]),
    "tensor_core bfloat16": TC(32, "bfloat16", *tensor_core.BLOCKS[64][2]),
    "sparse 64": TC(64, "float16", *tensor_core.BLOCKS[64][0], True),
    "sparse 128": TC(128, "float16", *tensor_core.BLOCKS[128][0], True),
    "numbers 64": tensor_core_backward.numbers_kernel(64, "float16"),
    "numbers bf16": tensor_core_backward.numbers_kernel(128, "bfloat16"),
    "keys 64": KEYS(64, "float16", *BLOCKS["keys"][64][0]),
    "keys 128": KEYS(128, "float16", *BLOCKS["keys"][128][0]),
    "keys bfloat16": KEYS(32, "bfloat16", *BLOCKS["keys"][64][2]),
    "keys sparse 128": KEYS(128, "float16", *BLOCKS["keys"][128][0], True),
    "queries 64": QUERIES(64, "float16", *BLOCKS["queries"][64][0]),
    "queries 128": QUERIES(128, "float16", *BLOCKS["queries"][128][0]),
    "queries bfloat16": QUERIES(32, "bfloat16", *BLOCKS["queries"][64][2]),
    "queries sparse 128": QUERIES(128, "float16", *BLOCKS["queries"][128][0], True),
}
SPILLING = {"tensor_core 128", "sparse 128", "queries sparse 128"}  # the first measured fastest so
NO_SPILLS = {(9, 0): set(KERNELS) - SPILLING}


@functools.cache
def ptx_of(name, card):
    kernel = KERNELS[name]
    arguments = numba_types.void(*kernel.arguments)
    options = {"cc": card, "fastmath": True, "launch_bounds": kernel.launch_bounds}
    return cuda.compile_ptx(kernel.function, arguments, **options)[0]


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch):
    """Device functions ask for the current device while they compile."""
    card = types.SimpleNamespace(compute_capability=(9, 0), id=0)
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: card)


def ptxas():
    """Return NVIDIA's assembler: that of the wheel knows the compiler's PTX, another may not."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else ()
    wheels = [Path(folder) / "cu13" / "bin" / "ptxas" for folder in folders]
    return next((str(path) for path in wheels if path.is_file()), shutil.which("ptxas"))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", KERNELS)
def test_ptx(name, card):
    ptx = ptx_of(name, card)
    assert not re.search(r"\b(ld|st)\.local", ptx), "an array went to local memory"
    assert ".f64" not in ptx, "float64 arithmetic"
    assert KERNELS[name].shared_bytes <= SHARED_LIMIT[card]
    assert (".bf16" in ptx) == ("bfloat16" in name)
    assert ("cvt.f32.f16" in ptx) == (name == "numbers 64")  # bf16 needs only a shift


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", KERNELS)
def test_registers_and_spills(name, card, tmp_path):
    if ptxas() is None:
        pytest.skip("no ptxas here: pip install 'nvidia-cuda-nvcc==13.*'")
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx_of(name, card))
    arch = re.search(r"\.target (sm_\w+)", ptx_of(name, card)).group(1)
    command = [ptxas(), f"-arch={arch}", "-v", str(source), "-o", str(tmp_path / "kernel.cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    if "Unsupported .version" in run.stderr:
        pytest.skip("the ptxas here is older than the compiler")
    assert run.returncode == 0, run.stderr
    used = int(re.search(r"Used (\d+) registers", run.stderr).group(1))
    spilled = int(re.search(r"(\d+) bytes spill stores", run.stderr).group(1))
    static = re.search(r"(\d+) bytes smem", run.stderr)
    assert used <= 255
    assert spilled <= (0 if name in NO_SPILLS.get(card, ()) else SPILLED_BYTES)
    assert static is None or int(static.group(1)) <= 48 * 1024


def test_the_inner_loops_are_what_they_should_be():
    """Both products unrolled; 16-byte loads; one instruction for each exponential."""
    tensor = ptx_of("tensor_core 64", (9, 0))
    assert tensor.count("mma.sync") == 2 * (64 // 16) * (64 // 8) * 2  # 2 products, 2 row tiles
    assert tensor.count("ex2.approx") == 2 * (64 // 8) * 4 + 4  # S, and a correction for each row
    assert tensor.count("ldmatrix") == 8 + 16 + 16  # Q once; K and V for each tile
    assert ptx_of("registers 64", (9, 0)).count("ld.shared.v4.f32") >= 2 * 16


@pytest.mark.parametrize("D", [64, 128])
def test_the_inner_loops_of_the_backward_are_what_they_should_be(D):
    """4 and 3 products; one exponential for each score; P and dS never leave the registers."""
    for own, products in (("keys", 4), ("queries", 3)):
        ptx, (rows, others, warps, _) = ptx_of(f"{own} {D}", (9, 0)), BLOCKS[own][D][0]
        scores = rows * others // (32 * warps)  # of a thread
        assert ptx.count("mma.sync") == products * scores // 4 * D // 16
        assert ptx.count("ex2.approx") == scores
        a = 2 * D // 16 * rows // (16 * warps)  # K, V or Q, dO: once, or for each tile
        assert ptx.count("ldmatrix") == a + products * others // 16 * D // 16
        assert ptx.count("ldmatrix") - ptx.count(".trans") == a + 2 * others // 16 * D // 16
        assert ptx.count("movmatrix") == ptx.count("st.shared") == 0
        assert ptx.count("ld.shared.v4.f32") == (others // 8 if own == "keys" else 0)


def test_every_block_size_fits_the_cards():
    """The first fits a block of both; the last fits what any card of compute capability 8.0 has."""
    make = {"forward": TC, "keys": KEYS, "queries": QUERIES}
    for name, table in BLOCKS.items():
        for D, options in table.items():
            sizes = [make[name](D, "float16", *x).shared_bytes for x in options]
            assert sizes[-1] == min(sizes) and sizes[-1] <= 99 * 1024
            assert sizes[0] <= min(SHARED_LIMIT.values())


def test_the_checks_can_fail():
    """A kernel with a bare 0.1 and a run-time index is caught by the same patterns."""

    def careless(x, n):
        a = cuda.local.array(8, numba_types.float32)
        for i in range(8):
            a[i] = x[i] * 0.1
        x[0] = a[n]

    signature = numba_types.void(numba_types.float32[::1], numba_types.int32)
    ptx, _ = cuda.compile_ptx(careless, signature, cc=(9, 0))
    assert re.search(r"\b(ld|st)\.local", ptx) and ".f64" in ptx

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

import numpy as np
import pytest

pytest.importorskip(
    "numba_cuda", reason="needs numba-cuda: pip install 'numba-cuda[cu13]' 'numpy<2.5'"
)

import numba.cuda.dispatcher
from numba import cuda
from numba import types as numba_types

from flashref.cuda import hopper, naive, registers, tensor_core, tensor_core_backward, tiled, tma

CARDS = ((8, 0), (9, 0))
SHARED_LIMIT = {(8, 0): 163 * 1024, (9, 0): 227 * 1024}
SPILLED_BYTES = 128  # a thread may keep this much outside its registers: values not in inner loops

TC = tensor_core.forward_kernel
KEYS, QUERIES = tensor_core_backward.keys_kernel, tensor_core_backward.queries_kernel
NUMBERS, ROUNDING = tensor_core_backward.numbers_kernel, tensor_core_backward.rounding_kernel
BLOCKS = {
    "forward": tensor_core.BLOCKS,
    "one pass": tensor_core_backward.ONE_PASS,
    "keys": tensor_core_backward.KEYS,
    "queries": tensor_core_backward.QUERIES,
}
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
    "numbers 64": NUMBERS(64, "float16", 0),
    "numbers bf16": NUMBERS(128, "bfloat16", 4),
    "one pass 64": KEYS(64, "float16", *BLOCKS["one pass"][64][0], 4),
    "one pass 128": KEYS(128, "float16", *BLOCKS["one pass"][128][0], 4),
    "one pass 64, one float": KEYS(64, "float16", *BLOCKS["one pass"][64][0], 1),
    "one pass 128, one float": KEYS(128, "float16", *BLOCKS["one pass"][128][0], 1),
    "one pass bfloat16": KEYS(32, "bfloat16", *BLOCKS["one pass"][64][2], 4),
    "one pass 64, tail": KEYS(64, "float16", *BLOCKS["one pass"][64][0], 4, tail=True),
    "one pass 128, tail": KEYS(128, "float16", *BLOCKS["one pass"][128][0], 4, tail=True),
    "one pass bfloat16, tail": KEYS(128, "bfloat16", *BLOCKS["one pass"][128][0], 4, tail=True),
    "one pass 64, tail, one float": KEYS(64, "float16", *BLOCKS["one pass"][64][0], 1, tail=True),
    "one pass 128, tail, one float": KEYS(
        128, "float16", *BLOCKS["one pass"][128][0], 1, tail=True
    ),
    "one pass sparse 64, tail": KEYS(64, "float16", *BLOCKS["one pass"][64][0], 4, True, True),
    "one pass sparse 128, tail": KEYS(128, "float16", *BLOCKS["one pass"][128][0], 4, True, True),
    "one pass sparse 64": KEYS(64, "float16", *BLOCKS["one pass"][64][0], 4, True),
    "one pass sparse 128": KEYS(128, "float16", *BLOCKS["one pass"][128][0], 4, True),
    "rounding 64": ROUNDING(64, "float16", 4),
    "rounding bfloat16": ROUNDING(128, "bfloat16", 1),
    "keys 64": KEYS(64, "float16", *BLOCKS["keys"][64][0], 0),
    "keys 128": KEYS(128, "float16", *BLOCKS["keys"][128][0], 0),
    "keys bfloat16": KEYS(32, "bfloat16", *BLOCKS["keys"][64][2], 0),
    "keys sparse 128": KEYS(128, "float16", *BLOCKS["keys"][128][0], 0, True),
    "queries 64": QUERIES(64, "float16", *BLOCKS["queries"][64][0]),
    "queries 128": QUERIES(128, "float16", *BLOCKS["queries"][128][0]),
    "queries bfloat16": QUERIES(32, "bfloat16", *BLOCKS["queries"][64][2]),
    "queries sparse 128": QUERIES(128, "float16", *BLOCKS["queries"][128][0], True),
}
HOPPER = {
    f"hopper {D} {half} {step} {'causal ' * hides}".rstrip(): (
        hopper.forward_kernel(D, half, schedule, bool(hides), False)
    )
    for D in hopper.BEST
    for step, schedule in hopper.steps(D).items()
    for half in ("float16", "bfloat16")
    for hides in (0, 1)
    if step == "persistent" or (half == "float16" and not hides)
} | {
    f"hopper {D} float16 short {'causal ' * hides}".rstrip(): (
        hopper.forward_kernel(D, "float16", short, hides, False)
    )
    for (D, hides), (_, short) in hopper.SHORT.items()
}
SERIALISED = "hopper 256 float16 wgmma"  # a step that shows what setmaxnreg is for
SPILLING = {"tensor_core 128", "sparse 128"}  # the first measured fastest so
SPILLING |= {"one pass sparse 64", "keys 128", "queries sparse 128"}
SPILLING |= {name for name in KERNELS if "tail" in name}
NO_SPILLS = {(9, 0): set(KERNELS) - SPILLING}
ON_CARDS = [  # four floats are added to memory at once by 9.0, and one by what is older
    (name, card)
    for name in KERNELS
    for card in CARDS
    if "one pass" not in name or ("one float" in name) == (card < (9, 0))
]


@functools.cache
def ptx_of(name, card):
    return compiled((KERNELS | HOPPER)[name], card)


def reads_what_is_not_given(ptx, kernel):
    """Return which numbers a kernel reads that `launch` leaves 0: an array's owner and its size."""
    read, place, found = set(re.findall(r"ld\.param\S*\s.*_param_(\d+)", ptx)), 0, []
    for argument in kernel.arguments:
        array = isinstance(argument, numba_types.Array)
        found += [i for i in range(place, place + 4 * array) if str(i) in read]
        place += 5 + 2 * argument.ndim if array else 1
    assert max(map(int, re.findall(r"_param_(\d+)", ptx))) == place - 1, "counted wrong"
    return found


def compiled(kernel, card):
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


def assembled(ptx, arch, tmp_path):
    """Return what ptxas says of a kernel; skip, where there is none."""
    if ptxas() is None:
        pytest.skip("no ptxas here: pip install 'nvidia-cuda-nvcc==13.*'")
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas(), f"-arch={arch}", "-v", str(source), "-o", str(tmp_path / "kernel.cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    said = run.stdout + run.stderr
    if "Unsupported .version" in said:
        pytest.skip("the ptxas here is older than the compiler")
    assert run.returncode == 0, said
    return said


@pytest.mark.parametrize("name, card", ON_CARDS)
def test_ptx(name, card):
    ptx = ptx_of(name, card)
    assert not re.search(r"\b(ld|st)\.local", ptx), "an array went to local memory"
    assert ".f64" not in ptx, "float64 arithmetic"
    assert reads_what_is_not_given(ptx, KERNELS[name]) == []
    assert KERNELS[name].shared_bytes <= SHARED_LIMIT[card]
    assert (".bf16" in ptx) == ("bfloat16" in name)
    assert ("cvt.f32.f16" in ptx) == (name == "numbers 64")  # bf16 needs only a shift


@pytest.mark.parametrize("name, card", ON_CARDS)
def test_registers_and_spills(name, card, tmp_path):
    arch = re.search(r"\.target (sm_\w+)", ptx_of(name, card)).group(1)
    said = assembled(ptx_of(name, card), arch, tmp_path)
    used = int(re.search(r"Used (\d+) registers", said).group(1))
    spilled = int(re.search(r"(\d+) bytes spill stores", said).group(1))
    static = re.search(r"(\d+) bytes smem", said)
    assert used <= 255
    assert spilled <= (0 if name in NO_SPILLS.get(card, ()) else SPILLED_BYTES)
    assert static is None or int(static.group(1)) <= 48 * 1024


@pytest.mark.parametrize("name", sorted(HOPPER.keys() - {SERIALISED}))
def test_hopper(name, tmp_path):
    """No spills, nothing in local memory, and no product that waits for the one before (C75xx)."""
    kernel = HOPPER[name]
    ptx = ptx_of(name, (9, 0, "a"))
    assert not re.search(r"\b(ld|st)\.local", ptx), "an array went to local memory"
    assert ".f64" not in ptx, "float64 arithmetic"
    assert reads_what_is_not_given(ptx, kernel) == []
    assert (".bf16" in ptx) == ("bfloat16" in name)
    assert kernel.shared_bytes <= SHARED_LIMIT[9, 0]
    said = assembled(ptx, "sm_90a", tmp_path)
    complaints = [line for line in said.splitlines() if re.search("C75|serialized|warning", line)]
    assert complaints == []
    # what the threads of a block get alike; setmaxnreg moves them later
    used = int(re.search(r"Used (\d+) registers", said).group(1))
    most = {128: 255, 256: 255, 384: 168, 512: 128, 640: 96}[kernel.threads]
    assert used <= most
    if "setmaxnreg" in ptx:  # what is dealt out is what there is: with less, `inc` would wait
        assert used == most
    assert int(re.search(r"(\d+) bytes spill stores", said).group(1)) == 0


@pytest.mark.parametrize("D", hopper.BEST)
def test_the_inner_loop_of_hopper(D):
    """What one step of `hopper` has: the products of a tile, one exponential for each score."""
    schedule, name = hopper.BEST[D], f"hopper {D} float16 persistent"
    ptx = ptx_of(name, (9, 0, "a"))
    loops = 2  # the first scores and the last output stand before and after the loop
    assert ptx.count("wgmma.mma_async") == loops * (D // 16 + schedule.BC // 16)
    assert ptx.count("ex2.approx") == loops * (schedule.BC // 2 + 2)
    assert ptx.count("setmaxnreg") == 2 and ptx.count("cp.async.bulk.tensor") >= 3 * D // 64
    if name + " causal" in HOPPER:
        causal = ptx_of(name + " causal", (9, 0, "a"))
        assert causal.count("ex2.approx") == (loops + 1) * (schedule.BC // 2 + 2)


@pytest.mark.parametrize("D", hopper.BEST)
def test_the_machine_code_of_the_inner_loop_of_hopper(D, tmp_path):
    """Little beside what the algorithm needs: descriptors, barriers and counters are scalars."""
    assembled(ptx_of(f"hopper {D} float16 persistent", (9, 0, "a")), "sm_90a", tmp_path)
    program = Path(ptxas()).with_name("nvdisasm")
    if not program.is_file():
        pytest.skip("no nvdisasm here: pip install 'nvidia-cuda-nvdisasm==13.*'")
    command = [str(program), "-c", str(tmp_path / "kernel.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    scores, output = hopper.BEST[D].BC // 2, D // 2  # registers of a thread
    products = D // 16 + hopper.BEST[D].BC // 16
    loop = min((x for x in loops(code) if "HGMMA" in "".join(x)), key=len)
    assert sum("HGMMA" in line for line in loop) == products
    assert sum("MUFU" in line for line in loop) == scores + 2
    # a maximum, a multiply-add, an exponential, a sum and half a conversion for each score
    assert len(loop) <= 4.5 * scores + output + products + 130


def loops(code):
    """Return the instructions between each label and the branches back to it."""
    lines = re.findall(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.MULTILINE)
    place = {label: i for i, (label, _) in enumerate(lines) if label}
    for i, (_, instruction) in enumerate(lines):
        target = re.search(r"BRA.*(\.L_x_\d+)", instruction)
        if target and place.get(target.group(1), i) < i:
            yield [x for _, x in lines[place[target.group(1)] : i + 1] if x]


def test_too_few_registers_are_seen(tmp_path):
    """256 columns without setmaxnreg: spills, and products that wait for each other."""
    said = assembled(ptx_of(SERIALISED, (9, 0, "a")), "sm_90a", tmp_path)
    assert "C7512" in said and "serialized" in said
    assert int(re.search(r"(\d+) bytes spill stores", said).group(1)) > 0


def test_tensor_maps_are_asked_for_as_the_driver_wants():
    """Its own names and types; the driver, which is not here, is replaced by a note of the call."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    seen = []

    def encode(*arguments):
        seen.extend(arguments)
        return driver.CUresult.CUDA_SUCCESS, types.SimpleNamespace(opaque=range(16))

    fake = types.SimpleNamespace(**vars(driver) | {"cuTensorMapEncodeTiled": encode})
    map_ = tma.TensorMap(4096, "bfloat16", (1, 3, 50, 72), (7, 7200, 144), 64)
    assert map_.encode(fake).tobytes() == np.arange(16, dtype=np.uint64).tobytes()
    dtype, rank, pointer, sizes, strides, box, steps, interleave, swizzle, _, fill = seen
    assert dtype.name.endswith("BFLOAT16") and (rank, pointer) == (4, 4096)
    assert [int(x) for x in sizes] == [72, 50, 3, 1] and [int(x) for x in box] == [64, 64, 1, 1]
    assert [int(x) for x in strides] == [144, 7200, 144] and [int(x) for x in steps] == [1] * 4
    assert interleave.name.endswith("NONE") and swizzle.name.endswith("128B")
    assert fill.name.endswith("FILL_NONE")
    assert driver.cuTensorMapEncodeTiled.__doc__.startswith("cuTensorMapEncodeTiled(tensorDataType")


def test_the_inner_loops_are_what_they_should_be():
    """Both products unrolled; 16-byte loads; one instruction for each exponential."""
    tensor = ptx_of("tensor_core 64", (9, 0))
    assert tensor.count("mma.sync") == 2 * (64 // 16) * (64 // 8) * 2  # 2 products, 2 row tiles
    assert tensor.count("ex2.approx") == 2 * (64 // 8) * 4 + 4  # S, and a correction for each row
    assert tensor.count("ldmatrix") == 8 + 16 + 16  # Q once; K and V for each tile
    assert ptx_of("registers 64", (9, 0)).count("ld.shared.v4.f32") >= 2 * 16


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name, products", [("one pass", 5), ("keys", 4), ("queries", 3)])
def test_the_inner_loops_of_the_backward_are_what_they_should_be(name, products, D):
    """Products, loads and exchanges; one exponential for each score; no move between registers."""
    ptx, (rows, others, warps, _, *split) = ptx_of(f"{name} {D}", (9, 0)), BLOCKS[name][D][0]
    (split,) = split or (1,)
    scores = rows * others // (32 * warps)  # of a thread
    assert ptx.count("mma.sync") == products * scores // 4 * D // 16
    assert ptx.count("ex2.approx") == scores
    mt, steps, columns = rows * split // (16 * warps), others // split // 16, D // 16
    plain = 2 * columns * (mt + steps)  # K, V or Q, dO: once, or for each tile; then the others
    turned = (1 if name == "queries" else 2) * steps * columns // split  # dQ, or dV and dK
    tiles = {"one pass": 1}.get(name, 0)  # of P and dS
    if split > 1:  # and over the other warp's queries
        plain, turned, tiles = plain + 2 * steps * mt, 2 * turned, 2
    if name == "one pass":  # dQ: pieces as square as can be
        pieces = others // 16 * columns // warps
        across = max(x for x in (1, 2, 4) if x * x <= pieces)
        turned += rows // 16 * (across + pieces // across)
        assert ptx.count("red.global.add.v4.f32") == 2 * pieces
    assert ptx.count("ldmatrix") - ptx.count(".trans") == plain
    assert ptx.count(".trans") == turned
    assert ptx.count("st.shared.b32") == tiles * scores // 2
    assert ptx.count("movmatrix") == 0
    assert ptx.count("ld.shared.v4.f32") == (0 if name == "queries" else 2 * steps)
    in_registers = BLOCKS[name][D][0][3]
    assert ptx.count("bar.sync") == 1 + in_registers + (tiles > 0)


def test_the_last_bits_of_one_pass_are_the_memorys():
    """One float at a time, where a card cannot take four; two passes add nothing to memory."""
    assert ptx_of("one pass 64, one float", (8, 0)).count("red.global.add.f32") == 4 * 4
    for name in ("keys 64", "keys 128", "queries 64", "queries 128"):
        assert not re.search(r"\b(red|atom)\.", ptx_of(name, (9, 0)))


def test_every_block_size_fits_the_cards():
    """The first fits a block of both; the last fits what any card of compute capability 8.0 has."""
    make = {"forward": (TC,), "one pass": (KEYS, 4), "keys": (KEYS, 0), "queries": (QUERIES,)}
    for name, table in BLOCKS.items():
        kernel, *add_dq = make[name]
        for D, options in table.items():
            sizes = [kernel(D, "float16", *x, *add_dq).shared_bytes for x in options]
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

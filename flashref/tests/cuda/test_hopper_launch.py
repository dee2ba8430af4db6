"""How `hopper` is chosen and launched, without a card: the driver's part is replaced by notes."""

import types
import warnings

import numpy as np
import pytest

import flashref
from flashref.cuda.device import FallbackWarning

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.cuda import arrays, device, hopper, launch, tma

STATUS = device.status()
pytestmark = pytest.mark.skipif(STATUS.simulated, reason="the simulator knows no PTX")


def told(*shape, strides=None, dtype="float16"):
    """Return an array as its library describes it."""
    strides = strides or arrays.contiguous_strides(shape, 2)
    return arrays.Described(4096, shape, strides, dtype, 0, None)


def choose(kernel, **of):
    of = {name: told(2, 70, 64) for name in "qkv"} | of
    return launch._choose_rung(kernel, tuple(launch.RUNGS), of)


def test_hopper_is_taken_when_it_is_asked_for():
    assert choose("hopper") == "hopper"
    wide = {name: told(2, 70, 256) for name in "qkv"}
    assert choose("hopper", **wide) == "hopper"
    assert choose("auto") == choose("auto", **wide) == "hopper"


def test_where_the_shape_does_not_allow_it_tensor_core_runs():
    broadcast = told(2, 70, 64, strides=(0, 128, 2))  # one head for all: TMA cannot stand still
    with pytest.warns(FallbackWarning, match=r"strides of k .*; tensor_core runs instead"):
        assert choose("hopper", k=broadcast) == "tensor_core"
    with warnings.catch_warnings(action="error"):
        assert choose("auto", k=broadcast) == "tensor_core"
    thin = told(2, 70, 60)
    with warnings.catch_warnings(action="error"):  # nothing runs instead
        with pytest.raises(
            ValueError, match=r"'hopper' copies 16 bytes .*'tensor_core' copies 16 .*pad"
        ):
            choose("hopper", q=thin, k=thin, v=thin)
    with pytest.raises(TypeError, match="hopper takes float16 or bfloat16"):
        choose("hopper", **{name: told(2, 70, 64, dtype="float32") for name in "qkv"})


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_where_the_card_does_not_allow_it_tensor_core_runs(capability, monkeypatch):
    card = types.SimpleNamespace(compute_capability=capability, id=0)
    monkeypatch.setattr(launch, "_current", lambda: card)
    monkeypatch.setattr(device, "has_numba_cuda", lambda: True)
    x = np.ones((70, 64), np.float16)

    def rung(x, kernel="hopper"):
        return launch._Call({"q": x, "k": x, "v": x}, None, False, kernel, tuple(launch.RUNGS))

    best = "hopper" if capability == (9, 0) else "tensor_core"
    with warnings.catch_warnings(action="error"):
        assert rung(x, "auto").rung == best
    if best == "hopper":
        with warnings.catch_warnings(action="error"):
            assert rung(x).rung == "hopper"
        return
    number = "{}.{}".format(*capability)
    with pytest.warns(FallbackWarning, match=f"exactly compute capability 9.0.* has {number}"):
        assert rung(x).rung == "tensor_core"
    wide = np.ones((70, 256), np.float16)
    with warnings.catch_warnings(action="error"):
        said = rf"'hopper' needs exactly .* has {number}; .*'tensor_core' takes at most 128 columns"
        with pytest.raises(ValueError, match=said):
            rung(wide)
    with pytest.raises(ValueError, match="'tensor_core' takes at most 128 columns"):
        rung(wide, "auto")


def test_a_card_that_is_too_old_for_both(monkeypatch):
    card = types.SimpleNamespace(compute_capability=(7, 5), id=0)
    monkeypatch.setattr(launch, "_current", lambda: card)
    x = np.ones((70, 64), np.float16)
    for kernel in ("auto", "hopper", "tensor_core"):
        with warnings.catch_warnings(action="ignore"):
            with pytest.raises(
                device.GpuError, match=r"'tensor_core' needs compute capability 8.0"
            ):
                flashref.cuda.flash_attention_2(x, x, x, kernel=kernel)


def test_arrays_on_the_first_card_are_used_there(monkeypatch):
    """Its number is 0, and another is current: the rung is chosen for the arrays' own card."""
    current = types.SimpleNamespace(id=1, compute_capability=(8, 0))
    first = types.SimpleNamespace(id=0, compute_capability=(9, 0))
    cards, selected = {0: first, 1: current}, [1]
    monkeypatch.setattr(launch, "_current", lambda: cards[selected[-1]])
    monkeypatch.setattr(launch.cuda, "select_device", selected.append)
    monkeypatch.setattr(device, "has_numba_cuda", lambda: True)
    library = types.SimpleNamespace(device=0, describe=lambda name, x: told(2, 70, 64))
    monkeypatch.setattr(arrays, "library_of", lambda named: library)
    named = dict.fromkeys("qkv", np.ones((2, 70, 64), np.float16))
    call = launch._Call(named, None, False, "auto", tuple(launch.RUNGS))
    assert selected == [1, 0] and call.rung == "hopper"


@pytest.mark.skipif(STATUS.usable, reason="this machine has a GPU")
def test_without_a_card_one_sentence():
    x = np.ones((70, 64), np.float16)
    with pytest.raises(device.GpuError, match="NUMBA_ENABLE_CUDASIM=1"):
        flashref.cuda.flash_attention_2(x, x, x, kernel="hopper")


@pytest.fixture
def launched(monkeypatch):
    """Launch on views of nothing; return the kernel, grid and values of `launch`, and the maps."""
    seen = types.SimpleNamespace()

    def compiled(kernel, device_id):
        seen.kernel = kernel
        return lambda grid, stream, values: vars(seen).update(grid=grid, values=values)

    def on_card(device_id, maps):
        seen.maps = [tma.TensorMap(*x) for x in maps]
        return np.zeros(tma.BYTES * len(maps), np.uint8)

    monkeypatch.setattr(launch, "_current", lambda: types.SimpleNamespace(id=0))
    monkeypatch.setattr(launch, "_compiled", compiled)
    monkeypatch.setattr(tma, "on_card", on_card)

    def view(pointer, *shape):
        strides = arrays.contiguous_strides(shape, 2)
        return arrays.View(pointer, shape, strides, "<u2", None)

    def forward(n_q, n_k, d, d_v, offset, scale=0.1, **blocks):
        run = launch.Run(types.SimpleNamespace(stream=0), "float16", 2**31, multiprocessors=132)
        run.blocks = blocks.get("schedule")
        q, k, v = view(2**12, 3, 8, n_q, d), view(2**20, 3, 2, n_k, d), view(2**28, 3, 2, n_k, d_v)
        o, lse = view(2**36, 3, 8, n_q, d_v), view(2**37, 3, 8, n_q)
        hopper.forward(run, q, k, v, o, lse, scale, offset)
        return seen

    return forward


def test_what_is_launched(launched):
    seen = launched(1000, 600, 72, 128, offset=-500)
    assert seen.kernel is hopper.forward_kernel(128, "float16", hopper.BEST[128], True, False)
    assert seen.grid == (132, 1, 1) and seen.kernel.launch_bounds == (384, 1)
    assert len(seen.values) == len(seen.kernel.arguments)
    assert [x.pointer for x in seen.maps] == [2**12, 2**20, 2**28]
    assert [x.shape for x in seen.maps] == [(3, 8, 1000, 72), (3, 2, 500, 72), (3, 2, 500, 128)]
    assert [x.box_rows for x in seen.maps] == [128, 128, 128]
    assert seen.maps[0].strides == (8 * 1000 * 144, 1000 * 144, 144)


def test_a_launch_without_persistent_blocks_and_one_with_few_tiles(launched):
    schedule = hopper.steps(64)["turns"]
    assert launched(1000, 500, 64, 64, 500, schedule=schedule).grid == (24 * 6, 1, 1)
    assert launched(100, 500, 64, 64, 500).grid == (24, 1, 1)


def test_what_nobody_sees_is_in_no_map(launched):
    assert [x.shape[2] for x in launched(100, 500, 64, 64, offset=0).maps] == [100, 100, 100]
    assert [x.shape[2] for x in launched(100, 500, 64, 64, offset=-200).maps] == [100, 1, 1]
    for D in hopper.BEST:
        no_keys = launched(100, 0, D, D, offset=0)
        assert [x.pointer for x in no_keys.maps] == [2**12] * 3 and no_keys.kernel.function


def test_kernels_for_what_is_hidden_and_for_negative_scales(launched):
    K, B = hopper.forward_kernel, hopper.BEST[64]
    assert launched(100, 5000, 64, 64, offset=4900).kernel is K(64, "float16", B, True, False)
    assert launched(1, 5000, 64, 64, offset=4999).kernel is K(64, "float16", B, False, False)
    assert launched(100, 5000, 64, 64, 5000).kernel is K(64, "float16", B, False, False)
    assert launched(100, 5000, 64, 64, 5000, -1.0).kernel is K(64, "float16", B, False, True)


def test_a_short_sequence_has_smaller_tiles(launched):
    for (D, hides), (most, schedule) in hopper.SHORT.items():
        best, K = hopper.BEST[D], hopper.forward_kernel
        assert schedule.BC < best.BC
        for n, expected in ((most, schedule), (most + 1, best)):
            kernel = launched(n, n, D, D, 0 if hides else n).kernel
            assert kernel is K(D, "float16", expected, hides, False)


def test_steps_add_up_to_the_best():
    """Each step switches one thing on; the last is what runs."""
    for D, best in hopper.BEST.items():
        schedules = list(hopper.steps(D).values())
        assert schedules[-1] == best
        switches = [sum(x is True for x in vars(s).values()) for s in schedules]
        assert switches == list(range(6))

"""The stopwatches of `timeline`: what they note is read right; the kernel compiles with them."""

import importlib.util
import re
import types

import numpy as np
import pytest

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.tests.cuda import timeline
from flashref.tests.cuda.timeline import ROOM, TICK, events, in_window

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="compiles for a card: needs numba-cuda"
)


def memory(*warpgroups):
    """Return what stopwatches leave in memory: each moment at the place that its clock gives."""
    words = np.zeros((len(warpgroups), ROOM, 2), np.uint32)
    for mine, moments in zip(words, warpgroups, strict=True):
        for kind, clock in moments:
            mine[clock // TICK % ROOM] = kind + 1, clock % 2**32
    return words.reshape(-1)


def test_moments_come_back_in_order_whatever_their_place():
    around = ROOM * TICK  # after so many clocks, places start over
    mine = [(2, around - 100), (3, around - 20), (0, around + 40), (1, around + 90)]
    assert events(memory(mine, [], [(5, 7)])) == [mine, [], [(5, 7)]]


def test_of_moments_at_one_place_the_later_remains():
    mine = [(2, 50), (3, 50 + ROOM * TICK)]
    assert events(memory(mine)) == [mine[1:]]


def test_what_is_older_than_a_round_of_places_is_dropped():
    """There, whoever came later has overwritten some, and nobody knows which."""
    old, new = [(2, 100), (3, 500)], [(4, 600 + ROOM * TICK), (5, 700 + ROOM * TICK)]
    assert events(memory(old + new)) == [new]


def test_a_clock_of_32_bits_that_overflows_goes_on():
    mine = [(1, 2**32 - 60), (2, 2**32 - 20), (3, 2**32 + 30), (4, 2**32 + 90)]
    assert events(memory(mine)) == [mine]


def test_a_window_begins_with_a_turn_in_the_middle():
    first = [(kind, 1000 + 100 * i) for i, kind in enumerate([1, 3, 5, 0] * 3)]
    second = [(3, 1390), (4, 1410), (5, 1800), (0, 1801)]
    found = in_window([first, second], 400)
    middle = first[len(first) // 2 :]
    start = next(clock for kind, clock in middle if kind == 1)
    assert start == 1800
    assert found[0] == [(1, 0), (3, 100), (5, 200), (0, 300)]
    assert found[1] == [(5, 0), (0, 1)]
    assert in_window([first, second], 100)[0] == [(1, 0), (3, 100)]


def test_moments_have_the_names_that_the_picture_reads():
    gpu = pytest.importorskip("flashref.plots.gpu", reason="needs matplotlib")
    assert set(gpu.ROUND) | {"started products"} == set(timeline.KINDS)


@needs_compiler
@pytest.mark.parametrize("D", [64, 128])
def test_the_kernel_with_stopwatches_compiles_and_writes_where_it_is_told(D, monkeypatch):
    import numba.cuda.dispatcher

    from flashref.cuda import hopper
    from flashref.tests.cuda.test_compile import compiled

    card = types.SimpleNamespace(compute_capability=(9, 0), id=0)
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: card)
    schedule, address = hopper.BEST[D], 0x7F0012345000
    before = compiled(hopper.forward_kernel(D, "float16", schedule, False, False), (9, 0, "a"))
    kernel, patches = timeline.traced(schedule, D, address, block=3)
    try:
        watched = compiled(kernel, (9, 0, "a"))
    finally:
        for patch in patches:
            patch.stop()
    noted = re.findall(r"st\.global\.v2\.u32 \[to\], \{ (\d+), t \}", watched)
    assert {int(kind) for kind in noted} == set(range(1, len(timeline.KINDS) + 1))
    assert watched.count(f"mov.u64 to, {address};") == len(noted)
    assert "setp.eq.and.u32 p, t, 3, p" in watched  # of one block
    assert "%clock" not in before
    for instruction in ("wgmma.mma_async", "bar.sync", "wgmma.wait_group", "cp.async.bulk"):
        assert instruction in watched and instruction in before
    for instruction, kind in (("bar.sync", 2), ("wgmma.commit_group", 3), ("wgmma.wait_group", 4)):
        lines = [line for line in watched.splitlines() if instruction in line and "{" in line]
        assert lines and all(f"{{ {kind}, t }}" in line or "{ 6, t }" in line for line in lines)
    assert hopper.hx.__name__ == "flashref.cuda.ptx_hopper"  # and all is as it was

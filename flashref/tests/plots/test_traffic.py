"""Traffic in pictures is what `Memory` counted, and lies on the closed forms."""

import numpy as np
import pytest

from flashref import io_model, plots
from flashref.memory import Memory
from flashref.plots.traffic import (
    ALGORITHMS,
    ARRAYS,
    COUNTED,
    _last_misfit,
    _traffic,
    break_even,
    fit_in_words,
)


def test_traffic_markers_are_counted_and_lie_on_the_closed_form():
    picture = plots.traffic_by_block(n=24, d=4, blocks=(4, 7, 24))
    lines = {line.get_linestyle(): line for line in picture.figure.axes[0].lines}
    marked = [line for line in picture.figure.axes[0].lines if line.get_marker() in ("o", "s")]
    assert len(marked) == 2
    for line, closed_form in zip(marked, (io_model.fa1_traffic, io_model.fa2_traffic), strict=True):
        for block, moved in line.get_xydata():
            tiles = dict(block_q=int(block), block_k=int(block))
            assert moved == sum(closed_form(24, 24, 4, 4, **tiles))
    assert lines["-"] is not None
    assert f"{sum(io_model.standard_traffic(24, 24, 4, 4)) / 1e6:.2f}" in picture.alt


# What a block size costs


def panels(picture):
    """Return the axes of the traffic, of the need, and of the fast memory."""
    return picture.figure.axes


def marker(axes, *shapes):
    (found,) = [line for line in axes.lines if line.get_marker() in shapes]
    return found.get_xydata()[0].tolist()


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n, d, block_q, block_k", [(30, 4, 7, 11), (16, 8, 16, 4), (9, 3, 40, 2)])
def test_the_counted_point_and_the_curve_agree(algorithm, n, d, block_q, block_k):
    picture = plots.block_size_curves(n, d, 1000, block_q, block_k, algorithm)
    upper, lower, _ = panels(picture)
    chosen, tiles = ALGORITHMS[algorithm], dict(block_q=min(block_q, n), block_k=min(block_k, n))
    side = tiles[chosen.side]
    moved = sum(chosen.traffic(n, n, d, d, **tiles))
    assert marker(upper, "D") == [side, moved] == marker(upper, "o", "X")
    assert f"{moved:,} elements moved" in picture.alt
    assert f"Counted while it ran: {moved:,}." in picture.alt
    curve = dict(map(tuple, upper.lines[0].get_xydata()))
    assert max(curve) == n and curve[n] == _traffic(chosen, n, d, n)
    need = sum(chosen.tiles(*tiles.values(), d, d).values())
    assert marker(lower, "o", "X") == [side, need]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_side_alone_matters_and_its_slope_is_the_one_that_is_drawn(algorithm):
    chosen = ALGORITHMS[algorithm]
    (other,) = {"block_q", "block_k"} - {chosen.side}
    for side in (1, 3, 7, 20):
        known = _traffic(chosen, 20, 5, side)
        for free in (1, 4, 20):
            tiles = {chosen.side: side, other: free}
            assert sum(chosen.traffic(20, 20, 5, 5, **tiles)) == known
    n, d = 4096, 512  # large, so that what is left out is small
    many = _traffic(chosen, n, d, 2)
    assert many / (chosen.slope * n * n * d / 2) == pytest.approx(1, abs=0.01)


def test_the_setting_of_the_papers_figure_2():
    gigabytes = {64: "6.98", 128: "3.7", 256: "2.05", 512: "1.23"}
    for block_k, number in gigabytes.items():
        alt = plots.block_size_curves(1024, 64, 98_304, 64, block_k).alt
        assert f"{number} GB for 1024 heads in fp16" in alt
        assert ("it fits" in alt) == (block_k < 512)


def test_fit_and_rule_are_marked_where_they_are():
    picture = plots.block_size_curves(1024, 64, 51_200, 64, 200)
    upper, lower, _ = panels(picture)
    most = io_model.fitting_block(51_200, 64, 64, block_q=64)
    for axes in (upper, lower):
        (span,) = [patch for patch in axes.patches if patch.get_width() > 0]
        assert span.get_x() == most and span.get_x() + span.get_width() == 1024
    (rule,) = [line for line in upper.lines if line.get_linestyle() == "-."]
    assert rule.get_xdata() == [200, 200] and " rule: ⌈M/4d⌉ = 200 " in texts(upper)
    assert "does not fit" in texts(lower)
    rows = plots.block_size_curves(1024, 64, 51_200, 128, 128, "FA2 forward")
    assert " rule: min(⌈M/4d⌉, d) = 64 " in texts(panels(rows)[0])


def test_where_all_tiles_fit_nothing_is_shaded():
    upper, lower, _ = panels(plots.block_size_curves(64, 8, 10**6, 8, 8))
    assert not upper.patches and not lower.patches and "does not fit" not in texts(lower)


def test_fast_memory_is_filled_by_the_tiles_and_overflow_is_marked():
    fits, over = (plots.block_size_curves(1024, 64, M, 64, 100) for M in (51_200, 25_600))
    for picture, extra in ((fits, 1), (over, 2)):  # the frame, and what stands out of it
        bar = panels(picture)[2]
        sizes = io_model.forward_tiles(64, 100, 64, 64)
        parts = [p for p in bar.patches if p.get_width() == 1 and p.get_x() == -0.5]
        drawn = [part.get_height() for part in parts[: len(sizes)]]
        assert drawn == [sizes[name] for name in ARRAYS if name in sizes]
        frames = [p for p in bar.patches if not p.get_fill() or p.get_hatch() == "xx"]
        assert len(frames) == extra
    assert "S  6,400  no room" in texts(panels(over)[2])
    assert "S (6,400) does not" in over.alt and "it fits" in fits.alt
    assert marker(panels(over)[0], "X") == [100, 2_406_400]  # another shape, not only a colour


def test_arrays_differ_by_colour_or_hatch():
    for chosen in ALGORITHMS.values():
        names = chosen.tiles(2, 2, 2, 2)
        assert set(names) <= set(ARRAYS)
        assert len({ARRAYS[name] for name in names}) == len(names)


@pytest.mark.parametrize("on_chip, M, words", [
    ({"K": 1, "V": 2}, 3, "On chip 3 of M = 3: it fits."),
    ({"K": 1, "V": 2}, 2, "On chip 3 of M = 2: too many; K finds room, V (2) does not."),
    ({"K": 2, "V": 2, "S": 1}, 4,
     "On chip 5 of M = 4: too many; K and V find room, S (1) does not."),
    ({"K": 9, "V": 2}, 2, "On chip 11 of M = 2: too many; K (9) and V (2) do not."),
    ({"K": 1, "V": 1, "S": 7, "P": 7}, 3,
     "On chip 16 of M = 3: too many; K and V find room, S (7) and P (7) do not."),
])  # fmt: skip
def test_what_finds_no_room_is_named(on_chip, M, words):
    assert fit_in_words(on_chip, M) == words


def test_large_sizes_are_not_run_and_say_so():
    assert 1024 * 1024 * 64 <= COUNTED < 2048 * 2048 * 64
    picture = plots.block_size_curves(n=2048)
    assert "Counted" not in picture.alt
    assert not [line for line in panels(picture)[0].lines if line.get_marker() == "D"]
    assert "Counted" not in plots.block_size_curves(n=1024, block_q=8, block_k=8).alt


@pytest.mark.parametrize("values, message", [
    ({"n": 0}, "n=0"), ({"d": 0}, "d=0"), ({"sram_elements": 0}, "sram_elements=0"),
    ({"block_q": 0}, "block_q=0"), ({"block_k": -1}, "block_k=-1"),
    ({"algorithm": "FA4"}, "algorithm='FA4' must be one of FA1 forward, FA2 forward"),
])  # fmt: skip
def test_bad_input_is_one_sentence(values, message):
    with pytest.raises(ValueError, match=message):
        plots.block_size_curves(**values)


@pytest.mark.parametrize("call, message", [
    (lambda: plots.traffic_by_block(64, 4, ()), "blocks is empty"),
    (lambda: plots.traffic_by_block(64, 4, (8,)), r"blocks=\[8\]; give two sizes"),
    (lambda: plots.traffic_by_block(0), "n=0"),
    (lambda: plots.traffic_by_memory(64, 4, (0,)), "sizes=0"),
    (lambda: plots.traffic_by_memory(8, 64), "n=8 is too small for d=64"),
])  # fmt: skip
def test_curves_refuse_what_has_no_curve(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_two_sizes_are_a_curve():
    assert "as tiles grow from 8 to 16" in plots.traffic_by_block(64, 4, (16, 8)).alt


@pytest.mark.parametrize("n, d, M, block", [(1, 1, 1, 1), (2, 300, 5, 2), (8192, 1, 10**9, 8192)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extremes_can_be_drawn(n, d, M, block, algorithm):
    picture = plots.block_size_curves(n, d, M, block, block, algorithm)
    assert picture.png().startswith(b"\x89PNG") and "nan" not in picture.alt


# Against M: Theorem 2


def test_counts_against_M_lie_on_the_line_and_say_what_fits():
    picture = plots.traffic_by_memory(n=64, d=8, sizes=(64, 200, 4096))
    (axes,) = picture.figure.axes
    points = {line.get_xdata()[0]: line for line in axes.lines if line.get_marker() == "s"}
    assert sorted(points) == [64, 200, 4096]
    for M, line in points.items():
        block_q, block_k = io_model.block_sizes(M, 8)
        hbm = Memory()
        ALGORITHMS["FA1 forward"].run(
            *np.ones((3, 64, 8)), block_q=block_q, block_k=block_k, memory=hbm
        )
        assert line.get_ydata()[0] == hbm.loads + hbm.stores
        fits = sum(io_model.forward_tiles(block_q, block_k, 8, 8).values()) <= M
        assert (line.get_markerfacecolor() == "white") == (not fits)
        assert f"{hbm.loads + hbm.stores:,} at M = {M:,}{'' if fits else ' (the tiles'}" in (
            picture.alt
        )


def test_break_even_is_the_first_M_at_which_it_pays():
    for n, d in ((64, 8), (1024, 64), (300, 16)):
        M = break_even(n, d)
        standard = sum(io_model.standard_traffic(n, n, d, d))

        def moved(M, n=n, d=d):
            block_q, block_k = io_model.block_sizes(M, d)
            return sum(io_model.fa1_traffic(n, n, d, d, block_q=block_q, block_k=block_k))

        assert moved(M) <= standard < moved(M - 1)
    assert [round(break_even(8192, d) / d**2, 2) for d in (32, 64, 128)] == [3.13, 3.06, 3.03]


@pytest.mark.parametrize("d", [1, 2, 7, 64, 127])
def test_short_sequences_have_no_break_even(d):
    last = d // 2 + 1
    assert break_even(last + 1, d) <= 4 * d * (last + 1)
    with pytest.raises(ValueError, match=f"n={last} is too small for d={d}"):
        break_even(last, d)


@pytest.mark.parametrize("d, last", [(64, 33_855), (128, 133_247)])
def test_the_rules_tiles_always_fit_from_there_on(d, last):
    assert _last_misfit(d) == last

    def need(M):
        return sum(io_model.forward_tiles(*io_model.block_sizes(M, d), d, d).values())

    assert need(last) > last
    assert all(need(M) <= M for M in range(last + 1, last + 10**5, 7))


# What lesson 05 answers about its widget


def test_answers_of_lesson_05():
    def fa1(block_k):
        return _traffic(ALGORITHMS["FA1 forward"], 1024, 64, block_k)

    target = _traffic(ALGORITHMS["FA2 forward"], 1024, 64, 64)
    nearest = min(range(1, 1025), key=lambda block_k: abs(fa1(block_k) - target))
    assert (nearest, fa1(nearest), target) == (103, 2_205_696, 2_229_248)
    M = io_model.A100.sram_bytes // 2
    largest = {}
    for name, chosen in ALGORITHMS.items():
        block = io_model.fitting_block(M, 64, 64, chosen.tiles)
        largest[name] = block, _traffic(chosen, 1024, 64, block)
    assert largest == {
        "FA1 forward": (187, 1_402_880),
        "FA2 forward": (187, 918_528),
        "FA1 backward": (112, 3_745_792),
        "FA2 backward": (120, 2_837_504),
    }
    assert io_model.fitting_block(io_model.T4.sram_bytes // 2, 64, 64) == 93

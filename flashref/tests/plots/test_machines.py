"""Machines in pictures are those of `io_model`, and points lie where their intensity puts them."""

import numpy as np
import pytest

from flashref import io_model, plots
from flashref.memory import Memory
from flashref.plots.machines import CHIPS
from flashref.standard import standard_attention

A100 = io_model.A100


def texts(picture):
    figure = picture.figure
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [
        text.get_text() for text in figure.texts
    ]


# The pyramid


def test_the_pyramid_shows_the_papers_sizes_and_the_steps_between():
    picture = plots.memory_pyramid()
    shown = texts(picture)
    for part in ("20.7 MB", "19 TB/s", "40 GB", "1.5 TB/s", "over 1 TB", "12.8 GB/s"):
        assert part in shown and part in picture.alt, part
    assert "↓ 12.7× slower" in shown and "↓ 117× slower" in shown
    assert "12.7 times slower" in picture.alt and "117 times slower" in picture.alt


@pytest.mark.parametrize("machine", io_model.MACHINES, ids=lambda machine: machine.name)
def test_every_machine_has_its_pyramid_with_its_own_bandwidth(machine):
    picture = plots.memory_pyramid(machine)
    assert picture.png().startswith(b"\x89PNG")
    speed = f"{machine.bandwidth / 1e12:g} TB/s"
    assert speed.replace("0.32 TB", "320 GB") in texts(picture)
    assert ("slow memory (HBM)" in texts(picture)) == (machine is not io_model.T4)
    assert machine.sram_bytes < CHIPS[machine.name].sram_kb * 1024  # a program cannot use it all
    assert len({patch.get_hatch() for patch in picture.figure.axes[0].patches}) > 1


def test_levels_get_wider_downwards():
    levels = [np.ptp(p.get_xy()[:, 0]) for p in plots.memory_pyramid().figure.axes[0].patches]
    assert levels == sorted(levels) and len(set(levels)) == 3


def test_an_unknown_machine_is_refused_by_name():
    unknown = io_model.Machine("abacus", 1.0, 1.0, 1, 1)
    for call in (plots.memory_pyramid, plots.in_float32):
        with pytest.raises(ValueError, match=r"'abacus'; there are T4, A100 40 GB, H100 SXM, H200"):
            call(unknown)


def test_fp32_changes_the_peak_and_nothing_else():
    for machine in io_model.MACHINES:
        slow = plots.in_float32(machine)
        assert slow.peak_flops < machine.peak_flops / 7 and slow.dtype == "fp32"
        assert (slow.name, slow.bandwidth, slow.sram_bytes) == (
            machine.name, machine.bandwidth, machine.sram_bytes,
        )  # fmt: skip


# Intensities


def test_the_worked_numbers_of_lesson_00():
    basic = plots.basic_intensities()
    assert basic["y = a·x + b"] == 0.5 and basic["softmax of a row"] == 1.25
    assert basic["matrix product, n = 1024"] == pytest.approx(1024 / 3)
    found = list(plots.attention_intensities().values())
    np.testing.assert_allclose(found, [56.889, 30.118, 95.673, 146.122, 512], rtol=1e-4)


@pytest.mark.parametrize("n, d, size, machine", [
    (40, 8, 2, A100), (200, 16, 4, io_model.T4), (300, 64, 4, io_model.H200),
])  # fmt: skip
def test_intensity_is_flops_over_counted_bytes(n, d, size, machine):
    points = plots.attention_intensities(n, d, size, machine)
    q, k, v = np.zeros((3, n, d))
    hbm = Memory()
    standard_attention(q, k, v, memory=hbm)
    flops = 4 * n * n * d
    moved = size * (hbm.loads + hbm.stores)
    assert points["standard attention"] == pytest.approx(flops / moved)
    (name,) = (name for name in points if name.startswith("FlashAttention-2"))
    tile = int(name.split()[-1])
    need = sum(io_model.forward_tiles(tile, tile, d, d).values())
    larger = sum(io_model.forward_tiles(tile + 1, tile + 1, d, d).values())
    assert need <= machine.sram_bytes // size
    assert tile == n or larger > machine.sram_bytes // size
    assert all(x <= points["Q, K, V and O moved once"] for x in points.values())


@pytest.mark.parametrize("n", [1, 64, 1024, 8192])
def test_qk_never_exceeds_d_in_fp16(n):
    found = plots.attention_intensities(n, 64)["QKᵀ alone"]
    assert found == pytest.approx(n * 64 / (n + 2 * 64)) and found < 64


def test_a_head_too_wide_for_any_tile_is_refused():
    with pytest.raises(ValueError, match=r"no tile fits: d=100000, and the T4 has room for 32,768"):
        plots.attention_intensities(8, 100_000, 2, io_model.T4)


def test_what_lesson_00_answers_about_the_widget():
    def bound(size):
        for m in io_model.MACHINES:
            machine = m if size == 2 else plots.in_float32(m)
            points = plots.attention_intensities(4096, 64, size, m)
            flash = next(x for name, x in points.items() if "FlashAttention-2" in name)
            yield m.name, flash >= machine.ridge, points["standard attention"] >= machine.ridge

    assert [name for name, flash, _ in bound(2) if flash] == ["H200"]
    assert all(flash for _, flash, _ in bound(4))
    assert [name for name, _, standard in bound(4) if standard] == ["A100 40 GB", "H200"]
    ridges = [plots.in_float32(machine).ridge for machine in io_model.MACHINES]
    assert round(min(ridges)) == 13 and round(max(ridges)) == 25


# The roofline


def marks(picture):
    lines = picture.figure.axes[0].lines
    return [line for line in lines if line.get_marker() in ("o", "s")]


@pytest.mark.parametrize("machine", io_model.MACHINES, ids=lambda machine: machine.name)
def test_points_lie_on_the_roof_in_the_order_of_their_numbers(machine):
    points = plots.attention_intensities(512, 64, 2, machine)
    picture = plots.roofline(machine, points)
    places = [line.get_xydata()[0] for line in marks(picture)]
    assert [x for x, _ in places] == sorted(points.values())
    for x, y in places:
        assert y * 1e12 == pytest.approx(io_model.roofline(machine, x))
    (roof,) = [line for line in picture.figure.axes[0].lines if len(line.get_xdata()) == 3]
    assert roof.get_xydata()[1] == pytest.approx([machine.ridge, machine.peak_flops / 1e12])


def test_the_side_of_the_ridge_is_told_by_shape_and_word_too():
    picture = plots.roofline(A100, {"poor": 2.0, "rich": 1000.0, "edge": A100.ridge})
    shapes = [line.get_marker() for line in marks(picture)]
    assert shapes == ["o", "s", "s"]  # from the ridge on, arithmetic is the limit
    assert "1 poor: 2, memory-bound, 0.96 %;" in picture.alt
    assert "2 edge: 208, compute-bound, 100 %;" in picture.alt
    assert "3 rich: 1,000, compute-bound, 100 %." in picture.alt
    assert any("memory-bound, 0.96 %" in text for text in texts(picture))


def test_the_default_points_are_the_everyday_ones():
    alt = plots.roofline().alt
    for name in plots.basic_intensities():
        assert name in alt
    assert "ridge at 208 FLOPs per byte" in alt


def test_a_machine_on_paper_has_a_roof_too():
    paper = io_model.Machine("paper", 800.0, 100.0, 64, 1, "fp64")
    picture = plots.roofline(paper, {"it": 2.0})
    assert "ridge at 8 FLOPs per byte" in picture.alt and "1 it: 2, memory-bound" in picture.alt
    title = picture.figure.axes[0].get_title("left")
    assert title == "paper, fp64: 8e-10 TFLOP/s, 100 B/s"


@pytest.mark.parametrize("points, message", [
    ({}, "points is empty"), ({"nothing": 0.0}, r"points\['nothing'\] is 0.0"),
    ({"a": np.nan}, r"points\['a'\]=nan must be a finite number"), ([1], r"points=\[1\] must be"),
    ({f"{n}": 1.0 for n in range(9)}, "points holds 9 programs"),
])  # fmt: skip
def test_what_has_no_place_under_a_roof_is_refused(points, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plots.roofline(A100, points)


def test_any_point_stays_inside_the_picture():
    for x in (1e-3, 1.0, 1e6):
        axes = plots.roofline(A100, {"it": x}).figure.axes[0]
        (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        assert low < x < high and bottom < io_model.roofline(A100, x) / 1e12 < top


# Times


def test_bars_are_multiples_of_the_shortest_and_words_tell_no_time():
    picture = plots.relative_times({"a": {"x": 3.0, "y": 1.5, "z": 6.0}, "b": {"w": 7.0}}, "size")
    first, second = picture.figure.axes
    assert [bar.get_height() for bar in first.patches] == [2, 1, 4]
    assert [text.get_text() for text in first.texts] == ["2.0×", "1.0×", "4.0×"]
    assert [bar.get_height() for bar in second.patches] == [1]
    assert [bar.get_hatch() for bar in first.patches] == ["", "///", ""]
    assert not any(character.isdigit() for character in picture.alt)
    other = plots.relative_times({"a": {"x": 1.0, "y": 9.5, "z": 2.0}, "b": {"w": 1.0}}, "size")
    assert other.alt == picture.alt  # or the stored notebook would be stale at every run
    titled = plots.relative_times({"a": {"x": 1.0}}, title="On this machine")
    assert titled.figure.get_suptitle() == "On this machine"
    assert picture.figure.get_suptitle() == ""

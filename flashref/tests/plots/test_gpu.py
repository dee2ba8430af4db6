"""The ladder's pictures show the stored run, and the drawings of memory are what NumPy counts."""

import copy
import inspect
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from flashref import io_model, plots
from flashref.cuda import bench
from flashref.plots import gpu
from flashref.plots.picture import INK, ORANGE, RED, SKY

RESULTS = bench.stored()
N = 8192


def measured(kernel, d, dtype, n=N, causal=False):
    """Return the TFLOP/s of a forward run, straight from the file."""
    (speed,) = (
        run["tflops"]
        for run in RESULTS["runs"]
        if (run["kernel"], run["d"], run["dtype"], run["n"], run["causal"], run["pass"])
        == (kernel, d, dtype, n, causal, "forward")
    )
    return speed


def texts(axes):
    return [text.get_text() for text in axes.texts]


def squares(axes, color):
    """Return (left, top) of the rectangles of a colour."""
    return [p.get_xy() for p in axes.patches if to_rgb(p.get_facecolor()) == to_rgb(color)]


# measured


def test_the_newest_run_is_taken(monkeypatch, tmp_path):
    for date in ("2026-01-02", "2027-01-01", "2026-12-31"):
        path = tmp_path / "results" / f"{date[::-1]}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"date": "{date}"}}', encoding="utf-8")
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    assert bench.stored() == {"date": "2027-01-01"}


@pytest.mark.parametrize("panel, d", [(0, 64), (1, 128)])
def test_a_bar_is_as_long_as_its_kernel_is_fast(panel, d):
    figure = plots.ladder(RESULTS).figure
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    places = figure.axes[0].get_yticks()
    bars = {round(p.get_y() + p.get_height() / 2, 3): p for p in figure.axes[panel].patches}
    assert len(bars) == len(names) == 10
    for name, place in zip(names, places, strict=True):
        kernel, dtype = name.split(", fp")
        bar, speed = bars[round(place, 3)], measured(kernel, d, f"float{dtype}")
        assert bar.get_width() == speed
        assert f"{speed:.3g}" in texts(figure.axes[panel])
        assert bool(bar.get_hatch()) == (kernel in gpu.RUNGS)


def test_each_group_stands_under_its_own_roof():
    axes = plots.ladder(RESULTS).figure.axes[0]
    roofs = [line.get_segments()[0] for line in axes.collections]
    assert [roof[0][0] for roof in roofs] == [RESULTS["peaks"][p] for p in (gpu.FP32, gpu.FP16)]
    names = [label.get_text() for label in axes.get_yticklabels()]
    for name, place in zip(names, axes.get_yticks(), strict=True):
        under = [i for i, roof in enumerate(roofs) if roof[:, 1].min() < place < roof[:, 1].max()]
        assert under == [1 if name.endswith("fp16") else 0]


def test_the_ladder_is_told_in_words():
    alt = plots.ladder(RESULTS).alt
    for kernel, dtype in (("naive", "float32"), ("PyTorch cuDNN", "float16")):
        assert f"{kernel} {measured(kernel, 64, dtype):g}" in alt
    assert RESULTS["card"] in alt and RESULTS["date"] in alt


def test_a_length_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match=r"nothing at n=1000; it has \[512, 1024"):
        plots.ladder(RESULTS, n=1000)
    with pytest.raises(ValueError, match="the run has no naive at n=16384, d=64"):
        plots.gpu_roofline(RESULTS, n=16384)


def test_every_forward_run_is_a_point_of_its_curve():
    picture = plots.gpu_lengths(RESULTS)
    panels = iter(picture.figure.axes)
    drawn = 0
    for dtype, d, causal in itertools.product(("float16", "float32"), (64, 128), (False, True)):
        axes = next(panels)
        points = {
            (n, speed)
            for line in axes.lines
            for n, speed in zip(*line.get_data(), strict=True)
            if n >= 1  # the roof is drawn from 0 to 1
        }
        expected = {
            (run["n"], run["tflops"])
            for run in RESULTS["runs"]
            if (run["dtype"], run["d"], run["causal"], run["pass"]) == (dtype, d, causal, "forward")
        }
        assert expected <= points
        drawn += len(expected)
    forward = [run for run in RESULTS["runs"] if run["pass"] == "forward"]
    assert drawn == len(forward)


def test_lines_differ_by_more_than_their_colour():
    looks = {name: (marker, dashed) for name, (_, marker, dashed) in gpu.LINES.items()}
    assert len(set(looks.values())) == len(looks)


def test_a_kernel_without_a_colour_of_its_own_is_drawn_too():
    other = copy.deepcopy(RESULTS)
    for run in other["runs"]:
        run["kernel"] = run["kernel"].replace("PyTorch FLASH", "somebody's")
    picture = plots.gpu_lengths(other)
    keys = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "somebody's" in keys and "PyTorch FLASH" not in keys and "somebody's" in picture.alt


def test_a_run_of_one_length_can_be_drawn():
    short = {**RESULTS, "runs": [run for run in RESULTS["runs"] if run["n"] == 512]}
    assert "from 512 to 512" in plots.gpu_lengths(short).alt


def test_intensities_are_flops_over_what_the_loops_ask_for():
    """Counted by a loop over the blocks, where the closed form has a product."""
    n, d = 1024, 64
    found = plots.rung_intensities(n, d)
    for rung, rows, size in (("tiled", 64, 4), ("registers", 128, 4), ("tensor_core", 128, 2)):
        moved = 0
        for _ in range(0, n, rows):
            moved += size * rows * d + 2 * size * n * d + size * rows * d + 4 * rows  # Q, K V, O, L
        assert found[rung] == pytest.approx(4 * n * n * d / moved)
    passes = {"scores": 1, "maximum": 1, "exp": 2, "division": 2, "product": 1}  # over S
    moved = 4 * (sum(passes.values()) * n * n + 4 * n * d)
    assert found["naive"] == pytest.approx(io_model.forward_flops(n, n, d, d) / moved)


def test_the_blocks_of_the_intensities_are_those_of_the_rungs(monkeypatch):
    pytest.importorskip("numba", reason="the GPU kernels are Numba's")
    from flashref.cuda import registers, tensor_core, tiled

    asked = []
    traffic = io_model.fa2_traffic

    def spy(*args, block_q, block_k):
        asked.append(block_q)
        return traffic(*args, block_q=block_q, block_k=block_k)

    monkeypatch.setattr(io_model, "fa2_traffic", spy)
    for d in (64, 128):
        plots.rung_intensities(1024, d)
        blocks = [tiled.blocks(d), registers.BLOCKS[d][0], tensor_core.BLOCKS[d][0]]
        assert asked[-3:] == [block[0] for block in blocks]


def test_points_of_the_roofline_lie_where_they_were_measured():
    picture = plots.gpu_roofline(RESULTS)
    axes = picture.figure.axes[0]
    points = [tuple(line.get_data()) for line in axes.lines if len(line.get_xdata()) == 1]
    expected = [
        ([intensity], [measured(rung, 64, "float16" if rung == "tensor_core" else "float32")])
        for rung, intensity in plots.rung_intensities(N, 64).items()
    ]
    assert [(list(x), list(y)) for x, y in points] == expected
    for line in axes.collections:  # from the point up to its roof, and never above it
        (x, low), (_, high) = line.get_segments()[0]
        assert low < high == pytest.approx(min(RESULTS["peaks"][gpu.COPY] * x, high))
    assert "tensor_core with 126 FLOPs per byte reached 337 of 513 TFLOP/s" in picture.alt


# who reads where


def test_lines_and_banks_against_a_count_by_hand():
    threads = range(32)
    for step in (0, 1, 2, 8, 31, 32, 33, 64, 65):
        addresses = [4 * step * t for t in threads]
        lines, banks = set(), [set() for _ in range(32)]
        for address in addresses:
            lines.add(address // 128)
            banks[address // 4 % 32].add(address)
        assert plots.lines_touched(addresses) == len(lines)
        assert plots.bank_rows(addresses) == max(len(bank) for bank in banks)


def test_threads_that_want_one_word_share_a_turn():
    assert plots.bank_rows([0, 0, 4, 4]) == 1
    assert plots.bank_rows([0, 128, 0, 128]) == 2
    assert plots.bank_rows([0, 1, 2, 3]) == 1  # bytes of one word


def test_coalescing_draws_what_is_read_and_what_is_sent():
    t = np.arange(32)
    picture = plots.coalescing({"rows": 4 * 64 * t, "pairs": 8 * t})
    rows, pairs = picture.figure.axes
    assert len(squares(rows, INK)) == 32 and {x for x, _ in squares(rows, INK)} == {0}
    assert len(squares(rows, SKY)) == 32  # a piece of 32 bytes of each line
    assert [x for x, _ in squares(pairs, INK)] == list(range(0, 32, 2)) * 2
    assert len(squares(pairs, SKY)) == 8
    assert "rows: 32 lines; 128 of 1,024 bytes used" in picture.alt
    assert "pairs: 2 lines; 128 of 256 bytes used" in picture.alt


def test_the_default_patterns_are_those_of_naive():
    alt = plots.coalescing().alt
    assert "one number: 1 line; 4 of 32" in alt
    assert "neighbouring numbers: 1 line; 128 of 128" in alt
    assert "rows of 64: 32 lines" in alt


@pytest.mark.parametrize("rows, columns, threads, turns", [(4, 16, 32, 2), (2, 8, 16, 1)])
def test_tile_owners_are_those_of_the_package_loop(rows, columns, threads, turns):
    picture = plots.tile_owners(rows, columns, threads)
    (axes,) = picture.figure.axes
    owner = {}
    for t in range(threads):
        for e in range(t, rows * columns, threads):  # as in tiled.tile_loader
            owner[e % columns + 0.5, e // columns + 0.5] = str(t)
    assert {text.get_position(): text.get_text() for text in axes.texts} == owner
    assert f"in {turns} turn" in picture.alt


@pytest.mark.parametrize("chunks", [8, 16])
def test_a_swizzled_row_keeps_its_chunks_and_a_column_meets_every_bank(chunks):
    places = plots.swizzle_places(True, chunks)
    assert (np.sort(places, axis=1) == np.arange(chunks)).all()
    r, bytes_of_row = np.arange(8), 16 * chunks
    for chunk in range(chunks):
        start = bytes_of_row * r + 16 * places[:, chunk]
        assert plots.bank_rows(start[:, None] + 4 * np.arange(4)) == 1
        plain = bytes_of_row * r + 16 * chunk
        assert plots.bank_rows(plain[:, None] + 4 * np.arange(4)) == 8


def test_the_swizzle_is_the_kernels():
    """The expressions of the kernels for where a copy goes and where ldmatrix looks."""
    pytest.importorskip("numba", reason="the GPU kernels are Numba's")
    from flashref.cuda import fragments

    copied, toggle, read = "(chunk ^ (r & 7)) << 4", "(odd ^ (row & 7)) << 4", "(n * 32) ^ toggle"
    source = inspect.getsource(fragments.tile_functions)
    assert copied in source and toggle in source and read in source
    places = plots.swizzle_places(True, 8)
    for row, chunk in np.ndindex(8, 8):
        names = {"chunk": chunk, "r": row, "row": row, "n": chunk // 2, "odd": chunk % 2}
        assert eval(copied, names) == 16 * places[row, chunk]
        assert eval(read, names | {"toggle": eval(toggle, names)}) == 16 * places[row, chunk]


@pytest.mark.parametrize("chunk", [0, 2, 7])
def test_the_swizzle_picture_marks_one_chunk_of_each_row(chunk):
    picture = plots.swizzle(chunk)
    plain, swizzled = picture.figure.axes
    assert sorted(squares(plain, ORANGE)) == [(chunk, r) for r in range(8)]
    assert sorted(squares(swizzled, ORANGE)) == sorted((chunk ^ r, r) for r in range(8))
    counts = [text.get_text() for text in plain.texts if text.get_color() == RED]
    assert counts == ["8"] and not [t for t in swizzled.texts if t.get_color() == RED]
    assert f"chunk {chunk} of the eight rows takes 8 of them" in picture.alt
    assert f"chunk {chunk} of the eight rows takes 1 of them" in picture.alt


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="chunk=8 is not one of the 8 chunks"):
        plots.swizzle(8)
    with pytest.raises(ValueError, match="chunks=4 must be 8 or 16"):
        plots.swizzle_places(chunks=4)

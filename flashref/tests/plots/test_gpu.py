"""The ladder's pictures show the stored run, and the drawings of memory are what NumPy counts."""

import copy
import inspect
import itertools
import json

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from flashref import flash3, io_model, plots
from flashref.cuda import results
from flashref.plots import gpu
from flashref.plots.picture import INK, ORANGE, RED, SKY
from flashref.tests.conftest import checkout

TOP = checkout()
RESULTS = results.stored()
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


def dtype_of(rung):
    return "float16" if rung in ("tensor_core", "hopper") else "float32"


def is_step(run):
    return run["kernel"].startswith("hopper up to")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def squares(axes, color):
    """Return (left, top) of the rectangles of a colour."""
    return [p.get_xy() for p in axes.patches if to_rgb(p.get_facecolor()) == to_rgb(color)]


# measured


def test_the_newest_run_is_taken(monkeypatch, tmp_path):
    for date in ("2026-01-02", "2027-01-01", "2026-12-31"):
        path = tmp_path / f"{date[::-1]}.json"
        path.write_text(f'{{"date": "{date}"}}', encoding="utf-8")
    monkeypatch.setattr(results, "__file__", str(tmp_path / "__init__.py"))
    assert results.stored() == {"date": "2027-01-01"}


@pytest.mark.parametrize("panel, d", [(0, 64), (1, 128)])
def test_a_mark_stands_where_its_kernel_was_measured(panel, d):
    figure = plots.ladder(RESULTS).figure
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    places = figure.axes[0].get_yticks()
    marks = [line for line in figure.axes[panel].lines if line.get_marker() != "None"]
    marks = {round(line.get_ydata()[0], 3): line for line in marks}
    found = {
        f"{run['kernel']}, fp{run['dtype'][-2:]}"
        for run in RESULTS["runs"]
        if run["n"] == 8192 and run["pass"] == "forward" and "up to" not in run["kernel"]
    }
    assert set(names) == found and len(marks) == len(names) == len(found)
    for name, place in zip(names, places, strict=True):
        kernel, dtype = name.split(", fp")
        mark, speed = marks[round(place, 3)], measured(kernel, d, f"float{dtype}")
        assert list(mark.get_xdata()) == [speed]
        assert f"{speed:.3g}" in texts(figure.axes[panel])
        assert (mark.get_marker() == "D") == (kernel in gpu.RUNGS)


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
            and not is_step(run)
        }
        assert expected <= points
        drawn += len(expected)
    forward = [run for run in RESULTS["runs"] if run["pass"] == "forward"]
    assert drawn == len([run for run in forward if not is_step(run)])
    assert "up to" not in picture.alt


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
    blocks = {"tiled": (64, 4), "registers": (128, 4), "tensor_core": (128, 2), "hopper": (192, 2)}
    assert set(found) == {"naive", *blocks} == set(gpu.RUNGS)
    for rung, (most, size) in blocks.items():
        moved = 0
        for first in range(0, n, most):
            rows = min(most, n - first)
            moved += size * rows * d + 2 * size * n * d + size * rows * d + 4 * rows  # Q, K V, O, L
        assert found[rung] == pytest.approx(4 * n * n * d / moved)
    passes = {"scores": 1, "maximum": 1, "exp": 2, "division": 2, "product": 1}  # over S
    moved = 4 * (sum(passes.values()) * n * n + 4 * n * d)
    assert found["naive"] == pytest.approx(io_model.forward_flops(n, n, d, d) / moved)


def test_the_blocks_of_the_intensities_are_those_of_the_rungs(monkeypatch):
    pytest.importorskip("numba", reason="the GPU kernels are Numba's")
    from flashref.cuda import hopper, registers, tensor_core, tiled

    asked = []
    traffic = io_model.fa2_traffic

    def spy(*args, block_q, block_k):
        asked.append(block_q)
        return traffic(*args, block_q=block_q, block_k=block_k)

    monkeypatch.setattr(io_model, "fa2_traffic", spy)
    for d in (64, 128):
        plots.rung_intensities(1024, d)
        blocks = [tiled.blocks(d), registers.BLOCKS[d][0], tensor_core.BLOCKS[d][0]]
        rows = [block[0] for block in blocks] + [64 * hopper.BEST[d].warpgroups]
        assert asked[-4:] == rows


def test_points_of_the_roofline_lie_where_they_were_measured():
    picture = plots.gpu_roofline(RESULTS)
    axes = picture.figure.axes[0]
    points = [tuple(line.get_data()) for line in axes.lines if len(line.get_xdata()) == 1]
    expected = [
        ([intensity], [measured(rung, 64, dtype_of(rung))])
        for rung, intensity in plots.rung_intensities(N, 64).items()
    ]
    assert [(list(x), list(y)) for x, y in points] == expected
    for line in axes.collections:  # from the point up to its roof, and never above it
        (x, low), (_, high) = line.get_segments()[0]
        assert low < high == pytest.approx(min(RESULTS["peaks"][gpu.COPY] * x, high))
    for rung, intensity in plots.rung_intensities(N, 64).items():
        speed = measured(rung, 64, dtype_of(rung))
        assert f"{rung} with {intensity:.3g} FLOPs per byte reached {speed:.3g} of" in picture.alt


STEPS = ("wgmma", "registers", "TMA", "overlap", "turns", "persistent")


def test_the_steps_are_those_of_the_kernel():
    pytest.importorskip("numba", reason="the GPU kernels are Numba's")
    from flashref.cuda import hopper

    assert STEPS == gpu.STEPS == tuple(hopper.steps(64)) == tuple(hopper.STEPS)


def test_a_bar_of_the_steps_is_as_long_as_its_step_is_fast():
    picture = plots.hopper_steps(RESULTS)
    rows = ["tensor_core", *(f"hopper up to {step}" for step in STEPS), "PyTorch cuDNN"]
    settings = itertools.product((64, 128), (False, True))
    for axes, (d, causal) in zip(picture.figure.axes, settings, strict=True):
        speeds = [measured(row, d, "float16", causal=causal) for row in rows]
        assert [bar.get_width() for bar in axes.patches] == speeds
        assert texts(axes) == [f"{speed:.0f}" for speed in speeds]
        assert [bool(bar.get_hatch()) for bar in axes.patches] == 7 * [True] + [False]
        cudnn, roof = (line.get_xdata()[0] for line in axes.lines)
        assert (cudnn, roof) == (speeds[-1], RESULTS["peaks"][gpu.FP16])
        assert f"overlap {speeds[4]:.0f}, turns {speeds[5]:.0f}" in picture.alt
    names = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert [name.removeprefix("+ ") for name in names] == ["tensor_core", *STEPS, "cuDNN"]


def test_a_run_without_steps_is_refused():
    short = {**RESULTS, "runs": [run for run in RESULTS["runs"] if not is_step(run)]}
    with pytest.raises(ValueError, match="no 'hopper up to wgmma' at n=8192, d=64: bench gpu --st"):
        plots.hopper_steps(short)


@pytest.mark.skipif(TOP is None, reason="the notebooks are not here: this is an installed copy")
def test_lesson_12_says_what_the_stored_run_says():
    lesson = TOP / "notebooks" / "12_gpu_kernels.ipynb"
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for name in ("ladder", "steps", "timeline"):
        picture = gpu.ladder if name == "ladder" else getattr(gpu, f"hopper_{name}")
        assert f"![{picture(RESULTS).alt}](../figures/gpu_{name}.png)" in text
    fp16, copy, fp32 = RESULTS["peaks"].values()
    costs = {name: f"{cost:.0f}" for name, cost in RESULTS["call_us"].items()}
    naive, ours, best = (
        measured(rung, 64, dtype_of(rung)) for rung in ("naive", "tensor_core", "hopper")
    )
    for said in (
        f"Measured on this card: {fp32:g} TFLOP/s of fp32 arithmetic, {copy:g} TB/s of memory",
        f"A large matrix product reaches {fp16:g} TFLOP/s",
        f"by the model, and {naive:.2f} measured",
        f"{ours:.0f} is less than half of {fp16:g}",
        f"From `naive` to `hopper` it is a factor of {best / naive:.0f} at $d = 64$",
        f"call of `tensor_core` cost the host {costs['tensor_core']} µs",
        f"PyTorch's call costs the host {costs['PyTorch']} µs, ours {costs['tensor_core']} for "
        f"`tensor_core` and {costs['hopper']} for `hopper`",
    ):
        assert said in text, said


# a timetable

KINDS = ["asks for its turn", "has its turn", "started products", "has S", "asks for O", "has O"]
FIRST = [(1, 0), (2, 30), (2, 50), (3, 60), (4, 200), (5, 210), (0, 240), (1, 300), (3, 350)]
SECOND = [(4, 20), (5, 35), (0, 60), (1, 90), (3, 170), (4, 330)]
TIMELINE = {"d": 128, "n": 64, "kinds": KINDS, "slower": 1.25, "warpgroups": [FIRST, SECOND]}
WHOLE = {
    (1, "QK", 0, 60), (1, "softmax", 60, 200), (1, "PV", 60, 210), (1, "correction", 210, 240),
    (1, "wait", 240, 300), (1, "QK", 300, 350), (2, "correction", 35, 60), (2, "wait", 60, 90),
    (2, "QK", 90, 170), (2, "softmax", 170, 330),
}  # fmt: skip
PARTS = {(2, "softmax", 0, 20), (2, "PV", 0, 35), (2, "PV", 170, 350)}


def test_tasks_are_what_lies_between_two_moments():
    found = plots.measured_tasks(TIMELINE)
    assert len(found) == len(WHOLE) and {tuple(task) for task in found} == WHOLE


@pytest.mark.parametrize(
    "lost, less, more",
    [
        ((5, 210), {"PV 60 210", "correction 210 240"}, {"? 200 240"}),
        ((0, 240), {"correction 210 240", "wait 240 300"}, {"? 210 300"}),
        ((1, 300), {"wait 240 300", "QK 300 350"}, {"? 240 350"}),
        ((4, 200), {"softmax 60 200", "PV 60 210"}, {"? 60 210"}),
        ((2, 30), set(), set()),
    ],
)
def test_a_lost_moment_leaves_a_gap_and_nothing_wrong(lost, less, more):
    def told(moments):
        found = plots.measured_tasks(TIMELINE | {"warpgroups": [moments]})
        return {f"{task.what} {task.start} {task.end}" for task in found}

    assert told([moment for moment in FIRST if moment != lost]) == told(FIRST) - less | more


def test_a_tile_of_keys_lasts_from_a_moment_to_the_next_of_its_kind():
    assert plots.clocks_per_tile(TIMELINE) == 300  # in the middle of 290, 300, 310
    moments = [(1, 0), (0, 5), (1, 100), (1, 180), (1, 330)]
    both = {"warpgroups": [moments, [(1, 7), (2, 17), (2, 27)]]}
    assert plots.clocks_per_tile(TIMELINE | both) == 100  # in the middle of 80, 100, 150


def test_both_timetables_are_drawn():
    picture = plots.hopper_timeline({**RESULTS, "timelines": [TIMELINE]})
    above, below = picture.figure.axes
    for axes, who in ((above, "warpgroup"), (below, "consumer")):
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == [f"{who} {n} {part}" for n in (1, 2) for part in ("products", "softmax")]
    drawn = set()
    for bar in above.patches:
        y, start, width = bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()
        number, part = divmod(round(y), 2)
        drawn.add((number + 1, ("products", "softmax")[part], start, start + width))
    assert drawn == {(n, gpu.TASKS[what][0], start, end) for n, what, start, end in WHOLE | PARTS}
    assert above.get_xlim() == (0, 350)
    assert below.get_xlim() == pytest.approx((0, 8 * 350 / 300))  # a tile as wide as above
    assert "25 % slower" in above.get_title(loc="left") and "25 % slower" in picture.alt
    told = (
        "300 clocks for each tile",
        "has S 63",
        "softmax takes 150",
        "150 clocks after S",
        "P for 28",
    )
    for words in (*told, "waits 45"):
        assert words in picture.alt, picture.alt


def test_of_what_a_lost_moment_ends_the_known_part_is_drawn():
    moments = [(1, 0), (2, 20), (3, 60), (4, 200), (0, 240), (2, 310), (2, 330), (3, 350), (0, 360)]
    found = {tuple(task)[1:] for task in gpu._drawn(TIMELINE | {"warpgroups": [moments]})}
    assert found == {
        ("QK", 0, 60), ("softmax", 60, 200), ("PV", 60, 200), ("?", 200, 240), ("?", 240, 310),
        ("QK", 310, 350), ("?", 350, 360),
    }  # fmt: skip
    picture = plots.hopper_timeline({"card": "", "date": "", "timelines": [TIMELINE]})
    names = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "a moment is lost" not in names
    picture = plots.hopper_timeline(
        {"card": "", "date": "", "timelines": [TIMELINE | {"warpgroups": [moments, FIRST]}]}
    )
    assert picture.figure.legends[0].get_texts()[-1].get_text() == "a moment is lost"


def test_the_simulated_timetable_is_that_of_lesson_11():
    tiles, who, span = gpu._simulated(2)
    assert who == "consumer" and span == 16
    found = flash3.schedule("ping-pong, two-stage", blocks=6, load=0, buffers=6)
    first = next(x.start for x in found.intervals if (x.what, x.block) == ("QK", 1))
    expected = {
        (int(x.who[-1]), x.what, x.start - first, x.end - first)
        for x in found.intervals
        if x.what != "load" and x.end > first and x.start < first + span
    }
    assert {tuple(task) for task in tiles} == expected


def test_the_stored_timetable_can_be_drawn_and_another_is_refused():
    (timeline,) = RESULTS["timelines"]
    clocks = plots.clocks_per_tile(timeline)
    assert f"{clocks:.0f} clocks for each tile of keys" in plots.hopper_timeline(RESULTS).alt
    with pytest.raises(ValueError, match=r"no timeline for d=96; it has \[128\]"):
        plots.hopper_timeline(RESULTS, d=96)


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

"""The trace is what the algorithms did, checked against their results; pictures show the trace."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from flashref import io_model, plots, standard_attention, standard_attention_backward
from flashref.block_sparse import butterfly_pattern
from flashref.memory import Memory
from flashref.plots import tiles

Q = [[2, 2, 2, 2], [2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 2]]
K = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 2, 3, 4]]
V = [[1, 2], [3, 4], [5, 6], [7, 8]]
DO = [[1, 0], [0, 1], [1, 1], [1, -1]]
CLOSE = {"rtol": 1e-12, "atol": 1e-13}
# n_q, n_k, B_r, B_c: exact, ragged both ways, one tile, single rows, queries that see nothing
SHAPES = [(4, 4, 2, 2), (7, 5, 3, 2), (3, 8, 4, 8), (5, 4, 1, 1), (9, 4, 2, 3)]
every_run = pytest.mark.parametrize(
    "algorithm, backward, causal, shape",
    list(itertools.product(("fa1", "fa2"), (False, True), (False, True, "top-left"), SHAPES)),
)


def arrays(n_q, n_k, d=3, d_v=2):
    rng = np.random.default_rng(n_q * 100 + n_k)
    shapes = (n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v)
    return [rng.standard_normal(shape) for shape in shapes]


def seen(n_q, n_k, causal):
    """Return which pairs are seen; shares no line with flashref."""
    shift = n_k - n_q if causal is True else 0
    i, j = np.indices((n_q, n_k))
    return j <= i + shift if causal else np.full((n_q, n_k), True)


def run(shape, algorithm, backward, causal=False, **options):
    n_q, n_k, block_q, block_k = shape
    q, k, v, do = arrays(n_q, n_k)
    options |= dict(block_q=block_q, block_k=block_k, causal=causal)
    trace = plots.tile_trace(
        q, k, v, algorithm=algorithm, backward=backward, do=do if backward else None, **options
    )
    return (q, k, v, do), trace


# The trace


@every_run
def test_every_tile_is_there_once_in_the_order_of_the_loops(algorithm, backward, causal, shape):
    n_q, n_k, block_q, block_k = shape
    _, trace = run(shape, algorithm, backward, causal)
    t_r, t_c = math.ceil(n_q / block_q), math.ceil(n_k / block_k)
    order = [(i, j) for j in range(t_c) for i in range(t_r)]
    if algorithm == "fa2" and not backward:
        order = [(i, j) for i in range(t_r) for j in range(t_c)]
    assert [step.tile for step in trace] == [None, *order]
    assert [step.number for step in trace] == list(range(len(order) + 1))
    for step in trace[1:]:
        pairs = seen(n_q, n_k, causal)[step.rows, step.cols]
        assert step.skipped == (not pairs.any()) == (not step.on_chip)
        assert step.rows.start == step.tile[0] * block_q and step.cols.stop <= n_k


@every_run
def test_totals_are_what_memory_counts_and_the_closed_forms_foretell(
    algorithm, backward, causal, shape
):
    n_q, n_k, block_q, block_k = shape
    (q, k, v, do), trace = run(shape, algorithm, backward, causal)
    options, hbm = dict(block_q=block_q, block_k=block_k, causal=causal), Memory()
    forward, back = tiles.ALGORITHMS[algorithm]
    if backward:
        o, lse = forward(q, k, v, return_lse=True, **options)
        back(do, q, k, v, o, lse, memory=hbm, **options)
    else:
        forward(q, k, v, memory=hbm, **options)
    assert trace[-1].total_loads == hbm.loads_by_array
    assert trace[-1].total_stores == hbm.stores_by_array
    assert max(sum(step.on_chip.values()) for step in trace) == hbm.peak_sram
    closed_form = getattr(io_model, f"{algorithm}{'_backward' * backward}_traffic")
    assert (trace[-1].loaded, trace[-1].stored) == closed_form(n_q, n_k, 3, 2, **options)
    for before, step in itertools.pairwise(trace):
        for total, moved in (("total_loads", "loads"), ("total_stores", "stores")):
            last, now = getattr(before, total), getattr(step, total)
            moved = getattr(step, moved)
            assert now == {name: last.get(name, 0) + moved.get(name, 0) for name in now}


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fa1_leaves_exact_attention_over_the_keys_so_far(shape, causal):
    """The induction of Theorem 1, tile by tile."""
    (q, k, v, _), trace = run(shape, "fa1", False, causal)
    n_q, n_k = shape[:2]
    seen_so_far = np.zeros((n_q, n_k), bool)
    for step in trace:
        if step.tile:
            seen_so_far[step.rows, step.cols] = seen(n_q, n_k, causal)[step.rows, step.cols]
        o, lse = standard_attention(q, k, v, mask=seen_so_far, return_lse=True)
        s = np.where(seen_so_far, q @ k.T / math.sqrt(3), -np.inf)
        np.testing.assert_allclose(step.slow["O"], o, **CLOSE)
        np.testing.assert_array_equal(np.isneginf(step.slow["m"]), ~seen_so_far.any(axis=1))
        np.testing.assert_allclose(step.slow["m"], s.max(axis=1), **CLOSE)
        some = seen_so_far.any(axis=1)
        log_l = np.log(step.slow["l"][some])
        np.testing.assert_allclose((step.slow["m"][some] + log_l), lse[some], **CLOSE)
        assert not step.chip


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fa2_carries_m_l_and_the_undivided_o(shape, causal):
    (q, k, v, _), trace = run(shape, "fa2", False, causal)
    n_q, n_k = shape[:2]
    o, lse = standard_attention(q, k, v, causal=causal, return_lse=True)
    written = np.zeros(n_q, bool)
    for step in trace[1:]:
        if step.stores:
            assert step.stores.keys() == {"O", "L"}
            written[step.rows] = True
        np.testing.assert_allclose(step.slow["O"][written], o[written], **CLOSE)
        np.testing.assert_allclose(step.slow["L"][written], lse[written], **CLOSE)
        assert np.isnan(step.slow["O"][~written]).all() and np.isnan(step.slow["L"][~written]).all()
        if step.chip:
            pairs = seen(n_q, n_k, causal)[step.rows, : step.cols.stop]
            s = np.where(pairs, q[step.rows] @ k[: step.cols.stop].T / math.sqrt(3), -np.inf)
            m = s.max(axis=1)
            p = np.where(pairs, np.exp(s - np.where(np.isneginf(m), 0, m)[:, None]), 0)
            np.testing.assert_allclose(step.chip["m"], m, **CLOSE)
            np.testing.assert_allclose(step.chip["l"], p.sum(axis=1), **CLOSE)
            np.testing.assert_allclose(step.chip["O"], p @ v[: step.cols.stop], **CLOSE)
    assert written.all()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_gathers_the_gradients_tile_by_tile(algorithm, causal, shape):
    (q, k, v, do), trace = run(shape, algorithm, True, causal)
    n_q, n_k = shape[:2]
    o, lse = standard_attention(q, k, v, causal=causal, return_lse=True)
    p = np.where(seen(n_q, n_k, causal), np.exp(q @ k.T / math.sqrt(3) - lse[:, None]), 0)
    ds = p * (do @ v.T - (do * o).sum(axis=1)[:, None])
    done = np.zeros((n_q, n_k))
    for step in trace[1:]:
        done[step.rows, step.cols] = 1
        dq = (ds * done) @ k / math.sqrt(3)
        np.testing.assert_allclose(step.slow["dQ"], dq, **CLOSE)
        if step.chip:
            dk, dv = (ds * done).T @ q / math.sqrt(3), (p * done).T @ do
            np.testing.assert_allclose(step.chip["dK"], dk[step.cols], **CLOSE)
            np.testing.assert_allclose(step.chip["dV"], dv[step.cols], **CLOSE)
    wanted = standard_attention_backward(do, q, k, v, causal=causal)
    for name, grad in zip(("dQ", "dK", "dV"), wanted, strict=True):
        np.testing.assert_allclose(trace[-1].slow[name], grad, **CLOSE)


def test_the_running_example_has_the_lessons_numbers():
    trace = plots.tile_trace(Q, K, V)
    np.testing.assert_allclose(trace[2].slow["l"], [1.367879, 2, 1.367879, 2], atol=5e-7)
    np.testing.assert_allclose(trace[4].slow["l"], [1.001371, 4, 1.871094, 1.054947], atol=5e-7)
    trace = plots.tile_trace(Q, K, V, algorithm="fa2")
    np.testing.assert_allclose(trace[2].chip["O"], [[7.005689, 8.007060], [16, 20]], atol=5e-7)
    np.testing.assert_allclose(trace[2].chip["l"], [1.001371, 4], atol=5e-7)


def test_block_sparse_passes_over_absent_tiles_in_their_place():
    q, k, v, _ = arrays(8, 8)
    mask = butterfly_pattern(4)
    mask[:, 2] = False  # a block of keys that nobody sees is loaded all the same
    trace = plots.tile_trace(q, k, v, algorithm="block_sparse", block_mask=mask)
    assert [step.tile for step in trace[1:] if not step.skipped] == [
        (i, j) for j in range(4) for i in range(4) if mask[i, j]
    ]
    lonely = [step for step in trace[1:] if step.tile[1] == 2]
    assert lonely[0].skipped and lonely[0].loads == {"K": 6, "V": 4}
    assert all(step.skipped and not step.loads for step in lonely[1:])
    closed_form = io_model.block_sparse_traffic(8, 8, 3, 2, block_mask=mask, block_q=2, block_k=2)
    assert (trace[-1].loaded, trace[-1].stored) == closed_form


def test_queries_that_see_nothing_are_written_all_the_same():
    _, trace = run((9, 4, 2, 3), "fa2", False, causal=True)
    first = trace[1]
    assert first.skipped and first.loads == {"Q": 6} and first.stores == {"O": 4, "L": 2}
    np.testing.assert_array_equal(first.slow["O"][:2], 0)


@pytest.mark.parametrize("backward", [False, True])
def test_what_stays_belongs_to_the_outer_loop(backward):
    for algorithm in ("fa1", "fa2"):
        _, trace = run((7, 5, 3, 2), algorithm, backward)
        outer = 0 if algorithm == "fa2" and not backward else 1
        for before, step in itertools.pairwise(trace[1:]):
            if step.tile[outer] == before.tile[outer]:
                assert not set(step.stays) & set(step.loads)
                assert set(step.stays) == set(before.stays)


def test_arrays_and_steps_do_not_change_behind_a_readers_back():
    trace = plots.tile_trace(Q, K, V)
    early = trace[1].slow["O"].copy()
    plots.tile_trace(Q, K, V)
    np.testing.assert_array_equal(trace[1].slow["O"], early)
    assert not np.array_equal(trace[-1].slow["O"], early)
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace[1].number = 7


@pytest.mark.parametrize("options, message", [
    ({"algorithm": "fa3"}, "algorithm='fa3' is not known; give one of 'fa1', 'fa2'"),
    ({"block_mask": [[True]]}, "algorithm='fa1' takes no block_mask"),
    ({"algorithm": "block_sparse"}, "block_mask=None must be a boolean array"),
    ({"algorithm": "block_sparse", "block_mask": [[True]]}, r"block_mask"),
    ({"block_q": 0}, "block_q=0 must be at least 1"),
    ({"sram_elements": 20}, "sram_elements=20 are available"),
    ({"causal": "left"}, "causal='left'"),
    ({"step": 5}, "step=5 is not there; the steps go from 0 to 4"),
    ({"step": 1.5}, "step=1.5 is not there; the steps go from 0 to 4"),
])  # fmt: skip
def test_bad_arguments_become_one_clear_sentence(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plots.tile_steps(Q, K, V, **options)


def test_only_one_head_is_drawn():
    with pytest.raises(ValueError, match=r"q has shape \(1, 4, 4\); give one head"):
        plots.tile_trace(np.ones((1, 4, 4)), K, V)


# The pictures


def texts(picture):
    (axes,) = picture.figure.axes
    return [text.get_text() for text in axes.texts]


def bold(picture):
    (axes,) = picture.figure.axes
    return [text.get_text() for text in axes.texts if text.get_weight() == "bold"]


def boxes(picture, look):
    """Return the boxes (x, y, width, height) that are drawn in a look."""
    (axes,) = picture.figure.axes
    found = []
    for collection in axes.collections:
        same = (
            isinstance(collection, PolyCollection)
            and collection.get_hatch() == look.get("hatch")
            and collection.get_linewidths()[0] == look["linewidth"]
        )
        if same:
            for path in collection.get_paths():
                (x, y), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                found.append((x, y, right - x, bottom - y))
    return found


@pytest.mark.parametrize("step", range(5))
def test_a_step_shows_its_tile_its_moves_and_the_totals(step):
    trace = plots.tile_trace(Q, K, V)
    picture = plots.tile_steps(Q, K, V, step=step, trace=trace)
    now, shown = trace[step], texts(picture)
    assert step == 0 or str(step) in bold(picture)
    assert f"{now.loaded:,}" in bold(picture) and f"{now.stored:,}" in bold(picture)
    assert f"{sum(now.loads.values())} in, {sum(now.stores.values())} out" in shown
    for value in now.slow["l"]:
        assert (f"{value:.4f}" if value else "0") in shown
    tile = [box for box in boxes(picture, tiles.CURRENT) if box[1] < 400]  # below: the legend
    assert len(tile) == (step > 0)


def test_the_tile_stands_at_its_rows_and_columns():
    trace = plots.tile_trace(Q, K, V)
    places = {}
    for step in trace[1:]:
        picture = plots.tile_steps(Q, K, V, step=step.number, trace=trace)
        (places[step.tile],) = (b for b in boxes(picture, tiles.CURRENT) if b[1] < 400)
    assert places[0, 0][0] == places[1, 0][0] < places[0, 1][0]  # a block of keys is a column
    assert places[0, 0][1] == places[0, 1][1] < places[1, 0][1]


def test_the_looks_of_tiles_and_bands_differ_without_colour():
    looks = [tiles.DONE, tiles.CURRENT, tiles.SKIPPED, tiles.TO_COME]  # skipped: crossed out too
    said = [(look.get("hatch"), look["linewidth"], look.get("linestyle")) for look in looks]
    assert len({said[0], said[1], said[3]}) == 3
    picture = plots.tile_steps(Q, K, V, causal=True, step=1)
    crosses = [line for line in picture.figure.axes[0].lines if np.isnan(line.get_xdata()).any()]
    assert len(crosses) == 2  # the skipped tile's and the legend's
    hatches = {look["hatch"] for look in (tiles.STAYS, tiles.PASSES, tiles.MADE)}
    assert len(hatches) == 3


@pytest.mark.parametrize("limit", [None, 36, 64])
def test_the_bar_of_the_chip_is_to_scale(limit):
    picture = plots.tile_steps(Q, K, V, sram_elements=limit, step=2)
    looks = (tiles.STAYS, tiles.PASSES, tiles.MADE)
    bars = [b for look in looks for b in boxes(picture, look) if b[1] == 366]
    assert len(bars) == 7  # K, V; Q, O, l, m; S
    np.testing.assert_allclose(sum(b[2] for b in bars), 824 * 32 / (limit or 32))
    assert bars[0][2] == pytest.approx(2 * bars[1][2])  # K_j holds twice as much as V_j
    wanted = f"On chip at this tile: 32 elements{f' of M = {limit}' if limit else ''}"
    assert any(text.startswith(wanted) for text in texts(picture))


def test_large_examples_become_heat_maps():
    q, k, v, do = arrays(24, 24, 4, 4)
    maps = {}
    for algorithm, backward in itertools.product(("fa1", "fa2"), (False, True)):
        what = {"algorithm": algorithm, "backward": backward, "do": do, "step": 9}
        picture = plots.tile_steps(q, k, v, block_q=4, block_k=4, **what)
        maps[algorithm, backward] = len(picture.figure.axes[0].images)
    assert maps == {("fa1", False): 3, ("fa1", True): 3, ("fa2", False): 5, ("fa2", True): 3}


def test_a_heat_map_of_what_is_not_written_yet_is_hatched():
    q, k, v, _ = arrays(24, 24, 4, 4)
    look = {"algorithm": "fa2", "block_q": 4, "block_k": 4}
    before, after = (plots.tile_steps(q, k, v, step=step, **look) for step in (0, 36))
    hatched = tiles.SLOW | {"facecolor": tiles.PALE, "hatch": "////"}
    assert boxes(before, hatched) and boxes(before, hatched) == boxes(after, hatched)
    assert not before.figure.axes[0].images and after.figure.axes[0].images  # above the hatching


def test_what_is_too_narrow_for_its_name_on_chip_has_none():
    q, k, v, _ = arrays(24, 24, 64, 64)
    shown = texts(plots.tile_steps(q, k, v, algorithm="fa2", block_q=1, block_k=24, step=1))
    first = next(i for i, text in enumerate(shown) if text.startswith("On chip at this tile"))
    assert shown[first + 1 : first + 5] == ["Q", "O", "K 1,536", "V 1,536"]  # neither m nor l nor S


def test_words_tell_what_is_drawn():
    picture = plots.tile_steps(Q, K, V, sram_elements=40, step=3)
    assert picture.alt.startswith(
        "FlashAttention-1, forward: tile 3 of 4, i = 1, j = 2 (B_r = 2, B_c = 2). Queries 0 to 1 "
        "against keys 2 to 3. K, V stay as long as j = 2; Q, O, l, m pass by. "
        "Read K 8, V 4, Q 8, O 4, l 2, m 2; written O 4, l 2, m 2; on chip 32 of M = 40. "
    )
    assert "So far 72 elements read and 40 written." in picture.alt
    assert "m = [10, 1], l = [1.001371, 4]" in picture.alt
    skipped = plots.tile_steps(Q, K, V, causal=True, step=3)
    assert "tile 3 of 4, i = 1, j = 2, skipped" in skipped.alt and "nothing moves" in skipped.alt
    fa2 = plots.tile_steps(Q, K, V, algorithm="fa2", step=1).alt
    assert "Now m = [2, 1], l = [1.367879, 2], Õ = [[3.367879, 4.735759], [4, 6]]." in fa2
    back = plots.tile_steps(Q, K, V, backward=True, do=DO, step=4).alt
    assert "dV = [[0.214884, 0.42925], [2.480993, −0.163468]]" in back
    assert not re.search(r"−0\b(?!\.)", back)  # the sign of a rounding error
    start = plots.tile_steps(Q, K, V, algorithm="fa2", step=0)
    assert "before the first tile" in start.alt and "Nothing has moved yet" in start.alt


def test_fa1_stands_beside_fa2_after_as_many_tiles():
    both = {name: plots.tile_trace(Q, K, V, algorithm=name) for name in ("fa1", "fa2")}
    for step in range(5):
        picture = plots.tile_compare(Q, K, V, step=step)
        for trace in both.values():
            now, end = trace[step], trace[-1]
            assert f"So far {now.loaded} elements read and {now.stored} written" in picture.alt
            done = f"{now.loaded + now.stored} of {end.loaded + end.stored} moved"
            assert done in texts(picture)


def test_compared_bars_are_to_scale():
    picture = plots.tile_compare(Q, K, V, step=4)
    frames = [b for b in boxes(picture, tiles.TO_COME) if 330 < b[1] < 400]
    bars = [b for b in boxes(picture, tiles.READ) if 330 < b[1] < 400]
    totals = [io_model.fa1_traffic, io_model.fa2_traffic]
    totals = [total(4, 4, 4, 2, block_q=2, block_k=2) for total in totals]
    assert frames[0][2] / frames[1][2] == pytest.approx(sum(totals[0]) / sum(totals[1]))
    assert bars[0][2] / bars[1][2] == pytest.approx(totals[0][0] / totals[1][0])


@pytest.mark.parametrize("algorithm, words", [
    ("fa1", ["outer loop runs over blocks of keys", "Q is read T_c = 3 times and written never",
             "K is read once", "O is read T_c = 3 times and written 1 + T_c = 4 times"]),
    ("fa2", ["outer loop runs over blocks of queries", "Q is read once",
             "K is read T_r = 5 times", "O is read never and written once"]),
])  # fmt: skip
def test_tiling_tells_how_often_arrays_travel(algorithm, words):
    picture = plots.tiling(algorithm)
    assert all(text in picture.alt for text in words)
    loops = [text for text in texts(picture) if "loop:" in text]
    assert sorted(loop.split()[0] for loop in loops) == ["inner", "outer"]
    outer = next(loop for loop in loops if loop.startswith("outer"))
    assert ("j =" in outer) == (algorithm == "fa1")


def every_picture():
    small, large = (Q, K, V), arrays(32, 32, 4, 4)[:3]
    for algorithm, backward in itertools.product(("fa1", "fa2"), (False, True)):
        name = f"{algorithm}-{'backward' if backward else 'forward'}"
        options = {"algorithm": algorithm, "backward": backward}
        yield f"{name}-small", plots.tile_steps, small, options | {"step": 3, "causal": True}
        yield (
            f"{name}-single",
            plots.tile_steps,
            small,
            options | {"step": 9, "block_q": 1, "block_k": 1},
        )
        yield f"{name}-large", plots.tile_steps, large, options | {"step": 100}
    for step in (136, 200):
        options = {"step": step, "backward": True, "causal": True}
        yield f"compare-{step}", plots.tile_compare, large, options
    single = {"block_q": 1, "block_k": 1}
    yield "compare-single", plots.tile_compare, large, single | {"step": 999, "backward": True}
    yield "fa1", plots.tiling, (), {"algorithm": "fa1"}
    yield "fa2", plots.tiling, (), {"algorithm": "fa2"}


PICTURES = {name: rest for name, *rest in every_picture()}


@pytest.mark.parametrize("draw, args, options", PICTURES.values(), ids=PICTURES)
def test_no_letter_leaves_the_page_or_runs_into_another(draw, args, options):
    picture = draw(*args, **options)
    picture.png()
    (axes,) = picture.figure.axes
    page = picture.figure.bbox
    places = [(t.get_text(), t.get_window_extent()) for t in axes.texts if t.get_text()]
    for text, box in places:
        inside = box.x0 >= -1 and box.x1 <= page.x1 + 1 and box.y0 >= -1 and box.y1 <= page.y1 + 1
        assert inside, f"{text!r} is outside"
    for (a, first), (b, second) in itertools.combinations(places, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert wide < 3 or high < 6, f"{a!r} and {b!r} overlap"

"""Tiles in pictures are those of `scores`, and their traffic is what `Memory` counts."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from flashref import (
    Memory,
    block_sparse_attention,
    flash_attention_1,
    flash_attention_2,
    io_model,
    plots,
)
from flashref.block_sparse import (
    butterfly_pattern,
    global_window_pattern,
    local_pattern,
    random_pattern,
    strided_pattern,
)
from flashref.plots.masks import LOOKS, PATTERNS
from flashref.scores import EMPTY, FULL, PARTIAL
from flashref.tests import oracle

PAIRS, TILES, COSTS = 0, 1, 2  # the panels of mask_tiles


def random_tiles(t):
    return np.random.default_rng(t).random((t, t)) < 0.4


MASKS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (3, 0)},
    {"window": (None, 2), "causal": True},
    {"pattern": butterfly_pattern},
    {"pattern": lambda t: global_window_pattern(t, 1, 1), "causal": True},
    {"pattern": random_tiles},
    {"pattern": lambda t: np.zeros((t, t), bool)},
]
SIZES = [(16, 16, 4, 4), (8, 8, 2, 4), (13, 7, 3, 2), (5, 12, 4, 5), (3, 3, 8, 8), (1, 9, 1, 2)]


def seen_pairs(n_q, n_k, block_q, block_k, causal=False, window=None, pattern=None):
    """Return the element mask of the oracle, and the tiles that are there."""
    T_r, T_c = -(-n_q // block_q), -(-n_k // block_k)
    tiles = np.ones((T_r, T_c), bool) if pattern is None else pattern(max(T_r, T_c))[:T_r, :T_c]
    rule = dict(causal=causal, window=window, block_q=block_q, block_k=block_k, block_mask=tiles)
    mask = oracle.seen_pairs((), n_q, n_k, **rule)
    return mask, tiles


def hatches_of(artist):
    return {artist.get_hatch()} - {None} if hasattr(artist, "get_hatch") else set()


def hatches(axes):
    return set().union(*(hatches_of(artist) for artist in axes.get_children()))


def drawn_tiles(axes):
    """Return where in a square of unit tiles the hatched ones lie."""
    (patch,) = [artist for artist in axes.get_children() if hatches_of(artist)]
    corners = patch.get_path().vertices.reshape(-1, 5, 2)[:, 0].astype(int)
    tiles = np.zeros((round(axes.get_ylim()[0]), round(axes.get_xlim()[1])), bool)
    tiles[corners[:, 1], corners[:, 0]] = True
    return tiles


def numbers(text):
    """Return the numbers of a text, commas and all."""
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("rule", MASKS)
@pytest.mark.parametrize("n_q, n_k, block_q, block_k", SIZES)
def test_counts_are_those_of_the_definition(n_q, n_k, block_q, block_k, rule):
    seen, _ = seen_pairs(n_q, n_k, block_q, block_k, **rule)
    picture = plots.mask_tiles(n_q, n_k, block_q=block_q, block_k=block_k, **rule)
    kinds = [
        tile.sum() and (FULL if tile.all() else PARTIAL)
        for rows in np.split(seen, range(block_q, n_q, block_q))
        for tile in np.split(rows, range(block_k, n_k, block_k), axis=1)
    ]
    full, partial = kinds.count(FULL), kinds.count(PARTIAL)
    said = picture.alt.split(": ", 1)[1]
    assert numbers(said.split(". ")[1]) == [seen.sum(), seen.size]
    computed, tiles, *rest = numbers(said.split(". ")[2])
    assert (computed, tiles) == (full + partial, len(kinds))
    assert rest[:3] == [full, partial, len(kinds) - full - partial]
    assert rest[3] == pytest.approx((full + partial) / len(kinds), rel=1e-3)
    blind = (~seen.any(axis=1)).sum()
    quer = re.search(r"([\d,]+) quer(?:y|ies) sees? no key", picture.alt)
    assert (int(quer[1]) if quer else 0) == blind
    assert picture.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("rule", MASKS)
@pytest.mark.parametrize("n_q, n_k, block_q, block_k", SIZES)
def test_traffic_is_what_memory_counts(n_q, n_k, block_q, block_k, rule):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 4)) for n in (n_q, n_k, n_k))
    blocks = dict(block_q=block_q, block_k=block_k)
    options = {name: value for name, value in rule.items() if name != "pattern"}
    with_mask, whole, none = Memory(), Memory(), Memory()
    if "pattern" in rule:
        _, tiles = seen_pairs(n_q, n_k, block_q, block_k, **rule)
        block_sparse_attention(q, k, v, tiles, **blocks, **options, memory=with_mask)
        flash_attention_1(q, k, v, **blocks, memory=whole)
        block_sparse_attention(q, k, v, np.zeros_like(tiles), **blocks, memory=none)
    else:
        flash_attention_2(q, k, v, **blocks, **options, memory=with_mask)
        flash_attention_2(q, k, v, **blocks, memory=whole)
        flash_attention_2(q, k[:0], v[:0], **blocks, memory=none)
    picture = plots.mask_tiles(n_q, n_k, d=4, **blocks, **rule)
    moved, dense, floor = (hbm.loads + hbm.stores for hbm in (with_mask, whole, none))
    loops = "Algorithm 5" if "pattern" in rule else "FlashAttention-2"
    said = f"{loops} moves {moved:,} elements instead of {dense:,} (d = 4)"
    assert said in picture.alt
    lengths = [bar.get_width() for bar in picture.figure.axes[COSTS].patches]
    assert lengths == [floor, dense - floor, floor, moved - floor]
    words = " ".join(text.get_text() for text in picture.figure.axes[COSTS].texts)
    assert f"{floor:,}, which is {floor / dense:.1%}" in words
    assert (f"saved {1 - moved / dense:.1%}" if moved < dense else "saved nothing") in words


def test_the_tiles_of_lesson_09():
    picture = plots.mask_tiles(8, block_q=2, block_k=4, causal=True, d=4)
    axes = picture.figure.axes[TILES]
    letters = {}
    for line in axes.lines:
        if line.get_marker().startswith("$"):
            for x, y in zip(*line.get_data(), strict=True):
                letters[int(y) // 2, int(x) // 4] = line.get_marker()[-3]
    rows = ["".join(letters[i, j] for j in (0, 1)) for i in range(4)]
    assert rows == ["PE", "PE", "FP", "FP"]
    digits = sum(len(line.get_xdata()) for line in picture.figure.axes[PAIRS].lines)
    assert digits == 64  # a 1 or a 0 in each pair


def test_digits_of_the_pairs_are_the_element_mask():
    axes = plots.mask_tiles(2, 5, block_q=1, block_k=1, causal=True).figure.axes[PAIRS]
    drawn = np.zeros((2, 5), int)
    for line in axes.lines:
        j, i = np.array(line.get_data(), int)
        drawn[i, j] = int(line.get_marker().strip("$"))
    assert drawn.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_lesson_10s_numbers_in_tiles_of_two():
    for pattern, moved in ((butterfly_pattern, 496), (local_pattern, 432)):
        picture = plots.mask_tiles(8, block_q=2, block_k=2, pattern=pattern, d=4)
        assert f"moves {moved} elements instead of 624" in picture.alt


def test_an_array_and_a_callable_are_the_same_pattern():
    one = plots.mask_tiles(9, 5, block_q=2, block_k=2, pattern=butterfly_pattern)
    other = plots.mask_tiles(9, 5, block_q=2, block_k=2, pattern=butterfly_pattern(5)[:, :3])
    assert one.alt == other.alt and one.png() == other.png()


def test_kinds_differ_by_hatch_and_letter_and_grey_not_only_by_colour():
    letters, names, looks = zip(*LOOKS.values(), strict=True)
    assert len(set(letters)) == len(set(names)) == 3
    assert len({look.get("hatch") for look in looks}) == 3
    picture = plots.mask_tiles(16, block_q=4, block_k=4, causal=True)
    assert {"///", "..."} <= hatches(picture.figure.axes[TILES])
    (legend,) = picture.figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "F: full",
        "P: partial",
        "E: empty, skipped",
    ]


def test_tiles_lie_where_they_belong():
    picture = plots.mask_tiles(64, block_q=8, block_k=16, causal=True)
    picture.png()
    image = np.asarray(picture.figure.canvas.buffer_rgba())[..., :3].astype(int)
    axes = picture.figure.axes[TILES]
    for row, col, kind in ((0, 0, PARTIAL), (7, 0, FULL), (0, 3, EMPTY), (7, 3, PARTIAL)):
        # near a corner of the tile: no letter there; the hatch leaves most of it free
        corner = axes.transData.transform(
            [[16 * col + 1, 8 * row + 1], [16 * col + 4, 8 * row + 3]]
        )
        (x0, y0), (x1, y1) = corner.astype(int)
        part = image[len(image) - y0 : len(image) - y1, x0:x1].reshape(-1, 3)
        want = 255 * np.array(to_rgb(LOOKS[kind][2]["facecolor"]))
        assert np.median(abs(part - want).max(axis=1)) < 3, (row, col)


@pytest.mark.parametrize("n, block", [(256, 1), (1024, 1), (1024, 3), (300, 7), (1, 1), (64, 5000)])
def test_any_size_can_be_drawn(n, block):
    picture = plots.mask_tiles(n, block_q=block, block_k=block, causal=True)
    assert picture.png().startswith(b"\x89PNG")


def test_what_is_too_small_for_shapes_is_still_drawn_by_kind():
    picture = plots.mask_tiles(512, block_q=1, block_k=1, causal=True)
    (image,) = picture.figure.axes[TILES].images
    colors = image.get_array()
    assert colors.shape[:2] == (512, 512)
    for at, kind in (((0, 0), FULL), ((0, 1), EMPTY), ((511, 0), FULL)):
        np.testing.assert_allclose(colors[at][:3], to_rgb(LOOKS[kind][2]["facecolor"]))


@pytest.mark.parametrize("change, message", [
    (dict(n_q=0), "n_q=0"),
    (dict(n_q=1025), "n_q=1025 .* at most 1,024"),
    (dict(block_q=0), "block_q=0"),
    (dict(block_k=-2), "block_k=-2"),
    (dict(d=0), "d=0"),
    (dict(causal="bottom"), "causal='bottom'"),
    (dict(window=(1, -1)), r"window=\(1, -1\)"),
    (dict(pattern=lambda t: True), r"the pattern for t=2 has shape \(\); it must be \(2, 2\)"),
    (dict(pattern=np.ones((2, 2))), "pattern has dtype float64"),
    (dict(pattern=np.ones((3, 3), bool)), r"block_mask has shape \(3, 3\).*\(2, 2\)"),
])  # fmt: skip
def test_bad_input_is_one_sentence(change, message):
    arguments = dict(n_q=8, block_q=4, block_k=4) | change
    with pytest.raises((TypeError, ValueError), match=message):
        plots.mask_tiles(**arguments)


# The patterns side by side


def test_patterns_are_those_of_the_package_with_their_s():
    picture = plots.block_patterns(16)
    masks = [local_pattern(16), strided_pattern(16, 4), butterfly_pattern(16),
             global_window_pattern(16), random_pattern(16, 2, 0)]  # fmt: skip
    assert len(picture.figure.axes) == len(masks) == len(PATTERNS)
    for axes, (name, make), mask in zip(picture.figure.axes, PATTERNS.items(), masks, strict=True):
        assert np.array_equal(make(16), mask)
        np.testing.assert_array_equal(drawn_tiles(axes), mask)
        title = axes.get_title("left")
        assert title.startswith(name) and f"{mask.sum()} of 256 tiles" in title
        assert f"{mask.sum()} (s = {mask.mean():.4g})" in picture.alt
    assert picture.png() == plots.block_patterns(16).png()  # byte-stable, as figures must be


def test_own_patterns_can_be_drawn_and_too_many_are_refused():
    picture = plots.block_patterns(4, {"all": lambda t: np.ones((t, t), bool)})
    assert "all 16 (s = 1)" in picture.alt
    with pytest.raises(ValueError, match="7 patterns"):
        plots.block_patterns(4, {str(i): local_pattern for i in range(7)})


# Traffic against s


def test_markers_are_counted_and_lie_on_the_line_above_the_floor():
    n, d, block = 64, 8, 4
    picture = plots.traffic_by_s(n, d, block)
    line, proportional, _, markers = picture.figure.axes[0].lines
    sizes = dict(block_q=block, block_k=block)
    nothing = np.zeros((16, 16), bool)
    floor = sum(io_model.block_sparse_traffic(n, n, d, d, block_mask=nothing, **sizes))
    whole = sum(io_model.fa1_traffic(n, n, d, d, **sizes))
    points = markers.get_xydata()
    assert len(points) == 8 and (1.0, whole) in [tuple(point) for point in points]
    for s, moved in points:
        assert moved == pytest.approx(floor + s * (whole - floor), rel=1e-12)
        assert moved >= proportional.get_ydata()[-1] * s
    np.testing.assert_allclose(line.get_ydata(), floor + line.get_xdata() * (whole - floor))
    assert f"floor of {floor:,}" in picture.alt and f"all tiles {whole:,} at s = 1" in picture.alt
    butterfly = butterfly_pattern(16)
    moved = sum(io_model.block_sparse_traffic(n, n, d, d, block_mask=butterfly, **sizes))
    assert f"butterfly {moved:,} at s = {butterfly.mean():.4g}" in picture.alt


def test_a_tail_is_refused():
    with pytest.raises(ValueError, match="n=10 must be a multiple of block=4"):
        plots.traffic_by_s(10, 4, 4)


# The mass of real attention


def test_kept_mass_is_the_sum_over_the_pattern():
    mass = np.arange(1.0, 17).reshape(4, 4)
    mass /= mass.sum()
    pattern = butterfly_pattern(4)
    picture = plots.tile_mass({"one": mass, "two": mass.T}, pattern)
    kept = f"kept {mass[pattern].sum():.0%}"
    one, two = picture.figure.axes[:2]
    assert one.get_title("left").endswith(kept) and kept.replace("kept", "keeps") in picture.alt
    np.testing.assert_allclose(one.images[0].get_array(), np.log2(np.maximum(mass * 16, 2**-6)))
    np.testing.assert_allclose(two.images[0].get_array(), one.images[0].get_array().T)
    assert (
        f"the heaviest tile, query block 3 and key block 3, has {16 / 136 * 16:.1f}" in picture.alt
    )
    (hatched,) = [patch for patch in one.get_children() if hatches_of(patch)]
    assert len(hatched.get_path().vertices) == 5 * (~pattern).sum()


def test_without_a_pattern_nothing_is_kept_or_hatched():
    picture = plots.tile_mass({"one": np.full((2, 3), 1 / 6)})
    assert "keep" not in picture.alt and "atch" not in picture.alt
    assert not hatches(picture.figure.axes[0])
    with pytest.raises(ValueError, match="masses is empty"):
        plots.tile_mass({})
    with pytest.raises(ValueError, match="one holds nan"):
        plots.tile_mass({"one": np.full((2, 3), np.nan)})
    with pytest.raises(ValueError, match=r"pattern has shape \(2, 2\); one has \(2, 3\)"):
        plots.tile_mass({"one": np.full((2, 3), 1 / 6)}, np.eye(2, dtype=bool))


def test_lists_are_patterns_too():
    by_list = plots.mask_tiles(8, block_q=4, block_k=4, pattern=[[True, False], [True, True]])
    assert "3 of 4 tiles are computed" in by_list.alt


def test_a_pattern_without_tiles_lies_on_the_floor():
    picture = plots.traffic_by_s(64, 4, 16, {"none": lambda t: np.zeros((t, t), bool)})
    assert "none 896 at s = 0" in picture.alt

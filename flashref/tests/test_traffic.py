"""Slow-memory traffic and fast-memory need: measured, in closed form, and by hand, all three equal.

The numbers t and u (rows, and columns, of all visited tiles) are found here pair by pair, so that a
wrong idea of which tiles are empty cannot hide in the package's own closed forms.
"""

import inspect
import re

import numpy as np
import pytest

import flashref
from flashref import Memory, io_model
from flashref.tests.rungs import Rung, rungs

pytestmark = pytest.mark.filterwarnings("error")

FA1, FA2, SPARSE = "flash_attention_1", "flash_attention_2", "block_sparse_attention"
STANDARD = "standard_attention"
CLOSED = {  # algorithm: forward and backward of io_model
    STANDARD: (io_model.standard_traffic, io_model.standard_backward_traffic),
    FA1: (io_model.fa1_traffic, io_model.fa1_backward_traffic),
    FA2: (io_model.fa2_traffic, io_model.fa2_backward_traffic),
    SPARSE: (io_model.block_sparse_traffic, io_model.block_sparse_backward_traffic),
}
every_algorithm = pytest.mark.parametrize("name", CLOSED)
tiled_algorithms = pytest.mark.parametrize("name", [FA1, FA2, SPARSE])


def draw(n_q, n_k, d, d_v, lead=(), h_q=None, h_kv=None, seed=0):
    """Return normal q, k, v, do."""
    rng = np.random.default_rng(seed)
    lead_q, lead_kv = ((*lead, h_q), (*lead, h_kv)) if h_q else (lead, lead)
    shapes = [(*lead_q, n_q, d), (*lead_kv, n_k, d), (*lead_kv, n_k, d_v), (*lead_q, n_q, d_v)]
    return [rng.standard_normal(shape) for shape in shapes]


def rung_of(name, block_q=4, block_k=5):
    """Return the algorithm with these blocks."""
    return Rung(name, () if name == STANDARD else (block_q, block_k), flashref)


def measure(name, n_q, n_k, d, d_v, block_q=4, block_k=5, **options):
    """Return ((loads, stores) forward, (loads, stores) backward) of a real run on one head."""
    q, k, v, do = draw(n_q, n_k, d, d_v)
    rung, there, back = rung_of(name, block_q, block_k), Memory(), Memory()
    o, lse = rung.forward(q, k, v, memory=there, **options)
    rung.backward(do, q, k, v, o, lse, memory=back, **options)
    return (there.loads, there.stores), (back.loads, back.stores)


def closed(name, n_q, n_k, d, d_v, block_q=4, block_k=5, **options):
    """Return what io_model says of the same."""
    if name != STANDARD:
        options |= {"block_q": block_q, "block_k": block_k}
    if name == SPARSE:
        options.setdefault("block_mask", np.ones((-(-n_q // block_q), -(-n_k // block_k)), bool))
    return tuple(form(n_q, n_k, d, d_v, **options) for form in CLOSED[name])


def by_hand(name, n_q, n_k, d, d_v, t, u):
    """Return ((loads, stores) forward, (loads, stores) backward), written out once more."""
    if name == STANDARD:
        s = n_q * n_k
        there = ((n_q + n_k) * d + 2 * s + n_k * d_v, 2 * s + n_q * d_v)
        back = (5 * s + n_q * (d + 2 * d_v) + n_k * (d + d_v), 2 * s + n_q * d + n_k * (d + d_v))
    elif name == FA2:
        there = (n_q * d + u * (d + d_v), n_q * (d_v + 1))
        loads = 2 * n_q * d_v + n_k * (d + d_v) + t * (2 * d + d_v + 2)
        back = (loads, n_q * (d + 1) + t * d + n_k * (d + d_v))
    else:
        there = (n_k * (d + d_v) + t * (d + d_v + 2), (n_q + t) * (d_v + 2))
        loads = n_k * (d + d_v) + t * (2 * d + 2 * d_v + 1)
        back = (loads, (n_q + t) * d + 2 * n_k * (d + d_v))
    return there, back


def seen_pairs(n_q, n_k, block_q, block_k, causal, window, block_mask, mask=None):
    """Return which pairs are seen, one at a time."""
    off = 0 if causal == "top-left" else n_k - n_q
    left, right = window or (None, None)
    pairs = np.zeros((n_q, n_k), bool)
    for i in range(n_q):
        for j in range(n_k):
            pairs[i, j] = (
                not (causal and j > i + off)
                and not (left is not None and j < i + off - left)
                and not (right is not None and j > i + off + right)
                and (block_mask is None or block_mask[i // block_q][j // block_k])
                and (mask is None or mask[i, j])
            )
    return pairs


def tiles_of(pairs, block_q, block_k):
    """Return (rows, columns) of each tile in which some pair is seen."""
    n_q, n_k = pairs.shape
    return [
        (min(block_q, n_q - i), min(block_k, n_k - j))
        for i in range(0, n_q, block_q)
        for j in range(0, n_k, block_k)
        if pairs[i : i + block_q, j : j + block_k].any()
    ]


# Tables -------------------------------------------------------------------------------------------

DIAGONAL = np.eye(4, dtype=bool)
FOUR = (64, 64, 16, 16)
N8, G = (8, 8, 4, 4), (1024, 1024, 64, 64)
TABLE = [  # algorithm, sizes, options: forward, backward (None: not given)
    (STANDARD, FOUR, {}, (11264, 9216), (25600, 11264)),
    (FA1, FOUR, {"block_q": 16, "block_k": 32}, (6400, 3456), (10368, 7168)),
    (FA2, FOUR, {"block_q": 16, "block_k": 32}, (9216, 1088), (10496, 5184)),
    (STANDARD, (13, 17, 8, 5), {}, (767, 507), (1560, 767)),
    (FA1, (13, 17, 8, 5), {"block_q": 4, "block_k": 5}, (1001, 455), (1625, 962)),
    (FA2, (13, 17, 8, 5), {"block_q": 4, "block_k": 5}, (988, 78), (1547, 754)),
    (FA1, FOUR, {"block_q": 16, "block_k": 16, "causal": True}, (7488, 4032), (12448, 7680)),
    (FA2, FOUR, {"block_q": 16, "block_k": 16, "causal": True}, (6144, 1088), (12096, 5696)),
    (
        SPARSE,
        FOUR,
        {"block_q": 16, "block_k": 16, "block_mask": DIAGONAL},
        (4224, 2304),
        (6208, 6144),
    ),
    # the tiny setting of the lessons
    (STANDARD, N8, {}, (224, 160), (480, 224)),
    (FA1, N8, {"block_q": 2, "block_k": 4}, (224, 144), (336, 224)),
    (FA2, N8, {"block_q": 2, "block_k": 4}, (288, 40), (352, 168)),
    (FA1, N8, {"block_q": 4, "block_k": 2}, (384, 240), None),
    (FA2, N8, {"block_q": 4, "block_k": 2}, (160, 40), None),
]


@pytest.mark.parametrize(("name", "sizes", "options", "there", "back"), TABLE)
def test_table(name, sizes, options, there, back):
    for got in (measure(name, *sizes, **options), closed(name, *sizes, **options)):
        assert got[0] == there
        assert back is None or got[1] == back


TOTALS = [  # algorithm, sizes, options: loads + stores forward; backward
    (FA1, N8, {"block_q": 8, "block_k": 8}, 240, None),
    (FA2, N8, {"block_q": 8, "block_k": 8}, 136, None),
    (FA1, N8, {"block_q": 3, "block_k": 5}, 368, None),
    (FA2, N8, {"block_q": 3, "block_k": 5}, 264, None),
    (FA1, N8, {"block_q": 4, "block_k": 2}, 624, 896),
    (SPARSE, N8, {"block_q": 2, "block_k": 2, "block_mask": np.ones((4, 4), bool)}, 624, None),
    (FA2, N8, {"block_q": 2, "block_k": 2}, 328, None),
    (FA1, N8, {"block_q": 2, "block_k": 2, "causal": True}, 432, None),
    (FA2, N8, {"block_q": 2, "block_k": 2, "causal": True}, 232, None),
    (STANDARD, G, {}, 4_456_448, 7_864_320),
    (FA1, G, {"block_q": 64, "block_k": 100}, 2_406_400, None),
    (FA1, G, {"block_q": 64, "block_k": 200}, 1_402_880, 2_430_976),
    (FA1, G, {"block_q": 64, "block_k": 384}, 800_768, None),
    (FA1, (1024, 1024, 128, 128), {"block_q": 100, "block_k": 100}, 4_765_696, None),
    (STANDARD, (1024, 1024, 128, 128), {}, 4_718_592, None),
    (FA1, G, {"block_q": 64, "block_k": 64}, 3_409_920, None),
    (FA1, G, {"block_q": 64, "block_k": 128}, 1_804_288, None),
    (FA1, G, {"block_q": 64, "block_k": 256}, 1_001_472, None),
    (FA1, G, {"block_q": 64, "block_k": 512}, 600_064, None),
    (FA2, G, {"block_q": 64, "block_k": 200}, 2_229_248, None),
    (FA2, G, {"block_q": 200, "block_k": 64}, 918_528, None),
    (FA2, G, {"block_q": 128, "block_k": 128}, 1_180_672, None),
    (FA2, (4096, 4096, 64, 64), {"block_q": 64, "block_k": 64}, 34_082_816, None),
    (FA2, (4096, 4096, 64, 64), {"block_q": 128, "block_k": 64}, 17_305_600, None),
    (FA2, (4096, 4096, 64, 64), {"block_q": 256, "block_k": 64}, 8_916_992, None),
]


@pytest.mark.parametrize(("name", "sizes", "options", "there", "back"), TOTALS)
def test_totals_that_the_lessons_show(name, sizes, options, there, back):
    answers = [closed(name, *sizes, **options)]
    if sizes[0] <= 1024:
        answers.append(measure(name, *sizes, **options))
    for got in answers:
        assert sum(got[0]) == there
        assert back is None or sum(got[1]) == back


def test_block_sparse_patterns_that_the_lessons_show():
    """Each tile of N8 in blocks of 2 costs 32 elements, above a floor of 112."""
    from flashref.block_sparse import butterfly_pattern, local_pattern

    sizes = {"block_q": 2, "block_k": 2}
    for block_mask, total in [
        (np.zeros((4, 4), bool), 112),
        (butterfly_pattern(4), 496),
        (local_pattern(4), 432),
    ]:
        got = measure(SPARSE, *N8, block_mask=block_mask, **sizes)
        assert sum(got[0]) == total == 112 + 32 * block_mask.sum()
    large = (4096, 4096, 64, 64)
    for block_mask, total in [
        (np.ones((64, 64), bool), 52_174_848),
        (butterfly_pattern(64), 6_414_336),
        (local_pattern(64), 3_177_984),
    ]:
        got = closed(SPARSE, *large, 64, 64, block_mask=block_mask)
        assert sum(got[0]) == total


def test_traffic_of_the_rule_at_m_equal_to_d():
    """B_r = B_c = 1: 46 times the traffic of standard attention (setting G)."""
    rule = dict(zip(("block_q", "block_k"), flashref.block_sizes(64, 64), strict=True))
    ratio = sum(closed(FA1, *G, **rule)[0]) / sum(closed(STANDARD, *G)[0])
    assert round(ratio) == 46


# Random settings ----------------------------------------------------------------------------------


def random_setting(rng):
    """Return sizes, blocks and rules; small, ragged, and now and then with no rows at all."""
    n_q, n_k = (int(n) for n in rng.integers(1, 24, 2) * (rng.random(2) < 0.95))
    d, d_v, block_q, block_k = (int(n) for n in rng.integers(1, 9, 4))
    sides = [None, 0, 1, 3, 30]
    return (n_q, n_k, d, d_v), {
        "block_q": block_q,
        "block_k": block_k,
        "causal": [False, True, "top-left"][rng.integers(3)],
        "window": None if rng.random() < 0.4 else (sides[rng.integers(5)], sides[rng.integers(5)]),
    }


@pytest.mark.parametrize("start", range(0, 240, 20))
def test_measured_equals_closed_form_equals_by_hand(start):
    """240 settings, every algorithm, forward and backward, to the element."""
    for seed in range(start, start + 20):
        rng = np.random.default_rng(seed)
        sizes, options = random_setting(rng)
        shape = (-(-sizes[0] // options["block_q"]), -(-sizes[1] // options["block_k"]))
        block_mask = rng.random(shape) < rng.random()
        for name in CLOSED:
            rules = dict(options)
            if name == SPARSE:
                rules["block_mask"] = block_mask
            pairs = seen_pairs(*sizes[:2], **{"block_mask": None, **rules})
            tiles = tiles_of(pairs, options["block_q"], options["block_k"])
            t, u = (sum(tile[axis] for tile in tiles) for axis in (0, 1))
            want = by_hand(name, *sizes, t, u)
            assert measure(name, *sizes, **rules) == want, (name, seed)
            if name == STANDARD:
                rules = {}  # S and P go out and come back whole, whatever is masked
            assert closed(name, *sizes, **rules) == want, (name, seed)
            assert all(type(n) is int for pair in closed(name, *sizes, **rules) for n in pair)


def test_the_random_settings_are_worth_their_name():
    """They skip tiles, cut ragged ones, and have full ones beside partial ones."""
    skipped = ragged = mixed = empty = 0
    for seed in range(240):
        (n_q, n_k, _, _), options = random_setting(np.random.default_rng(seed))
        pairs = seen_pairs(n_q, n_k, block_mask=None, **options)
        tiles = tiles_of(pairs, options["block_q"], options["block_k"])
        skipped += len(tiles) < -(-n_q // options["block_q"]) * -(-n_k // options["block_k"])
        ragged += n_q % options["block_q"] > 0 or n_k % options["block_k"] > 0
        mixed += 0 < pairs.sum() < sum(rows * cols for rows, cols in tiles)
        empty += n_q * n_k == 0
    assert min(skipped, ragged, mixed) >= 60
    assert empty >= 3


def test_dense_t_and_u():
    """Without masks t = T_c n_q and u = T_r n_k."""
    pairs = np.ones((13, 17), bool)
    tiles = tiles_of(pairs, 4, 5)
    assert sum(rows for rows, _ in tiles) == 4 * 13
    assert sum(cols for _, cols in tiles) == 4 * 17


@tiled_algorithms
@pytest.mark.parametrize("shape", [(12, 15), (15,), (12, 1)], ids=str)
def test_given_mask_and_bias_count_under_their_own_names(name, shape):
    rng = np.random.default_rng(1)
    q, k, v, do = draw(12, 15, 3, 4)
    mask = rng.random((12, 15)) < 0.5
    mask[:4, 5:10] = False  # one tile of 4 x 5 that nobody sees
    bias = rng.standard_normal(shape)
    tiles = tiles_of(mask, 4, 5)
    assert len(tiles) == 8
    assert not any(mask[i : i + 4, j : j + 5].all() for i in (0, 4, 8) for j in (0, 5, 10))
    t, u = (sum(tile[axis] for tile in tiles) for axis in (0, 1))
    moved = {(12, 15): 8 * 20, (15,): 8 * 5, (12, 1): 8 * 4}[shape]
    rung, there, back = rung_of(name), Memory(), Memory()
    o, lse = rung.forward(q, k, v, mask=mask, bias=bias, memory=there)
    rung.backward(do, q, k, v, o, lse, mask=mask, bias=bias, memory=back)
    want = by_hand(name, 12, 15, 3, 4, t, u)
    for memory, (loads, stores) in zip((there, back), want, strict=True):
        assert memory.loads_by_array["mask"] == 8 * 20
        assert memory.loads_by_array["bias"] == moved
        assert memory.loads - 8 * 20 - moved == loads
        assert memory.stores == stores


# What the counts depend on, and what does not depend on counting ----------------------------------


@every_algorithm
def test_counts_add_up_over_query_heads_and_calls(name):
    """Each query head loads its own K and V, and stores its own dk and dv."""
    one = closed(name, 9, 7, 3, 2)
    q, k, v, do = draw(9, 7, 3, 2, lead=(2,), h_q=6, h_kv=3)
    rung, there, back = rung_of(name), Memory(), Memory()
    for calls in (1, 2):
        o, lse = rung.forward(q, k, v, memory=there)
        rung.backward(do, q, k, v, o, lse, memory=back)
        assert (there.loads, there.stores) == tuple(12 * calls * n for n in one[0])
        assert (back.loads, back.stores) == tuple(12 * calls * n for n in one[1])


def test_counts_of_packed_sequences_add_up():
    rng = np.random.default_rng(2)
    lengths_q, lengths_k = [5, 0, 9, 3], [4, 6, 0, 8]
    cu_q, cu_k = np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_k])
    q, k, v = rng.random((17, 4, 3)), rng.random((18, 2, 3)), rng.random((18, 2, 2))
    for causal in (False, True, "top-left"):
        memory = Memory()
        options = {"block_q": 4, "block_k": 5, "causal": causal}
        flashref.flash_attention_varlen(q, k, v, cu_q, cu_k, memory=memory, **options)
        each = [
            io_model.fa2_traffic(n_q, n_k, 3, 2, **options)
            for n_q, n_k in zip(lengths_q, lengths_k, strict=True)
        ]
        assert memory.loads == 4 * sum(loads for loads, _ in each)
        assert memory.stores == 4 * sum(stores for _, stores in each)


@every_algorithm
def test_counts_do_not_depend_on_dtype_or_return_lse_or_values(name):
    fn = getattr(flashref, name)
    sizes = {} if name == STANDARD else {"block_q": 4, "block_k": 5}
    if name == SPARSE:
        sizes["block_mask"] = np.ones((3, 2), bool)
    counts = set()
    for dtype in (np.float64, np.float32, np.float16):
        for seed in (0, 1):
            for return_lse in (False, True):
                q, k, v, _ = (x.astype(dtype) for x in draw(9, 7, 3, 2, seed=seed))
                memory = Memory()
                fn(q, k, v, return_lse=return_lse, memory=memory, **sizes)
                fn(q, k, v, dropout_p=0.5, seed=1, softcap=3, memory=memory, **sizes)
                counts.add((memory.loads, memory.stores, memory.peak_sram))
    assert len(counts) == 1


@pytest.mark.parametrize("rung", rungs(blocks=[(1, 1), (3, 2), (100, 100)]), ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.3, "seed": 1}], ids=str)
def test_counting_changes_no_bit(rung, dtype, options):
    q, k, v, do = (x.astype(dtype) for x in draw(9, 7, 3, 2, h_q=4, h_kv=2))
    silent = rung.run(q, k, v, do, **options)
    counted = rung.run(q, k, v, do, memory=Memory(), **options)
    for x, y in zip(counted, silent, strict=True):
        assert x.tobytes() == y.tobytes()
    o = getattr(rung.package, rung.name)  # and return_lse changes no bit of o
    args, named = rung._arguments(q, k, dict(options))
    assert o(q, k, v, *args, **named).tobytes() == silent.o.tobytes()


@pytest.mark.parametrize("rung", rungs(blocks=[(128, 128)]), ids=str)
def test_counting_changes_no_bit_of_a_call_large_enough_for_threads(rung, monkeypatch):
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "2")
    q, k, v, do = (x.astype(np.float32) for x in draw(600, 600, 16, 16, h_q=2, h_kv=1))
    silent, counted = rung.run(q, k, v, do), rung.run(q, k, v, do, memory=Memory())
    for x, y in zip(counted, silent, strict=True):
        assert x.tobytes() == y.tobytes()


# Fast memory --------------------------------------------------------------------------------------


def forward_need(rows, cols, d, d_v):
    """Q, O, S, m, l and K, V of one tile; S is overwritten by P."""
    return rows * (d + d_v) + cols * (d + d_v) + rows * cols + 2 * rows


def test_peak_of_the_worked_tile():
    for name in (FA1, FA2, SPARSE):
        memory = Memory()
        q, k, v, _ = draw(*FOUR)
        rung_of(name, 16, 32).forward(q, k, v, memory=memory)
        assert memory.peak_sram == 2080 == forward_need(16, 32, 16, 16)


@tiled_algorithms
def test_peak_is_that_of_the_largest_visited_tile(name):
    for seed in range(40):
        rng = np.random.default_rng(1000 + seed)
        sizes, options = random_setting(rng)
        if name == SPARSE:
            shape = (-(-sizes[0] // options["block_q"]), -(-sizes[1] // options["block_k"]))
            options["block_mask"] = rng.random(shape) < 0.4
        q, k, v, do = draw(*sizes)
        pairs = seen_pairs(*sizes[:2], **{"block_mask": None, **options})
        tiles = tiles_of(pairs, options["block_q"], options["block_k"])
        rules = dict(options)
        rung = rung_of(name, rules.pop("block_q"), rules.pop("block_k"))
        there, back = Memory(), Memory()
        o, lse = rung.forward(q, k, v, memory=there, **rules)
        rung.backward(do, q, k, v, o, lse, memory=back, **rules)
        need = max((forward_need(*tile, *sizes[2:]) for tile in tiles), default=0)
        assert there.peak_sram == need
        d, d_v = sizes[2:]
        backward = [
            # Q, dQ, dO, one lse and D a row; K, dK, V, dV a column; P and dP, overwritten by dS
            rows * (2 * d + d_v + 2) + cols * (2 * d + 2 * d_v) + 2 * rows * cols
            + (0 if name == FA2 else rows * d_v)  # Algorithm 4 brings O_i along
            for rows, cols in tiles
        ]  # fmt: skip
        assert back.peak_sram == max(backward, default=0)


@tiled_algorithms
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_a_limit_equal_to_the_peak_is_enough_and_one_less_is_refused(name, direction, options):
    q, k, v, do = draw(13, 17, 8, 5, h_q=2, h_kv=1)
    rung = rung_of(name)
    o, lse = rung.forward(q, k, v, **options)

    def run(memory):
        if direction == "forward":
            return rung.forward(q, k, v, memory=memory, **options)
        return rung.backward(do, q, k, v, o, lse, memory=memory, **options)

    free = Memory()
    want = run(free)
    peak = free.peak_sram
    enough = Memory(peak)
    for x, y in zip(run(enough), want, strict=True):
        assert x.tobytes() == y.tobytes()
    assert (enough.loads, enough.stores, enough.peak_sram) == (free.loads, free.stores, peak)

    short = Memory(peak - 1)
    with pytest.raises(ValueError) as refusal:
        run(short)
    message = str(refusal.value).replace(",", "")
    assert {str(peak), str(peak - 1)} <= set(re.findall(r"\d+", message)), message
    arrays = "QKVOSml" if direction == "forward" else ["Q", "K", "V", "dO", "dQ", "dK", "dV"]
    for array in arrays:
        assert re.search(rf"\b{array} \d+", message), f"{array} is not in: {message}"
    assert (short.loads, short.stores, short.peak_sram, short.events) == (0, 0, 0, [])

    # the block sizes that the message offers do fit, and are not needlessly small
    offer = re.search(r"block_q=(\d+) block_k=(\d+) would fit", message)
    assert offer, message
    block_q, block_k = (int(n) for n in offer.groups())
    rung = rung_of(name, block_q, block_k)
    if direction == "forward":
        rung.forward(q, k, v, memory=short, **options)
    else:
        rung.backward(do, q, k, v, o, lse, memory=short, **options)
    assert 0 < short.peak_sram <= peak - 1
    with pytest.raises(ValueError, match="would fit"):
        dense = draw(block_q + 1, block_q + 1, 8, 5)
        saved = np.zeros((block_q + 1, 5)), np.zeros(block_q + 1)
        larger = rung_of(name, block_q + 1, block_q + 1)
        if direction == "forward":
            larger.forward(*dense[:3], memory=Memory(peak - 1))
        else:
            larger.backward(dense[3], *dense[:3], *saved, memory=Memory(peak - 1))


def test_a_limit_that_nothing_fits():
    """Tiles of 1 x 1 need 2 (d + d_v) + 3."""
    q, k, v, _ = draw(5, 5, 3, 2)
    for name in (FA1, FA2, SPARSE):
        rung_of(name, 1, 1).forward(q, k, v, memory=Memory(13))
        for blocks in ((1, 1), (4, 5)):
            with pytest.raises(ValueError, match=r"\b12\b.*\b13\b"):
                rung_of(name, *blocks).forward(q, k, v, memory=Memory(12))


def test_only_visited_tiles_must_fit():
    """The tile that no query sees is never on chip, so its size does not matter."""
    q, k, v, _ = draw(6, 6, 3, 2)
    block_mask = np.array([[False, True], [True, True]])  # tiles 4x4, 4x2, 2x4, 2x2
    memory = Memory(forward_need(2, 4, 3, 2))
    block_mask[0, 1] = False
    rung_of(SPARSE, 4, 4).forward(q, k, v, block_mask=block_mask, memory=memory)
    assert memory.peak_sram == memory.sram_elements
    with pytest.raises(ValueError):
        rung_of(FA1, 4, 4).forward(q, k, v, memory=Memory(memory.sram_elements))


def test_packed_sequences_are_refused_before_the_first_one_moves():
    """The second sequence has the tile that does not fit."""
    x = np.ones((9, 1, 3))
    memory = Memory(forward_need(4, 4, 3, 3) - 1)
    ends, sizes = [0, 2, 9], {"block_q": 4, "block_k": 4}
    with pytest.raises(ValueError, match="would fit"):
        flashref.flash_attention_varlen(x, x, x, ends, ends, memory=memory, **sizes)
    assert (memory.loads, memory.stores, memory.events) == (0, 0, [])


@pytest.mark.parametrize("limit", [17, 100, 1000, 100_000])
def test_default_blocks_fit_the_limit(limit):
    q, k, v, do = draw(30, 40, 4, 3)
    for name in (FA1, FA2):
        forward, backward = getattr(flashref, name), getattr(flashref, name + "_backward")
        there, back = Memory(limit), Memory(2 * limit)
        o, lse = forward(q, k, v, memory=there, return_lse=True)
        assert 0 < there.peak_sram <= limit
        np.testing.assert_allclose(o, forward(q, k, v), rtol=1e-12, atol=1e-13)
        backward(do, q, k, v, o, lse, memory=back)
        assert 0 < back.peak_sram <= 2 * limit


def test_standard_attention_is_never_refused():
    q, k, v, do = draw(5, 7, 3, 2)
    memory = Memory(1)
    flashref.standard_attention(q, k, v, memory=memory)
    flashref.standard_attention_backward(do, q, k, v, memory=memory)
    assert memory.loads > 0


# The paper's block sizes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "d", "sizes"),
    [
        (16384, 64, (64, 64)),
        (25600, 64, (64, 100)),
        (51200, 64, (64, 200)),
        (98304, 64, (64, 384)),
        (51200, 128, (100, 100)),
        (1000, 64, (4, 4)),
        (1, 64, (1, 1)),
        (49152, 128, (96, 96)),
        (98304, 128, (128, 192)),
        (64, 4, (4, 4)),
        (48, 4, (3, 3)),
        (50, 4, (4, 4)),
        (100, 3, (3, 9)),
        (16, 4, (1, 1)),
    ],
)
def test_block_sizes(m, d, sizes):
    got = flashref.block_sizes(m, d)
    assert got == sizes
    assert all(type(n) is int for n in got)


def need_of_the_rule(m, d):
    return forward_need(*flashref.block_sizes(m, d), d, d)


def test_the_rule_leaves_no_room_for_s():
    assert need_of_the_rule(16384, 64) == 20_608
    assert need_of_the_rule(64, 4) == 88
    assert need_of_the_rule(25600, 64) == 27_520
    assert need_of_the_rule(51200, 64) == 46_720
    assert need_of_the_rule(98304, 64) == 82_048
    assert need_of_the_rule(51200, 128) == 61_400
    q, k, v, _ = draw(8, 8, 4, 4)
    for name in (FA1, FA2):
        with pytest.raises(ValueError, match=r"\b88\b.*\b64\b"):
            rung_of(name, *flashref.block_sizes(64, 4)).forward(q, k, v, memory=Memory(64))
    with pytest.raises(ValueError, match=r"20,?608\b.*16,?384\b"):
        q, k, v, _ = draw(128, 128, 64, 64)
        rung_of(FA1, 64, 64).forward(q, k, v, memory=Memory(16384))


@pytest.mark.parametrize(("d", "from_m"), [(64, 33_856), (128, 133_248)])
def test_the_rule_fits_from_about_8_d_squared_on(d, from_m):
    assert need_of_the_rule(from_m - 1, d) > from_m - 1
    assert all(need_of_the_rule(m, d) <= m for m in range(from_m, from_m + 20_000))


# The Memory object --------------------------------------------------------------------------------


def test_memory_counts_elements_by_array():
    memory, x, y = Memory(), np.arange(12.0).reshape(4, 3), np.zeros((4, 3))
    assert (memory.loads, memory.stores, memory.peak_sram, memory.events) == (0, 0, 0, [])
    tile = memory.load("x", x, slice(1, 3))
    np.testing.assert_array_equal(tile, x[1:3])
    memory.store("y", y, slice(2, 4), tile)
    np.testing.assert_array_equal(y, [[0, 0, 0], [0, 0, 0], [3, 4, 5], [6, 7, 8]])
    memory.store("y", y, slice(0, 1), 7)  # a number fills the rows
    np.testing.assert_array_equal(y[0], [7, 7, 7])
    assert memory.load("x", x, slice(3, 9)).shape == (1, 3)  # as NumPy cuts it
    assert (memory.loads, memory.stores) == (9, 9)
    assert type(memory.loads) is type(memory.stores) is int
    assert dict(memory.loads_by_array) == {"x": 9}
    assert dict(memory.stores_by_array) == {"y": 9}
    assert [(e.kind, e.name, e.elements) for e in memory.events] == [
        ("load", "x", 6), ("store", "y", 6), ("store", "y", 3), ("load", "x", 3),
    ]  # fmt: skip
    assert "9" in repr(memory)


def names_of(memory):
    """Return the events as words: +Q a load, -O a store, S a tile."""
    sign = {"load": "+", "store": "-", "tile": ""}
    return " ".join(sign[e.kind] + e.name for e in memory.events)


def test_events_tell_the_loop_order():
    """Where FlashAttention 1 and 2 differ: what moved out of the inner loop."""
    q, k, v, do = draw(*N8)
    memory = Memory()
    o, lse = rung_of(FA1, 4, 4).forward(q, k, v, memory=memory)
    step = "+Q +O +l +m S -O -l -m"
    assert names_of(memory) == " ".join(["-O -l -m", *["+K +V", step, step] * 2])
    memory = Memory()
    rung_of(FA2, 4, 4).forward(q, k, v, memory=memory)
    assert names_of(memory) == " ".join(["+Q +K +V S +K +V S -O -L"] * 2)
    memory = Memory()
    rung_of(FA2, 4, 4).backward(do, q, k, v, o, lse, memory=memory)
    step = "+Q +dO +dQ +L +D S -dQ"
    want = " ".join(["-dQ +O +dO -D +O +dO -D", *["+K +V", step, step, "-dK -dV"] * 2])
    assert names_of(memory) == want
    memory = Memory()
    rung_of(FA1, 4, 4).backward(do, q, k, v, o, lse, memory=memory)
    step = "+Q +O +dO +dQ +L S -dQ"
    want = " ".join(["-dQ -dK -dV", *["+K +V", step, step, "-dK -dV"] * 2])
    assert names_of(memory) == want


def test_each_array_moves_as_often_as_the_paper_says():
    q, k, v, _ = draw(13, 17, 8, 5)  # T_r = 4, T_c = 4
    memory = Memory()
    rung_of(FA1).forward(q, k, v, memory=memory)
    assert dict(memory.loads_by_array) == {
        "K": 17 * 8, "V": 17 * 5, "Q": 4 * 13 * 8, "O": 4 * 13 * 5, "l": 4 * 13, "m": 4 * 13,
    }  # fmt: skip
    assert dict(memory.stores_by_array) == {"O": 5 * 13 * 5, "l": 5 * 13, "m": 5 * 13}
    memory = Memory()
    rung_of(FA2).forward(q, k, v, memory=memory)
    assert dict(memory.loads_by_array) == {"Q": 13 * 8, "K": 4 * 17 * 8, "V": 4 * 17 * 5}
    assert dict(memory.stores_by_array) == {"O": 13 * 5, "L": 13}


@every_algorithm
def test_events_add_up_to_the_counts(name):
    q, k, v, do = draw(9, 7, 3, 2, h_q=4, h_kv=2)
    memory = Memory()
    rung = rung_of(name)
    o, lse = rung.forward(q, k, v, memory=memory, causal=True)
    rung.backward(do, q, k, v, o, lse, memory=memory, causal=True)
    for kind, total in (("load", memory.loads), ("store", memory.stores)):
        assert sum(e.elements for e in memory.events if e.kind == kind) == total
    assert {e.head for e in memory.events} == {0, 1, 2, 3}
    chip = [e.elements for e in memory.events if e.kind == "tile"]
    assert max(chip, default=0) == memory.peak_sram


def test_a_listener_sees_what_moved():
    """It gets the arrays too: the tile of S that is being worked on, with its rows and columns."""
    seen = []

    def listener(event, tiles):
        if event.kind == "tile":
            seen.append((event.where, {name: x.copy() for name, x in tiles.items()}))

    q, k, v, _ = draw(5, 7, 3, 2)
    rung_of(FA2, 2, 3).forward(q, k, v, memory=Memory(listener=listener))
    assert [where for where, _ in seen] == [
        (slice(i, min(i + 2, 5)), slice(j, min(j + 3, 7))) for i in (0, 2, 4) for j in (0, 3, 6)
    ]
    for (rows, cols), tiles in seen:
        np.testing.assert_array_equal(tiles["Q"], q[rows])
        np.testing.assert_array_equal(tiles["K"], k[cols])
        np.testing.assert_allclose(tiles["S"], q[rows] @ k[cols].T / np.sqrt(3), rtol=1e-13)
        assert sum(x.size for x in tiles.values()) == forward_need(
            rows.stop - rows.start, cols.stop - cols.start, 3, 2
        )


def test_closed_forms_take_names_for_what_is_not_a_size():
    for forms in CLOSED.values():
        for form in forms:
            parameters = inspect.signature(form).parameters
            assert list(parameters)[:4] == ["n_q", "n_k", "d", "d_v"]
            by_name = {p.name for p in parameters.values() if p.kind == p.KEYWORD_ONLY}
            assert by_name == set(parameters) - {"n_q", "n_k", "d", "d_v"}


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_closed_forms_do_not_overflow_in_numpys_integers(kind):
    """65,536 squared is beyond int32; such sizes come out of np.diff(cu_seqlens)."""
    n, d = 65_535 if kind is np.uint16 else 65_536, 64
    for forms in CLOSED.values():
        for form in forms:
            options = {"block_mask": np.ones((2, 2), bool)} if "sparse" in form.__name__ else {}
            if "standard" not in form.__name__:
                options |= {"block_q": 32_768, "block_k": 32_768}
            there = form(kind(n), kind(n), kind(d), kind(d), **options)
            assert there == form(n, n, d, d, **options)
            assert all(type(count) is int for count in there)
    assert io_model.forward_flops(kind(n), kind(n), kind(d), kind(d)) == 4 * n * n * d
    assert io_model.backward_flops(kind(n), kind(n), kind(d), kind(d)) == 10 * n * n * d

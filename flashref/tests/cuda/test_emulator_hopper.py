"""The `hopper` kernel itself, without a GPU: run in NumPy, as late as allowed, and wounded.

The answers come from oracles in float64 on the same rounded inputs.
"""

import inspect
import types
from dataclasses import replace

import numpy as np
import pytest

import flashref
from flashref.tests.cases import AXES

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.cuda import emulator_hopper as emulated_card
from flashref.cuda import hopper, hopper_tiles, ptx, ptx_hopper, tma
from flashref.cuda.emulator_hopper import Deadlock, Misuse, Race
from flashref.cuda.hopper import Schedule
from flashref.tests.cuda import card
from flashref.tests.cuda.emulated import decode, encode, wound

SMALL = (
    Schedule(1, 16),
    Schedule(2, 32),
    Schedule(3, 48, query_stages=1),
    Schedule(2, 16, stages=3),
)
ONE_STEP_BACK = [
    replace(Schedule(2, 32), **{switch: False})
    for switch in ("give_registers", "tma", "overlap", "take_turns", "persistent")
]


def case(
    n_q=100, n_k=90, d=64, d_v=None, heads=(2, 1), batch=1, half="float16", seed=0, view=None,
    **options,
):  # fmt: skip
    """Return errors of o (relative, by norm) and lse (absolute), and the counts."""
    rng = np.random.default_rng(seed)
    shapes = ((heads[0], n_q, d), (heads[1], n_k, d), (heads[1], n_k, d_v or d))
    q, k, v = (encode(rng.standard_normal((batch, *s)).astype(np.float32), half) for s in shapes)
    options.setdefault("schedule", Schedule(2, 32))
    given = (q, k, v) if view is None else map(view, (q, k, v))
    o, lse, counts = emulated_card.attention(*given, half=half, seed=seed, **options)
    rules = {name: options[name] for name in ("causal", "scale") if name in options}
    exact = [decode(x, half) for x in (q, k, v)]
    gold, lse_gold = flashref.standard_attention(*exact, return_lse=True, **rules)
    o, seen = decode(o, half), np.isfinite(lse_gold)
    assert np.isfinite(o).all() and (np.isfinite(lse) == seen).all()
    assert (o[~seen] == 0).all() and np.isneginf(lse[~seen]).all()
    error = np.linalg.norm(o - gold) / max(np.linalg.norm(gold), 1e-30)
    return error, np.abs(lse[seen] - lse_gold[seen]).max(initial=0), counts


# -- right answers --------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [n for n in AXES["n"] if max(n) < 300], ids=str)
def test_the_grid_of_the_card(n):
    """Sizes, heads, widths, data, causal rules, NaN that nobody sees: the card's own check."""
    for seed in range(3 if sum(n) < 300 else 2):
        drawn = card.Case("hopper", n, seed)
        schedule = SMALL[seed] if sum(n) < 200 else SMALL[1 + seed]
        result = emulated(drawn, schedule, seed)
        card.check("hopper", drawn, lambda result=result: result)


def emulated(drawn, schedule, seed):
    """Return o and lse of a case of `card`."""
    arrays = [drawn.q, drawn.k, drawn.v]
    if drawn.heads is None:
        arrays = [x[None] for x in arrays]
    q, k, v = (x.reshape(int(np.prod(x.shape[:-3])), *x.shape[-3:]).view(np.uint16) for x in arrays)
    rules = {"causal": drawn.causal, "scale": drawn.scale, "seed": seed}
    o, lse, _ = emulated_card.attention(q, k, v, schedule=schedule, **rules)
    lead = drawn.q.shape[:-1]
    return o.view(np.float16).reshape(*lead, drawn.d_v), lse.reshape(lead)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("schedule", [*SMALL, *ONE_STEP_BACK], ids=str)
def test_every_schedule(schedule, causal):
    error, lse_error, _ = case(150, 90, heads=(4, 2), schedule=schedule, causal=causal)
    assert error <= 1e-3 and lse_error <= 1e-5


@pytest.mark.parametrize("D", hopper.BEST)
def test_the_schedules_that_run_on_a_card(D):
    for schedule, causal in zip(hopper.steps(D).values(), (False, True) * 3, strict=True):
        error, lse_error, _ = case(200, 150, D, schedule=schedule, causal=causal)
        assert error <= 1e-3 and lse_error <= 1e-5


@pytest.mark.parametrize("d, d_v", [(8, 8), (40, 72), (96, 64), (64, 128), (136, 256), (192, 8)])
@pytest.mark.parametrize("tma", [True, False])
def test_widths_between(d, d_v, tma):
    """TMA brings zeros for the columns that are not there, as the threads do."""
    error, lse_error, _ = case(70, 50, d, d_v, causal=True, schedule=Schedule(1, 16, tma=tma))
    assert error <= 1e-3 and lse_error <= 1e-5


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(scale):
    error, lse_error, _ = case(33, 20, causal=True, scale=scale)
    assert error <= 1e-3 and lse_error <= 1e-5


@pytest.mark.parametrize("schedule", [Schedule(2, 32), Schedule(2, 32, tma=False)])
def test_bfloat16(schedule):
    error, lse_error, _ = case(half="bfloat16", causal=True, schedule=schedule)
    assert error <= 8e-3 and lse_error <= 1e-5


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)], ids=str)
def test_arrays_are_used_where_they_lie(axes, tma):
    """Rows of other heads and batch elements, and NaNs, lie between the rows."""

    def view(x):
        wide = np.full((*x.transpose(axes).shape[:3], x.shape[3] + 8), 0xFFFF, np.uint16)
        inside = wide[..., : x.shape[3]]
        inside[:] = x.transpose(axes)
        return inside.transpose(np.argsort(axes))

    schedule = Schedule(1, 32, tma=tma)
    error, _, _ = case(70, 50, heads=(4, 2), batch=2, schedule=schedule, view=view, causal=True)
    assert error <= 1e-3


def test_a_mean_of_many_equal_numbers():
    q, k, v = (encode(np.full((1, 1, n, 64), 1000.0), "float16") for n in (1, 1023, 1023))
    o, _, _ = emulated_card.attention(q, k, v, scale=0.0, schedule=Schedule(1, 64))
    assert (decode(o, "float16") == 1000).all()


def test_scores_in_the_hundreds():
    """Each tile brings a new maximum."""
    for seed in range(3):
        error, _, _ = case(100, 90, causal=True, scale=10.0, seed=seed)
        assert error <= 2e-3


@pytest.mark.parametrize("tma", [True, False])
def test_what_nobody_sees_has_no_effect(tma):
    """Keys beyond the last that any query sees may hold anything, NaN too."""
    rng = np.random.default_rng(0)
    q, k, v = (encode(rng.standard_normal((1, 1, n, 64)), "float16") for n in (20, 40, 40))
    rules = {"schedule": Schedule(1, 32, tma=tma), "causal": "top-left"}
    clean = emulated_card.attention(q, k, v, **rules)
    k[:, :, 20:], v[:, :, 20:] = encode(np.array([np.nan, np.inf]), "float16")
    got = emulated_card.attention(q, k, v, **rules)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1], clean[1])


def test_a_seen_nan_makes_its_rows_nan():
    rng = np.random.default_rng(0)
    q, k, v = (encode(rng.standard_normal((1, 1, n, 64)), "float16") for n in (40, 40, 40))
    k[:, :, 30, 5] = encode(np.nan, "float16")
    o, lse, _ = emulated_card.attention(q, k, v, causal=True, schedule=Schedule(1, 16))
    assert np.isfinite(lse[0, 0, :30]).all() and np.isnan(lse[0, 0, 30:]).all()
    o = decode(o, "float16")[0, 0]
    assert np.isfinite(o[:30]).all() and np.isnan(o[30:]).all()


def test_the_order_of_events_changes_no_bit():
    rng = np.random.default_rng(0)
    q, k, v = (encode(rng.standard_normal((1, 2, n, 64)), "float16") for n in (200, 150, 150))
    results = [
        emulated_card.attention(q, k, v, causal=True, schedule=Schedule(3, 16), seed=seed)
        for seed in range(8)
    ]
    for o, lse, _ in results[1:]:
        np.testing.assert_array_equal(o, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


# -- what it costs --------------------------------------------------------------------------------
@pytest.mark.parametrize("tma", [True, False])
def test_products_and_bytes_are_those_of_the_algorithm(tma):
    """4 n_q n_k d operations a head; Q once, K and V once for each tile of queries."""
    n_q, n_k, d, heads, schedule = 128, 96, 64, 2, Schedule(1, 32, tma=tma)
    _, _, counts = case(n_q, n_k, d, heads=(heads, 1), schedule=schedule)
    a_tile = (d // 16) * 2 * 64 * 32 * 16 + (32 // 16) * 2 * 64 * d * 16  # operations
    assert counts["wgmma"] // (d // 16 + 32 // 16) * a_tile == 4 * n_q * n_k * d * heads
    assert counts["bytes"] == 2 * heads * (n_q * d + n_q // 64 * n_k * 2 * d)


def test_causal_skips_what_nobody_sees():
    """128 × 128 in tiles of 64 × 32: the first rows need 2 of 4 tiles, the last all."""
    _, _, dense = case(128, 128, schedule=Schedule(1, 32))
    _, _, causal = case(128, 128, schedule=Schedule(1, 32), causal=True)
    assert causal["wgmma"] * 8 == dense["wgmma"] * 6


@pytest.mark.parametrize("take_turns", [True, False])
@pytest.mark.parametrize("n_q, n_k, causal, tiles", [(192, 192, True, 6), (70, 192, False, 7)])
def test_a_warpgroup_passes_over_what_it_does_not_see(n_q, n_k, causal, tiles, take_turns):
    """Causal, three warpgroups see 1, 2, 3 of 3 tiles; one without queries works on one."""
    schedule = Schedule(3, 64, take_turns=take_turns)
    error, _, counts = case(n_q, n_k, heads=(1, 1), schedule=schedule, causal=causal)
    assert error <= 1e-3 and counts["wgmma"] == tiles * (64 // 16 + 64 // 16)


def test_a_persistent_block_walks_over_all_tiles():
    for processors, persistent, blocks in ((3, True, 3), (100, True, 8), (3, False, 8)):
        schedule = Schedule(1, 16, persistent=persistent)
        error, _, counts = case(200, 20, schedule=schedule, processors=processors, causal=True)
        assert error <= 1e-3 and counts["blocks"] == blocks  # 4 tiles, 2 heads


# -- layouts --------------------------------------------------------------------------------------
def descriptor(bits, address):
    return bits | address >> 4


@pytest.mark.parametrize("rows", [16, 64, 80, 256])
def test_a_descriptor_finds_the_rows_of_a_swizzled_tile(rows):
    """16 columns of a tile of rows × 128, written as TMA writes it, chunk by chunk."""
    tile = np.arange(rows * 128).reshape(rows, 128)
    memory = swizzled_by_hand(tile)
    bits = ptx_hopper.descriptor_bits(16, 1024)
    for step in range(8):
        panel, chunk = step // 4, step % 4 * 2
        at = descriptor(bits, 1024 + panel * rows * 128) + chunk
        places = emulated_card.elements_by_rows(at, rows) - 1024
        np.testing.assert_array_equal(memory[places // 2], tile[:, step * 16 : step * 16 + 16])


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_descriptor_finds_the_columns_of_a_swizzled_tile(columns):
    """16 rows of a tile of 80 × columns, whose rows are summed over."""
    tile = np.arange(80 * columns).reshape(80, columns)
    memory = swizzled_by_hand(tile)
    bits = ptx_hopper.descriptor_bits(80 * 128, 1024)
    for step in range(5):
        at = descriptor(bits, 1024) + step * 128
        places = emulated_card.elements_by_columns(at, columns) - 1024
        np.testing.assert_array_equal(memory[places // 2], tile[step * 16 : step * 16 + 16])


def swizzled_by_hand(tile):
    """Return a tile as it lies in shared memory: 64 columns after the other, chunks swapped."""
    rows, columns = tile.shape
    memory = np.empty((columns // 64, rows, 8, 8), tile.dtype)
    for panel, row, chunk in np.ndindex(columns // 64, rows, 8):
        first = panel * 64 + chunk * 8
        memory[panel, row, chunk ^ (row % 8)] = tile[row, first : first + 8]
    return memory.ravel()


def test_descriptors_fit_their_fields():
    """Addresses up to 227 KiB fit 14 bits of 16 bytes; steps never carry into the strides."""
    for D, schedule in hopper.BEST.items():
        layout = hopper_tiles.shared_layout(D, schedule)
        assert layout.end + 1024 <= 227 * 1024 and layout.end < 2**18
        assert layout.K % 1024 == layout.V % 1024 == layout.tile % 1024 == layout.full_Q % 8 == 0
        assert schedule.BC * 128 // 16 < 2**14


def test_results_and_operands_lie_in_the_same_registers():
    """What two neighbours of D hold, rounded, is a register of A: see `ptx_hopper`."""
    rows, columns = emulated_card.accumulator(64)
    lane, warp = np.arange(128) % 32, np.arange(128) // 32
    g, t = lane // 4, lane % 4
    for step, r in np.ndindex(4, 4):
        x = 8 * step + 2 * r
        np.testing.assert_array_equal(rows[x], 16 * warp + g + 8 * (r % 2))
        np.testing.assert_array_equal(columns[x], 16 * step + 2 * t + 8 * (r // 2))
        np.testing.assert_array_equal(columns[x + 1], columns[x] + 1)
    assert len({*zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True)}) == 64 * 64


def test_tma_and_threads_write_the_same_bytes(monkeypatch):
    """Every tile of every stage, as `wgmma` finds it: ragged rows, ragged columns."""
    seen = {True: [], False: []}
    original = emulated_card.Block._halves

    def note(block, places, half):
        halves = original(block, places, half)
        seen[tma_is_on].append(halves.tobytes())
        return halves

    monkeypatch.setattr(emulated_card.Block, "_halves", note)
    for tma_is_on in (True, False):
        case(70, 50, 72, 40, schedule=Schedule(1, 16, tma=tma_is_on))
    assert len(seen[True]) > 50 and seen[True] == seen[False]


# -- what the emulator is for ---------------------------------------------------------------------
RELEASE_K = "empty(shared + uint32(EMPTY_K) + uint32(8) * stage)"
RELEASE_STEPS_K = "empty(shared + uint32(EMPTY_K) + uint32(8) * K_stage)"
RELEASE_V = "empty(shared + uint32(EMPTY_V) + uint32(8) * V_stage)"
WAIT_ONLY = "hx.wait_products(1, N_S)"


@pytest.mark.parametrize(
    "module, healthy, broken, error",
    [
        # barriers: parities, waits, arrivals
        ("hopper", "uint32(8) * q_stage, q_phase)", "uint32(8) * q_stage, ~q_phase)", Race),
        ("hopper", "hx.wait(shared + uint32(FULL_K) + uint32(8) * K_stage, K_phase)", "pass",
         Race),
        ("hopper", "hx.wait(shared + uint32(FULL_V) + uint32(8) * V_stage, V_phase)", "pass",
         Race),
        ("hopper_tiles", "hx.wait(barrier + uint32(EMPTY_K), phase)", "pass", Misuse),
        ("hopper_tiles", " stage, phase = uint32(0), uint32(1)",
         " stage, phase = uint32(0), uint32(0)", Deadlock),
        ("hopper_tiles", "return uint32(0), uint32(phase ^ uint32(1))", "return uint32(0), phase",
         (Deadlock, Race, Misuse)),
        ("hopper", RELEASE_V, "pass", Deadlock),
        ("hopper", "        " + RELEASE_STEPS_K + "\n        if masked", "        if masked",
         Deadlock),
        # empty before the products that read it are finished
        ("hopper", f"wait_scores(S)\n                {RELEASE_K}",
         f"{RELEASE_K}\n                wait_scores(S)", Race),
        ("hopper", "if hx.first_lane():", "if True:", Misuse),
        ("hopper", "hx.fence_barriers()", "pass", Race),
        ("hopper", "cuda.syncthreads()", "pass", (Race, Misuse)),
        ("hopper_tiles", "ROWS * PANELS * LINE", "ROWS * LINE", (Race, Misuse)),
        ("hopper_tiles", "hx.fence_map(k_map)", "pass", Misuse),
        # products: waits, fences
        ("hopper", "        wait_only_scores(S)\n", "", Misuse),
        ("hopper", WAIT_ONLY, "hx.wait_products(2, N_S)", Misuse),
        ("hopper", f"wait_output(O)\n        {RELEASE_V}", RELEASE_V, (Misuse, Race)),
        ("hopper", "wait_output(O)", "wait_scores(S)", Misuse),  # which lets O's readers go ahead
        ("hopper", "hx.wgmma_fence()\n        first_scores", "first_scores", Misuse),
        ("hopper", "        hx.wgmma_fence()\n        for step in range(BC_STEPS)",
         "        for step in range(BC_STEPS)", Misuse),
        ("hopper", "softmax(S, m, l, correction, scale2, masked)\n        wait_output(O)",
         "softmax(S, m, l, correction, scale2, masked)\n        round_to(P, S)\n"
         "        wait_output(O)", Misuse),  # P is still read
        # turns and registers
        ("hopper", "following = uint32(warpgroup + uint32(1))", "following = warpgroup", Deadlock),
        ("hopper", "if warpgroup == uint32(0):  # the first turn is free", "if False:", Deadlock),
        ("hopper", "(True, 2): (24, 240)", "(True, 2): (32, 240)", Deadlock),
        # layouts
        ("hopper", "hx.descriptor_bits(16, 8 * LINE)", "hx.descriptor_bits(16, 4 * LINE)",
         AssertionError),
        ("hopper", "hx.descriptor_bits(BC * LINE, 8 * LINE)", "hx.descriptor_bits(64, 8 * LINE)",
         AssertionError),
        ("hopper", "return uint64(bits) |", "return uint64(bits & (2**62 - 1)) |", Misuse),
        ("hopper", "step % 4 * 2", "step % 4", AssertionError),
        ("hopper", "2**32 - SWIZZLE_BYTES", "2**32 - 128", (AssertionError, Misuse)),
        # the algorithm
        ("hopper", "int32(own_first) + 1 + offset", "int32(own_first) + offset",
         AssertionError),
        ("hopper", "if start + BC > all_see:", "if False:", AssertionError),
        ("hopper", "int32(j * uint32(BC)) > all_see", "int32(j * uint32(BC)) > all_see + BC",
         AssertionError),
        ("hopper_tiles", "uint32(h // group)", "uint32(h % uint32(k.shape[1]))", AssertionError),
        ("hopper_tiles", "before + tile % here", "tile % here", AssertionError),
        ("hopper_tiles", "= last_end if last_end < stop", "= last_end - BC if last_end < stop",
         AssertionError),
        ("hopper", "        rescale(O, correction)\n        round_to", "        round_to",
         AssertionError),
        ("hopper", "l[0] * c0 + (l0 + y0)", "l[0] + (l0 + y0)", AssertionError),
        ("hopper", "negative=NEGATIVE", "negative=False", AssertionError),
        ("hopper", "* float32(LN_2)", "", AssertionError),
        ("hopper", "cuda.selp(sees_any, pair, uint32(0))", "pair", AssertionError),
    ],
)  # fmt: skip
def test_what_is_broken_is_seen(module, healthy, broken, error, monkeypatch):
    wound(monkeypatch, module, (healthy, broken))
    with pytest.raises(error):
        for seed in range(3):
            found = case(
                150, 100, 128, heads=(4, 2), causal=True, scale=-0.3, seed=seed,
                schedule=Schedule(2, 16), processors=1,
            )  # fmt: skip
            assert found[0] <= 1e-3 and found[1] <= 1e-5


@pytest.mark.parametrize(
    "what, schedule, n_k",
    [
        ("EMPTY_Q), q_phase", Schedule(1, 32, query_stages=1), 16),
        ("EMPTY_K), phase", Schedule(1, 16, stages=1), 90),
        ("EMPTY_V), phase", Schedule(1, 16, stages=1), 90),
    ],
)
def test_a_copy_that_does_not_wait_for_its_buffer_is_seen(what, schedule, n_k, monkeypatch):
    """With one buffer: of several, another's barrier may hide what is missing."""
    wound(monkeypatch, "hopper_tiles", (f"hx.wait(barrier + uint32({what})", "pass"))
    with pytest.raises((Race, Misuse, Deadlock)):
        for seed in range(3):
            case(200, n_k, schedule=schedule, seed=seed)


@pytest.mark.parametrize(
    "rows, heads, blocks",
    [(4, 512, 132), (3, 1024, 132), (43, 64, 132), (86, 32, 132), (157, 16, 132), (1, 1, 1)],
)
def test_all_tiles_are_walked_over_and_no_block_has_much_more_to_do(
    rows, heads, blocks, monkeypatch
):
    """The kernel's own walk, with Python's integers."""
    monkeypatch.setattr(hopper_tiles, "uint32", int)
    section = hopper.section_for(rows, heads, blocks)
    q, steps, seen = np.empty((2, heads // 2 or 1, rows * 64, 0)), [0] * blocks, set()
    heads = q.shape[0] * q.shape[1]
    for block in range(blocks):
        place = types.SimpleNamespace(
            gridDim=types.SimpleNamespace(x=blocks), blockIdx=types.SimpleNamespace(x=block)
        )
        monkeypatch.setattr(hopper_tiles, "cuda", place)
        tile_of = hopper_tiles.tile_functions(64, Schedule(1, 16), True, lambda f: f).tile_of
        more, first, h, b, deal = tile_of(0, q, section)
        while more:
            seen.add((first, h, b))
            steps[block] += first // 64 + 1
            more, first, h, b, deal = tile_of(deal, q, section)
    assert len(seen) == rows * heads and sum(steps) == heads * rows * (rows + 1) // 2
    assert max(steps) <= max(1.08 * sum(steps) / blocks, rows)
    assert section * rows <= 8 * blocks  # few enough heads for the cache


@pytest.mark.parametrize(
    "healthy, broken, error",
    [
        ("hx.fence_writes()", "pass", Race),
        ("hx.copy_wait_but_one()", "pass", Race),  # published before it is there
        ("(chunk ^ (r & 7)) << 4", "chunk << 4", AssertionError),
        ("row + i < n", "True", AssertionError),
    ],
)
def test_what_is_broken_in_copies_by_threads_is_seen(healthy, broken, error, monkeypatch):
    wound(monkeypatch, "hopper_tiles", (healthy, broken))
    with pytest.raises(error):
        found = case(100, 90, schedule=Schedule(1, 32, tma=False))
        assert found[0] <= 1e-3 and found[1] <= 1e-5


def test_keys_that_nobody_sees_stay_out_of_the_map(monkeypatch):
    wound(monkeypatch, "hopper", ("max(1, min(n_k, n_q + offset))", "max(1, n_k)"))
    with pytest.raises(AssertionError):
        test_what_nobody_sees_has_no_effect(tma=True)


def test_a_deadlock_says_who_waits_for_what(monkeypatch):
    wound(monkeypatch, "hopper", ("if warpgroup == uint32(0):  # the first turn is free", "if 0:"))
    with pytest.raises(Deadlock) as caught:
        case(150, 100, schedule=Schedule(2, 16))
    text = str(caught.value)
    assert "warpgroup 0 waits for parity" in text and "empty_V[0]" in text and "8 arrivals" in text
    assert "warpgroup 1 waits for named barrier 1: 128 of 256 threads" in text


def test_the_emulator_knows_every_instruction_of_hopper():
    source = "".join(map(inspect.getsource, (hopper_tiles, hopper)))
    used = {name for name in dir(ptx) if f"ptx.{name}" in source}
    used |= {name for name in dir(ptx_hopper) if f"hx.{name}" in source}
    assert len(used) > 25 and used <= set(dir(emulated_card.Block))
    public = {name for name in vars(ptx_hopper) if name.islower() and name[0] != "_"}
    assert public - used == {"instruction", "on_registers"}, "instructions that nobody uses"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"BC": 24}, "BC must be a multiple of 16"),
        ({"BC": 0}, "from 16 to 256"),
        ({"BC": -16}, "from 16 to 256"),
        ({"BC": 272}, "from 16 to 256"),
        ({"warpgroups": 0}, "warpgroups 1 to 4"),
        ({"warpgroups": 5}, "warpgroups 1 to 4"),
        ({"stages": 0}, "stages and query_stages must be at least 1"),
        ({"query_stages": 0}, "stages and query_stages must be at least 1"),
        ({"stages": 1, "tma": False}, "stages must be at least 2 with overlap and without tma"),
    ],
)
def test_schedules_that_no_card_can_run_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"warpgroups": 1, "BC": 16} | options)


@pytest.mark.parametrize("switches", [{}, {"overlap": False}, {"tma": False, "overlap": False}])
def test_one_stage_is_enough_unless_threads_copy_with_overlap(switches):
    schedule = Schedule(2, 16, stages=1, **switches)
    for seed in range(3):
        error, lse_error, _ = case(150, 100, schedule=schedule, causal=True, seed=seed)
        assert error <= 1e-3 and lse_error <= 1e-5


def test_one_stage_threads_and_overlap_would_wait_for_ever(monkeypatch):
    """K_n is published after V_(n - 1) is used, which is used after K_n is published."""
    monkeypatch.setattr(Schedule, "__post_init__", lambda self: None)
    schedule = Schedule(1, 16, stages=1, tma=False)
    case(64, 16, schedule=schedule)  # one tile of keys
    with pytest.raises(Deadlock, match=r"empty_V\[0\](?s:.*)full_K\[0\]"):
        case(64, 32, schedule=schedule)


def test_tensor_maps_say_what_they_cannot():
    x = {"pointer": 4096, "half": "float16", "shape": (1, 2, 50, 64), "box_rows": 64}
    tma.TensorMap(**x, strides=(0, 6400, 128))  # one batch element: its stride is of no use
    for change in ({"strides": (0, 0, 128)}, {"strides": (0, 6400, -128)},
                   {"strides": (0, 6400, 136)}, {"strides": (0, 6400, 128), "pointer": 4104},
                   {"strides": (0, 6400, 128), "box_rows": 272},
                   {"strides": (0, 6400, 128), "shape": (1, 2, 0, 64)}):  # fmt: skip
        with pytest.raises(ValueError, match="no tensor map"):
            tma.TensorMap(**x | change)

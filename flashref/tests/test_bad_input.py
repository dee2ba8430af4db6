"""What is refused, with which words, and what is taken, by every public function.

Bad input is refused before any work: nothing is counted, nothing is changed, and the message names
the argument, shows the offending value, and says what would be right.
"""

import inspect
import re

import numpy as np
import pytest

import flashref
from flashref import Memory, block_sparse, io_model, scores
from flashref.tests.rungs import rungs

pytestmark = pytest.mark.filterwarnings("error")

REFUSED = (ValueError, TypeError)
NAN, INF = np.nan, np.inf


def inputs(seed=0, q=(4, 5, 3), k=(2, 7, 3), v=(2, 7, 4), dtype=np.float64):
    """Return good arguments of every attention function, by name."""
    rng = np.random.default_rng(seed)
    shapes = {"q": q, "k": k, "v": v, "do": (*q[:-1], v[-1]), "o": (*q[:-1], v[-1]), "lse": q[:-1]}
    given = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tiles = (-(-q[-2] // 2), -(-k[-2] // 3)) if len(q) > 1 and len(k) > 1 else (1, 1)
    return given | {"block_mask": np.ones(tiles, bool), "block_q": 2, "block_k": 3}


def packed_inputs():
    """Return good arguments of `flash_attention_varlen`, by name."""
    rng = np.random.default_rng(1)
    shapes = {"q": (6, 4, 3), "k": (7, 2, 3), "v": (7, 2, 4)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    ends = {"cu_seqlens_q": np.array([0, 2, 2, 6]), "cu_seqlens_k": np.array([0, 3, 4, 7])}
    return given | ends | {"block_q": 2, "block_k": 3}


FORWARD = [
    flashref.standard_attention,
    flashref.flash_attention_1,
    flashref.flash_attention_2,
    flashref.block_sparse_attention,
]
BACKWARD = [
    flashref.standard_attention_backward,
    flashref.flash_attention_1_backward,
    flashref.flash_attention_2_backward,
    flashref.block_sparse_attention_backward,
]
PACKED = flashref.flash_attention_varlen
ATTENTION = [*FORWARD, *BACKWARD, PACKED]
PARAMETERS = {fn: inspect.signature(fn).parameters for fn in ATTENTION}


def call(fn, given):
    """Call fn by name with what it takes of the arguments."""
    return fn(**{name: x for name, x in given.items() if name in PARAMETERS[fn]})


def assert_refused(fn, given, words):
    """Assert an error with all the words, nothing counted and nothing changed."""
    memory = Memory()
    given = {**given, "memory": memory}
    before = {name: np.array(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(REFUSED) as refusal:
        call(fn, given)
    message = re.sub(r"\s+", " ", str(refusal.value))  # NumPy aligns [-1,  0]
    for word in words:
        pattern = rf"(?<!\w){re.escape(word)}" + (r"(?!\w)" if word[-1].isalnum() else "")
        assert re.search(pattern, message), f"no {word!r} in: {message}"
    assert (memory.loads, memory.stores, memory.peak_sram, memory.events) == (0, 0, 0, [])
    for name, x in before.items():
        np.testing.assert_array_equal(given[name], x, err_msg=f"{name} was changed")


@pytest.mark.parametrize("fn", ATTENTION, ids=lambda fn: fn.__name__)
def test_the_good_arguments_are_good(fn):
    """Otherwise the refusals below would prove nothing."""
    call(fn, packed_inputs() if fn is PACKED else inputs())


# Shapes of q, k and v -----------------------------------------------------------------------------

SHAPES = {  # q, k, v, what the message shows
    "d": ((5, 4), (7, 3), (7, 4), ["q", "k", "(5, 4)", "(7, 3)"]),
    "d, heads": ((4, 5, 4), (2, 7, 3), (2, 7, 4), ["q", "k", "(4, 5, 4)", "(2, 7, 3)"]),
    "n_k": ((5, 4), (7, 4), (6, 4), ["k", "v", "(7, 4)", "(6, 4)"]),
    "heads of k and v": ((4, 5, 3), (2, 7, 3), (4, 7, 3), ["k", "v", "(2, 7, 3)", "(4, 7, 3)"]),
    "heads of v would broadcast": ((4, 5, 3), (2, 7, 3), (1, 7, 3), ["(2, 7, 3)", "(1, 7, 3)"]),
    "batch of k and v": (
        (2, 4, 5, 3),
        (2, 2, 7, 3),
        (3, 2, 7, 3),
        ["k", "v", "(2, 2, 7, 3)", "(3, 2, 7, 3)"],
    ),
    "batch of q": (
        (3, 4, 5, 3),
        (2, 2, 7, 3),
        (2, 2, 7, 3),
        ["q", "k", "(3, 4, 5, 3)", "(2, 2, 7, 3)"],
    ),
    "batch 1 would broadcast": (
        (3, 4, 5, 3),
        (1, 4, 7, 3),
        (1, 4, 7, 3),
        ["(3, 4, 5, 3)", "(1, 4, 7, 3)"],
    ),
    "axes": ((4, 5, 3), (7, 3), (7, 3), ["q", "k", "(4, 5, 3)", "(7, 3)"]),
    "axes of v": ((5, 3), (7, 3), (1, 7, 3), ["v", "(7, 3)", "(1, 7, 3)"]),
    "1-D q": ((3,), (7, 3), (7, 3), ["q", "(3,)"]),
    "1-D k": ((5, 3), (3,), (7, 3), ["k", "(3,)"]),
    "1-D v": ((5, 3), (7, 3), (7,), ["v", "(7,)"]),
    "0-D q": ((1, 1), (1, 1), (1, 1), ["q", "()"]),  # made 0-D below
    "d = 0": ((5, 0), (7, 0), (7, 4), ["q", "(5, 0)"]),
    "H_q": ((5, 5, 3), (2, 7, 3), (2, 7, 4), ["q", "5", "2"]),
    "H_q below H_kv": ((2, 5, 3), (4, 7, 3), (4, 7, 4), ["q", "2", "4"]),
    "no H_kv": ((2, 5, 3), (0, 7, 3), (0, 7, 4), ["q", "2", "0"]),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("fn", FORWARD + BACKWARD, ids=lambda fn: fn.__name__)
def test_shapes_that_do_not_fit(fn, case):
    q, k, v, words = SHAPES[case]
    given = inputs(q=q, k=k, v=v)
    if case == "0-D q":
        given["q"] = np.array(1.0)
    assert_refused(fn, given, words)


PACKED_SHAPES = {
    "q is 2-D": ({"q": (6, 3)}, ["q", "(6, 3)"]),
    "q is 4-D": ({"q": (1, 6, 4, 3)}, ["q", "(1, 6, 4, 3)"]),
    "k is 2-D": ({"k": (7, 3)}, ["k", "(7, 3)"]),
    "d": ({"k": (7, 2, 5)}, ["q", "k", "3", "5"]),
    "n_k": ({"v": (6, 2, 4)}, ["k", "v", "7", "6"]),
    "heads of k and v": ({"v": (7, 4, 4)}, ["k", "v", "2", "4"]),
    "H_q": ({"q": (6, 5, 3)}, ["q", "5", "2"]),
    "d = 0": ({"q": (6, 4, 0), "k": (7, 2, 0)}, ["q"]),
}


@pytest.mark.parametrize("case", PACKED_SHAPES)
def test_packed_shapes_that_do_not_fit(case):
    shapes, words = PACKED_SHAPES[case]
    given = packed_inputs() | {name: np.ones(shape) for name, shape in shapes.items()}
    assert_refused(PACKED, given, words)


@pytest.mark.parametrize(
    ("shapes", "shown"),
    [({"k": (7, 2, 5)}, (7, 2, 5)), ({"v": (6, 2, 4)}, (6, 2, 4)), ({"q": (6, 5, 3)}, (6, 5, 3))],
    ids=str,
)
def test_packed_shapes_are_shown_as_given(shapes, shown):
    """Heads come second in packed arrays: a message with the axes exchanged would mislead."""
    given = packed_inputs() | {name: np.ones(shape) for name, shape in shapes.items()}
    assert_refused(PACKED, given, [str(shown)])


# One argument at a time ---------------------------------------------------------------------------

NUMBERS = {  # kinds of values that no array of numbers may have: value, what the message shows
    "bool": (lambda x: x > 0, "bool"),
    "complex": (lambda x: x.astype(complex), "complex128"),
    "object": (lambda x: x.astype(object), "object"),
    "string": (lambda x: x.astype(str), "<U32"),
    "ragged": (lambda x: [[1.0, 2.0], [3.0]], "object"),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "o", "lse", "bias", "alibi_slopes"])
@pytest.mark.parametrize("fn", ATTENTION, ids=lambda fn: fn.__name__)
def test_arrays_that_hold_no_numbers(fn, name, kind):
    if name not in PARAMETERS[fn]:
        return
    make, shown = NUMBERS[kind]
    given = packed_inputs() if fn is PACKED else inputs()
    given |= {name: make(given.get(name, np.ones(7 if name == "bias" else 4)))}
    assert_refused(fn, given, [name, shown])


ARGUMENTS = [  # argument, value, what the message shows beside the argument's name
    ("mask", np.ones((5, 7)), ["float64", "bias"]),
    ("mask", np.ones((5, 7), int), ["int64", "bias"]),
    ("mask", np.ones((5, 7), np.uint8), ["uint8"]),
    ("mask", [[0, 1, 1, 1, 1, 1, 1]] * 5, ["int64"]),
    ("mask", np.ones(3, bool), ["(3,)", "(4, 5, 7)"]),
    ("mask", np.ones((7, 5), bool), ["(7, 5)", "(4, 5, 7)"]),
    ("mask", np.ones((3, 5, 7), bool), ["(3, 5, 7)", "(4, 5, 7)"]),
    ("mask", np.ones((1, 4, 5, 7), bool), ["(1, 4, 5, 7)", "(4, 5, 7)"]),
    ("mask", np.ones((5, 0), bool), ["(5, 0)", "(4, 5, 7)"]),
    ("bias", np.ones(5), ["(5,)", "(4, 5, 7)"]),
    ("bias", np.ones((2, 5, 7)), ["(2, 5, 7)", "(4, 5, 7)"]),
    ("bias", np.ones((1, 4, 5, 7)), ["(1, 4, 5, 7)", "(4, 5, 7)"]),
    ("alibi_slopes", np.ones(3), ["(3,)", "(4,)"]),
    ("alibi_slopes", np.ones((2, 4)), ["(2, 4)", "(4,)"]),
    ("window", (-1, 0), ["(-1, 0)", "None"]),
    ("window", (0, -1), ["(0, -1)", "None"]),
    ("window", (1, 2, 3), ["(1, 2, 3)"]),
    ("window", (1,), ["(1,)"]),
    ("window", 4, ["4"]),
    ("window", "12", ["'12'"]),
    ("window", (1.0, 2), ["(1.0, 2)"]),
    ("window", (1, NAN), ["(1, nan)"]),
    ("window", (True, 0), ["(True, 0)"]),
    ("window", [1, "2"], ["[1, '2']"]),
    ("causal", None, ["None", "top-left"]),
    ("causal", 1, ["1", "top-left"]),
    ("causal", 0, ["0", "top-left"]),
    ("causal", "bottom-right", ["'bottom-right'", "top-left"]),
    ("causal", "TOP-LEFT", ["'TOP-LEFT'", "top-left"]),
    ("causal", "", ["''", "top-left"]),
    ("causal", np.ones(2, bool), ["array([ True, True])", "top-left"]),
    ("scale", NAN, ["nan"]),
    ("scale", INF, ["inf"]),
    ("scale", 10**400, ["finite"]),
    ("scale", -INF, ["-inf"]),
    ("scale", "1", ["'1'"]),
    ("scale", 1j, ["1j"]),
    ("scale", np.ones(4), ["[1., 1., 1., 1.]"]),
    ("softcap", -1, ["-1"]),
    ("softcap", -0.5, ["-0.5"]),
    ("softcap", NAN, ["nan"]),
    ("softcap", INF, ["inf"]),
    ("softcap", "50", ["'50'"]),
    ("dropout_p", -0.1, ["-0.1"]),
    ("dropout_p", 1, ["1"]),
    ("dropout_p", 1.0, ["1.0"]),
    ("dropout_p", 1.5, ["1.5"]),
    ("dropout_p", NAN, ["nan"]),
    ("dropout_p", INF, ["inf"]),
    ("dropout_p", "0.5", ["'0.5'"]),
    ("dropout_p", None, ["None"]),
    ("block_q", 0, ["0"]),
    ("block_q", -4, ["-4"]),
    ("block_q", 16.0, ["16.0"]),
    ("block_q", np.float64(16), ["16.0"]),
    ("block_q", "16", ["'16'"]),
    ("block_q", NAN, ["nan"]),
    ("block_q", (2, 2), ["(2, 2)"]),
    ("block_k", 0, ["0"]),
    ("block_k", -1, ["-1"]),
    ("block_k", 16.0, ["16.0"]),
    ("block_k", [16], ["[16]"]),
    ("block_mask", np.ones((3, 3), int), ["int64"]),
    ("block_mask", np.ones((3, 3)), ["float64"]),
    ("block_mask", np.ones((2, 3), bool), ["(2, 3)", "(3, 3)"]),  # floor(5 / 2)
    ("block_mask", np.ones((3, 2), bool), ["(3, 2)", "(3, 3)"]),  # floor(7 / 3)
    ("block_mask", np.ones((5, 7), bool), ["(5, 7)", "(3, 3)"]),
    ("block_mask", np.ones(3, bool), ["(3,)", "(3, 3)"]),
    ("block_mask", np.ones((1, 1), bool), ["(1, 1)", "(3, 3)"]),  # would broadcast
    ("block_mask", np.ones((3, 3, 3), bool), ["(3, 3, 3)"]),  # of 3 heads, not 4
    ("do", np.ones((4, 5, 3)), ["(4, 5, 3)", "(4, 5, 4)"]),
    ("do", np.ones((4, 5)), ["(4, 5)", "(4, 5, 4)"]),
    ("do", np.ones((1, 5, 4)), ["(1, 5, 4)", "(4, 5, 4)"]),
    ("do", 1.0, ["()", "(4, 5, 4)"]),
    ("o", np.ones((4, 5, 3)), ["(4, 5, 3)", "(4, 5, 4)"]),
    ("o", np.ones((2, 5, 4)), ["(2, 5, 4)", "(4, 5, 4)"]),
    ("lse", np.ones((4, 5, 1)), ["(4, 5, 1)", "(4, 5)"]),
    ("lse", np.ones((2, 5)), ["(2, 5)", "(4, 5)"]),
    ("lse", np.ones(5), ["(5,)", "(4, 5)"]),
    ("memory", 16384, ["16384", "Memory"]),
    ("memory", Memory, ["Memory"]),
]


def ids(value):
    """Return a short id for a parameter."""
    return str(getattr(value, "shape", value)).replace("\n", "")


@pytest.mark.parametrize(("name", "value", "shown"), ARGUMENTS, ids=ids)
def test_arguments_that_are_refused(name, value, shown):
    functions = [fn for fn in FORWARD + BACKWARD if name in PARAMETERS[fn]]
    assert functions, f"no function takes {name}"
    for fn in functions:
        if name == "memory":
            with pytest.raises(REFUSED, match=f"memory.*{shown[0]}"):
                call(fn, inputs() | {"memory": value})
        else:
            assert_refused(fn, inputs() | {name: value}, [name, *shown])


@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_block_sparse_attention_has_no_default_blocks(name):
    """The block mask is about blocks of one size: there is nothing to choose for the caller."""
    for fn in (flashref.block_sparse_attention, flashref.block_sparse_attention_backward):
        assert_refused(fn, inputs() | {name: None}, [name, "None"])


CLOSED_FORMS = [
    getattr(flashref.io_model, f"{rung}_{form}")
    for rung in ("fa1", "fa2", "block_sparse")
    for form in ("traffic", "backward_traffic")
]
RULES = {"block_q", "block_k", "block_mask", "causal", "window"}


@pytest.mark.parametrize(
    ("name", "value", "shown"), [x for x in ARGUMENTS if x[0] in RULES], ids=ids
)
def test_closed_forms_refuse_the_same(name, value, shown):
    """A count for rules that no call accepts would be a wrong number, not an answer."""
    if name == "block_mask" and np.ndim(value) == 3:
        shown = ["(3, 3, 3)", "(3, 3)"]  # a closed form counts one head
    for form in CLOSED_FORMS:
        given = {"block_q": 2, "block_k": 3}
        if "block_sparse" in form.__name__:
            given["block_mask"] = np.ones((3, 3), bool)
        elif name == "block_mask":
            continue
        with pytest.raises(REFUSED) as refusal:
            form(5, 7, 3, 4, **given | {name: value})
        message = re.sub(r"\s+", " ", str(refusal.value))
        assert all(word in message for word in [name, *shown]), message


PACKED_TOO = {
    "window", "causal", "scale", "softcap", "dropout_p", "block_q", "block_k",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "shown"), [x for x in ARGUMENTS if x[0] in PACKED_TOO], ids=ids
)
def test_packed_sequences_refuse_the_same(name, value, shown):
    assert_refused(PACKED, packed_inputs() | {name: value}, [name, *shown])


@pytest.mark.parametrize(
    ("shape", "expected"), [((3,), "(3, 4)"), ((2, 4), "(3, 4)"), ((3, 3), "(3, 4)")], ids=str
)
def test_packed_slopes_are_per_sequence_and_head(shape, expected):
    given = packed_inputs() | {"alibi_slopes": np.ones(shape)}
    assert_refused(PACKED, given, ["alibi_slopes", str(shape), expected])


@pytest.mark.parametrize("seed", [None, 1.5, "1", (1,), True], ids=str)
@pytest.mark.parametrize("fn", ATTENTION, ids=lambda fn: fn.__name__)
def test_dropout_needs_an_integer_seed(fn, seed):
    """What is no seed is none at dropout_p = 0 either: the sweep over p would fail half-way."""
    given = packed_inputs() if fn is PACKED else inputs()
    for p in (0.5, 0.0) if seed is not None else (0.5,):
        assert_refused(fn, given | {"dropout_p": p, "seed": seed}, ["seed", repr(seed)])


OUT_OF_RANGE = [  # finite as Python has them; in float32, where float16 is calculated too, inf or 0
    ("scale", 1e39, ["1e+39", "3.4028234663852886e+38", "float32"]),
    ("scale", -1e39, ["-1e+39", "3.4028234663852886e+38", "float32"]),
    ("alibi_slopes", np.full(4, 1e39), ["1.e+39", "float32"]),
    ("softcap", 1e-46, ["1e-46", "float32"]),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(("name", "value", "shown"), OUT_OF_RANGE, ids=ids)
@pytest.mark.parametrize("fn", ATTENTION, ids=lambda fn: fn.__name__)
def test_options_that_the_arithmetic_cannot_hold(fn, name, value, shown, dtype):
    """Zeros as keys: whatever the scale, every score is 0, and no row may be NaN."""
    given = packed_inputs() if fn is PACKED else inputs()
    given |= {x: given[x].astype(dtype) for x in ("q", "k", "v", "do", "o", "lse") if x in given}
    given |= {"k": 0 * given["k"], name: value}
    if dtype != np.float64:
        assert_refused(fn, given, [name, *shown])
        given[name] = value / 100 if name != "softcap" else 1e-45
    assert not any(np.isnan(x).any() for x in results(fn, given))
    if name == "scale":  # as NumPy shows float32's largest
        given |= {"q": 0 * given["q"], name: np.copysign(3.4028235e38, value)}
        assert not any(np.isnan(x).any() for x in results(fn, given))


CU_SEQLENS = [  # for q (6 rows) and, by the same rule, for k (7 rows): values, shown
    (lambda n: [1, 2, 3, n], "[1, 2, 3, {n}]"),
    (lambda n: [0, 3, 2, n], "[0, 3, 2, {n}]"),
    (lambda n: np.array([0, 3, 2, n], np.uint64), "[0, 3, 2, {n}]"),  # differences wrap around
    (lambda n: [0, 2, 3, n - 1], "[0, 2, 3, {m}]"),
    (lambda n: [0, 2, 3, n + 1], "[0, 2, 3, {p}]"),  # FA PR#2324, FA#2709
    (lambda n: [0, 2, n + 1, n], "[0, 2, {p}, {n}]"),
    (lambda n: [-1, 0, 3, n], "[-1, 0, 3, {n}]"),
]


@pytest.mark.parametrize(("ends", "shown"), CU_SEQLENS)
@pytest.mark.parametrize(("name", "n"), [("cu_seqlens_q", 6), ("cu_seqlens_k", 7)])
def test_cu_seqlens_that_do_not_fit(name, n, ends, shown):
    shown = shown.format(n=n, m=n - 1, p=n + 1)
    assert_refused(PACKED, packed_inputs() | {name: ends(n)}, [name, shown, str(n)])


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_of_another_kind(name):
    n = 6 if name == "cu_seqlens_q" else 7
    for ends, shown in [
        ([0.0, 2.0, 3.0, n], "float64"),
        (np.array([False, True, True, True]), "bool"),
        (np.array(["0", "2", "3", "4"]), "<U1"),
        ([[0, 2, 3, n]], f"[[0, 2, 3, {n}]]"),
        (n, f"{n}"),
        ([], "[]"),
    ]:
        assert_refused(PACKED, packed_inputs() | {name: ends}, [name, shown])
    rule = "it must run from 0 to the packed length"
    for ends in ([], np.array([], int)):
        assert_refused(PACKED, packed_inputs() | {name: ends}, [name, "[]", rule, str(n)])


def test_cu_seqlens_of_unequal_counts():
    given = packed_inputs() | {"cu_seqlens_q": [0, 6]}
    assert_refused(PACKED, given, ["cu_seqlens_q", "cu_seqlens_k", "2", "4"])


# The small functions ------------------------------------------------------------------------------

SMALL = [  # call, what the message shows
    (lambda: flashref.alibi_slopes(0), ["n_heads", "0"]),
    (lambda: flashref.alibi_slopes(-8), ["n_heads", "-8"]),
    (lambda: flashref.alibi_slopes(8.0), ["n_heads", "8.0"]),
    (lambda: flashref.alibi_slopes("8"), ["n_heads", "'8'"]),
    (lambda: flashref.dropout_keep(1, (4, 4), 1), ["p", "1"]),
    (lambda: flashref.dropout_keep(1, (4, 4), -0.5), ["p", "-0.5"]),
    (lambda: flashref.dropout_keep(1, (4, 4), NAN), ["p", "nan"]),
    (lambda: flashref.dropout_keep(1, (4, 4), "0.5"), ["p", "'0.5'"]),
    (lambda: flashref.dropout_keep(None, (4, 4), 0.5), ["seed", "None"]),
    (lambda: flashref.dropout_keep(1.5, (4, 4), 0.5), ["seed", "1.5"]),
    (lambda: flashref.dropout_keep(1, (4,), 0.5), ["shape", "(4,)"]),
    (lambda: flashref.dropout_keep(1, 4, 0.5), ["shape", "4"]),
    (lambda: flashref.dropout_keep(1, (4, 4.0), 0.5), ["shape", "(4, 4.0)"]),
    (lambda: flashref.dropout_keep(1, (4, -1), 0.5), ["shape", "(4, -1)"]),
    (lambda: flashref.block_sizes(0, 64), ["sram_elements", "0"]),
    (lambda: flashref.block_sizes(16384.0, 64), ["sram_elements", "16384.0"]),
    (lambda: flashref.block_sizes(16384, 0), ["d", "0"]),
    (lambda: flashref.block_sizes(16384, 64.0), ["d", "64.0"]),
    (lambda: flashref.Memory(0), ["sram_elements", "0"]),
    (lambda: flashref.Memory(-1), ["sram_elements", "-1"]),
    (lambda: flashref.Memory(1e5), ["sram_elements", "100000.0"]),
    (lambda: flashref.Memory("64"), ["sram_elements", "'64'"]),
    (lambda: flashref.Memory(listener=3), ["listener", "3", "callable"]),
    (lambda: scores.tile_kinds(3, 3, 0, 1), ["block_q", "0"]),
    (lambda: scores.tile_kinds(3, 3, 1, 1.0), ["block_k", "1.0"]),
    (lambda: scores.tile_kinds(-1, 3, 1, 1), ["n_q", "-1"]),
    (lambda: scores.tile_kinds(3, 3.0, 1, 1), ["n_k", "3.0"]),
    (lambda: scores.tile_kinds(3, 3, 1, 1, causal="x"), ["causal", "'x'", "top-left"]),
    (lambda: scores.tile_kinds(3, 3, 1, 1, window=3), ["window", "3", "pair"]),
    (lambda: scores.tile_kinds(4, 4, 2, 2, mask=[[1, 0, 0, 1]]), ["mask", "int64", "boolean"]),
    (lambda: scores.tile_kinds(4, 4, 2, 2, mask=np.ones((3, 3), bool)), ["mask", "(3, 3)", "4"]),
    (lambda: scores.tile_kinds(4, 4, 2, 2, mask=np.ones(4, bool)), ["mask", "(4,)", "4"]),
    (
        lambda: scores.tile_kinds(4, 4, 2, 2, block_mask=np.ones((4, 4), bool)),
        ["block_mask", "(4, 4)", "(2, 2)"],
    ),
    (lambda: io_model.fitting_block(5000, 0, 4), ["d", "0"]),
    (lambda: io_model.fitting_block(5000, 1.5, 4), ["d", "1.5"]),
    (lambda: io_model.fitting_block(5000, 4, -1), ["d_v", "-1"]),
    (lambda: io_model.fitting_block(5000, 4, 4, block_q=0), ["block_q", "0"]),
    (lambda: io_model.fitting_block(5000, 4, 4, block_q=-3), ["block_q", "-3"]),
    (lambda: io_model.fitting_block(5000, 4, 4, block_k=2.0), ["block_k", "2.0"]),
    (
        lambda: io_model.fitting_block(5000, 4, 4, block_q=2, block_k=3),
        ["block_q=2", "block_k=3"],
    ),
    (
        lambda: io_model.block_sparse_traffic(8, 8, 8, 8, block_mask=None, block_q=4, block_k=4),
        ["block_mask", "None"],
    ),
    (
        lambda: io_model.block_sparse_backward_traffic(
            8, 8, 8, 8, block_mask=None, block_q=4, block_k=4
        ),
        ["block_mask", "None"],
    ),
    (lambda: block_sparse.random_pattern(4, 1, "x"), ["seed", "'x'"]),
    (lambda: block_sparse.random_pattern(4, 1, None), ["seed", "None"]),
    (lambda: block_sparse.random_pattern(4, 1, -1), ["seed", "-1"]),
    (lambda: flashref.dropout_keep("1", (4, 4), 0), ["seed", "'1'"]),
    (lambda: flashref.dropout_keep(1.0, (4, 4), 0), ["seed", "1.0"]),
    (lambda: flashref.online_softmax([1, 2], block=0), ["block", "0"]),
    (lambda: flashref.online_softmax([1, 2], block=-1), ["block", "-1"]),
    (lambda: flashref.online_softmax([1, 2], block=2.0), ["block", "2.0"]),
    (lambda: flashref.online_softmax_steps([1, 2], block=0), ["block", "0"]),
    (lambda: flashref.online_softmax_steps([1, 2], block=None), ["block", "None"]),
    (lambda: flashref.online_softmax_steps([1, 2], [[1], [2], [3]]), ["v", "(3, 1)", "2"]),
    (lambda: flashref.online_softmax_steps([1, 2], [1, 2]), ["v", "(2,)"]),
    (lambda: flashref.online_softmax_steps([1, 2], [["a"], ["b"]]), ["v", "<U1"]),
    (lambda: flashref.online_softmax_steps(3.0), ["x", "()"]),
    (lambda: flashref.safe_softmax([1, 2], axis=1), ["axis", "1"]),
    (lambda: flashref.online_softmax([1, 2], axis=1), ["axis", "1"]),
    (lambda: flashref.naive_softmax([1, 2], axis=-2), ["axis", "-2"]),
    (lambda: flashref.online_softmax([1, 2], axis=None), ["axis", "None"]),
    (lambda: flashref.online_softmax([[1, 2]], axis=(0, 1)), ["axis", "(0, 1)"]),
    (lambda: flashref.online_softmax([[1, 2]], axis=True), ["axis", "True"]),
    (lambda: flashref.safe_softmax([[1, 2]], axis=True), ["axis", "True"]),
    (lambda: flashref.safe_softmax([[1, 2]], axis=1.0), ["axis", "1.0"]),
    (lambda: flashref.naive_softmax([[1, 2]], axis=(0, 1)), ["axis", "(0, 1)"]),
    (lambda: flashref.safe_softmax(np.ma.array([1.0], mask=[True])), ["x", "masked", "filled"]),
]
for softmax in (flashref.naive_softmax, flashref.safe_softmax, flashref.online_softmax):
    SMALL += [
        (lambda f=softmax: f([True, False]), ["x", "bool"]),
        (lambda f=softmax: f([1j, 2]), ["x", "complex128"]),
        (lambda f=softmax: f(["a", "b"]), ["x", "<U1"]),
        (lambda f=softmax: f([[1.0, 2.0], [3.0]]), ["x"]),
        (lambda f=softmax: f(None), ["x", "object"]),
    ]
for tiles in (io_model.forward_tiles, io_model.fa1_backward_tiles, io_model.fa2_backward_tiles):
    SMALL += [
        (lambda f=tiles: f(-1, 2, 3, 3), ["rows", "-1"]),
        (lambda f=tiles: f(1, 2.5, 3, 3), ["cols", "2.5"]),
        (lambda f=tiles: f(1, 2, 0, 3), ["d", "0"]),
        (lambda f=tiles: f(1, 2, 3, "a"), ["d_v", "'a'"]),
    ]
PART = (np.ones((3, 2)), np.ones(3))
for o_b, lse_b, words in [
    (np.ones((4, 2)), np.ones(4), ["(3, 2)", "(4, 2)"]),
    (np.ones((3, 5)), np.ones(3), ["(3, 2)", "(3, 5)"]),
    (np.ones((1, 2)), np.ones(3), ["(3, 2)", "(1, 2)"]),
    (np.ones((3, 2)), np.ones(4), ["lse_b", "(4,)", "(3,)"]),
    (np.ones((3, 2)), np.ones((3, 1)), ["lse_b", "(3, 1)", "(3,)"]),
    (np.ones((3, 2)), np.float64(1), ["lse_b", "()", "(3,)"]),
    (np.ones((3, 2), bool), np.ones(3), ["o_b", "bool"]),
    (np.ones((3, 2)), np.ones(3, complex), ["lse_b", "complex128"]),
]:
    SMALL += [(lambda o=o_b, lse=lse_b: flashref.merge_attention(*PART, o, lse), words)]
SMALL += [
    (lambda: flashref.merge_attention(1.0, 1.0, 1.0, 1.0), ["o_a", "()"]),
    (lambda: flashref.merge_attention(np.ones((3, 2)), np.ones(2), *PART), ["lse_a", "(2,)"]),
]


@pytest.mark.parametrize(("refused", "words"), SMALL, ids=[" ".join(words) for _, words in SMALL])
def test_small_functions(refused, words):
    with pytest.raises(REFUSED) as refusal:
        refused()
    for word in words:
        assert word in str(refusal.value), f"no {word!r} in: {refusal.value}"


# What is taken ------------------------------------------------------------------------------------

OPTIONS = {  # every array argument there is, on inputs()
    "mask": np.random.default_rng(2).random((4, 5, 7)) < 0.8,
    "bias": np.random.default_rng(3).standard_normal((4, 5, 7)),
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625]),
}


def results(fn, given):
    """Return what fn returns as a tuple, with lse where it has one."""
    got = call(fn, {**given, "return_lse": True})
    assert all(type(x) is np.ndarray for x in got)
    return got


every_function = pytest.mark.parametrize("fn", FORWARD + BACKWARD, ids=lambda fn: fn.__name__)


@every_function
@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int32", "uint64", "int64", "list", "float list"]
)
def test_integers_and_lists_are_float64(fn, kind):
    given = inputs()
    for name in ("q", "k", "v", "do", "o", "lse"):
        given[name] = np.abs(np.round(3 * given[name]))
    want = results(fn, given)
    for name in ("q", "k", "v", "do", "o", "lse"):
        exact = given[name]
        given[name] = {"list": exact.astype(int), "float list": exact}.get(kind, exact).tolist()
        if "list" not in kind:
            given[name] = exact.astype(kind)
    for x, y in zip(results(fn, given), want, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_array_equal(x, y)


@every_function
@pytest.mark.parametrize(
    ("dtypes", "result"),
    [
        ("ddd", "d"), ("fff", "f"), ("eee", "e"), ("fdf", "d"), ("ffd", "d"), ("dff", "d"),
        ("eff", "f"), ("fee", "f"), ("eed", "d"), ("iff", "d"), ("fif", "d"), ("eib", "d"),
        ("bbb", "d"),
    ],
)  # fmt: skip
def test_mixed_kinds_take_numpys_result_type(fn, dtypes, result):
    """Integers count as float64; mask, bias and slopes (float64 here) change nothing."""
    given = inputs() | OPTIONS
    for name, dtype in zip("qkv", dtypes, strict=True):
        given[name] = given[name].astype(dtype)
    got = results(fn, given)
    expected = [np.dtype(result)] * len(got)
    if fn in FORWARD:
        expected[1] = np.dtype("f" if result == "e" else result)  # lse
    assert [x.dtype for x in got] == expected


@every_function
def test_float16_is_float32_rounded_once(fn):
    given = inputs(dtype=np.float16)
    single = {
        name: x.astype(np.float32) if getattr(x, "dtype", None) == np.float16 else x
        for name, x in given.items()
    }
    for x, y in zip(results(fn, given), results(fn, single), strict=True):
        np.testing.assert_array_equal(x, y.astype(x.dtype))


def transposed(x):
    return np.ascontiguousarray(x.T).T


def every_second(x):
    big = np.full([2 * n for n in x.shape], NAN if x.dtype.kind == "f" else 0, x.dtype)
    big[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return big[tuple(slice(None, None, 2) for _ in x.shape)]


def reversed_twice(x):
    backwards = tuple(slice(None, None, -1) for _ in x.shape)
    return np.ascontiguousarray(x[backwards])[backwards]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def other_byte_order(x):
    return x.astype(x.dtype.newbyteorder())


def unaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(x.tobytes(), np.uint8)
    return raw.view(x.dtype).reshape(x.shape)


class Foreign:
    """An array of another library: NumPy can only ask for its `__array__`."""

    def __init__(self, x):
        self._x = x

    def __array__(self, dtype=None, copy=None):
        return np.array(self._x, dtype)


class Exported:
    """An array of another library that offers DLPack alone."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **how):
        return self._x.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


LAYOUTS = [
    transposed, every_second, reversed_twice, read_only, other_byte_order, unaligned,
    np.asfortranarray, np.ndarray.tolist, Foreign, Exported,
]  # fmt: skip


@every_function
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_any_memory_layout(fn, layout):
    """fla#1138, FlagAttention PR#1."""
    given = inputs() | OPTIONS
    want = results(fn, given)
    other = {name: layout(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    for x, y in zip(results(fn, other), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-14)


@every_function
def test_zero_strides(fn):
    """One row of everything, repeated by `broadcast_to`."""
    one = inputs(q=(1, 1, 3), k=(1, 1, 3), v=(1, 1, 4))
    shapes = {name: x.shape for name, x in inputs().items() if isinstance(x, np.ndarray)}
    flat = {name: np.broadcast_to(one[name], shape) for name, shape in shapes.items()}
    flat |= {"block_q": 2, "block_k": 3}
    copies = {name: np.array(x) if isinstance(x, np.ndarray) else x for name, x in flat.items()}
    for x, y in zip(results(fn, flat), results(fn, copies), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-14)


def test_packed_sequences_take_any_layout():
    given = packed_inputs()
    want = results(PACKED, given)
    for layout in LAYOUTS:
        other = {name: layout(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        for x, y in zip(results(PACKED, other), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-14, err_msg=layout.__name__)


@pytest.mark.parametrize("fn", ATTENTION, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_inputs_are_left_alone_and_share_nothing(fn, dtype):
    if fn is PACKED:
        given = packed_inputs()
    else:
        given = inputs(dtype=dtype) | OPTIONS
    for name in ("q", "k", "v"):
        given[name] = given[name].astype(dtype)
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    before = {name: x.tobytes() for name, x in arrays.items()}
    got = results(fn, {**given, "softcap": 3.0, "dropout_p": 0.3, "seed": 1})
    for x in got:
        assert x.flags.writeable
        for name, y in arrays.items():
            assert not np.shares_memory(x, y), f"a result is a view of {name}"
        x.fill(0)
    for name, x in arrays.items():
        assert x.tobytes() == before[name], f"{name} was changed"


@pytest.mark.parametrize("rung", rungs(blocks=[(16, 16)]), ids=str)
def test_no_view_even_where_the_answer_is_an_input(rung):
    """One key: o is v, dv is do."""
    q = k = np.ones((1, 3))
    v, do = np.ones((1, 4)), np.ones((1, 4))
    for x in rung.run(q, k, v, do):
        assert not any(np.shares_memory(x, y) for y in (q, v, do))


def test_softmax_and_merge_share_nothing_and_change_nothing():
    for dtype in (np.float64, np.float32, np.float16):
        x = np.array([[1, 2, 3], [4, -INF, 6]], dtype)
        x.flags.writeable = False
        for softmax in (flashref.naive_softmax, flashref.safe_softmax, flashref.online_softmax):
            assert not np.shares_memory(softmax(x), x)
            assert softmax(x).dtype == dtype
        o, lse = np.ones((3, 2), dtype), np.zeros(3, dtype)
        empty = np.full(3, -INF, dtype)
        for got in flashref.merge_attention(o, lse, o, empty):
            assert not any(np.shares_memory(got, y) for y in (o, lse, empty))
            assert got.flags.writeable
        assert (o == 1).all()
        v = np.ones((3, 1), dtype)
        for step in flashref.online_softmax_steps(x, v, block=3):
            assert not any(np.shares_memory(y, z) for y in (step.m, step.l, step.o) for z in (x, v))


NUMPY_SCALARS = {
    "scale": np.float32(0.5),
    "softcap": np.array(3.0),
    "dropout_p": np.float32(0.25),
    "seed": np.int64(3),
    "causal": np.True_,
    "window": [np.int64(1), None],
    "block_q": np.int32(2),
    "block_k": np.uint8(3),
}


@pytest.mark.parametrize("fn", ATTENTION, ids=lambda fn: fn.__name__)
def test_numpy_scalars_are_numbers(fn):
    """And a NumPy float64 beside float32 arrays does not widen the result."""
    given = packed_inputs() if fn is PACKED else inputs()
    for name in ("q", "k", "v", "do", "o", "lse"):
        if name in given:
            given[name] = given[name].astype(np.float32)
    plain = {"scale": 0.5, "softcap": 3, "dropout_p": 0.25, "seed": 3, "causal": True}
    plain |= {"window": (1, None), "block_q": 2, "block_k": 3}
    want = results(fn, given | plain)
    for x, y in zip(results(fn, given | NUMPY_SCALARS), want, strict=True):
        assert x.dtype == y.dtype == np.float32
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["q", "mask", "return_lse"])
def test_options_are_by_name_alone(name):
    """A fourth positional argument would be guessed at: scale? mask?"""
    with pytest.raises(TypeError):
        flashref.standard_attention(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)), name)

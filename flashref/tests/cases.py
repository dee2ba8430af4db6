"""The grid: every algorithm must answer like the oracle on each of these cases.

`AXES` lists what may vary. `CASES` covers it pairwise: for any two axes, every value of one meets
every value of the other in some case, as far as `possible` allows. `SLOW_CASES` are long rows and
large squares, in which every value of every axis occurs. All of it is data, made again from seeds.
"""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np

from flashref.tests.oracle import seen_pairs

ALGORITHMS = (
    "standard_attention",
    "flash_attention_1",
    "flash_attention_2",
    "block_sparse_attention",
)

MORE = "more than n"  # stands for a size or a reach that exceeds n

AXES = {
    "n": [
        (1, 1), (1, 3), (2, 1), (3, 5), (5, 3), (1, 17), (17, 1), (16, 16), (15, 17), (33, 64),
        (97, 97), (113, 203), (203, 113), (128, 128), (257, 129), (1, 1000), (0, 5), (5, 0), (0, 0),
    ],
    "width": [
        (1, 1), (8, 8), (16, 16), (40, 40), (64, 64), (111, 111), (128, 128), (16, 8), (8, 24),
        (192, 128), (63, 1),
    ],
    "data": [
        "std 1", "std 3", "std 10", "uniform", "zeros", "constant 1000", "near -2.4e5",
        "heavy tails", "real",
    ],
    "blocks": [(1, 1), (4, 4), (3, 7), (16, 32), (32, 16), (64, 128), MORE, None],
    "heads": [  # None is 2-D, else (batch axes, H_q, H_kv)
        None, ((), 4, 4), ((), 4, 2), ((), 6, 3), ((2,), 1, 1), ((2,), 6, 2), ((), 8, 1),
        ((2, 3), 2, 1),
    ],
    "layout": [
        "plain", "list", "Fortran", "every second", "reversed", "read-only", "DLPack", "__array__",
    ],
    "window": [None, (0, 0), (1, 0), (3, 2), (None, 2), (5, None), (MORE, MORE)],
    "softcap": [None, 0, 1, 15, 50],
    "mask": [None, "random", "rows", "keys", "per head"],
    "scale": [None, 0.3, 1, -0.25, 0],
    "bias": [None, "full", "keys", "-inf"],
    "dropout_p": [0, 0.17, 0.5, 0.97],
    "dtype": ["float64", "float32", "float16"],
    "causal": [False, True, "top-left"],
    "poison": [None, math.nan, math.inf],
    "alibi": [False, True],
}  # fmt: skip
SLOW_SIZES = [(1023, 1024), (1, 4096)]

MOST_TILES = 2200  # per call: a tile costs the tiled algorithms about 0.1 ms, there and back
MOST_SCORES = 2**21  # per call: the oracle keeps ten float64 matrices of them


def possible(values):
    """Return whether these values can meet, whatever the axes not named will be.

    Lists become float64, and an empty list has lost its width. Blocks of one element are not for
    large sizes: their loops would take most of the time of the whole grid.
    """
    n_q, n_k = values.get("n", (1, 1))
    if values.get("layout") == "list":
        if values.get("dtype", "float64") != "float64" or n_q == 0 or n_k == 0:
            return False
    block_q, block_k = _block_sizes(values.get("blocks"), n_q, n_k)
    heads = math.prod(_lead(values.get("heads")))
    tiles = heads * math.ceil(n_q / block_q) * math.ceil(n_k / block_k)
    return tiles <= MOST_TILES and heads * n_q * n_k <= MOST_SCORES


@dataclass(frozen=True)
class Case:
    """One point of the grid; `inputs` makes its arrays."""

    number: int
    n: tuple
    width: tuple
    data: str
    blocks: tuple | str | None
    heads: tuple | None
    layout: str
    window: tuple | None
    softcap: float | None
    mask: str | None
    scale: float | None
    bias: str | None
    dropout_p: float
    dtype: str
    causal: bool | str
    poison: float | None
    alibi: bool

    def __str__(self):
        """Name the case by its number, sizes and dtype: 17-33x64-d16.8-float32."""
        slow = "slow-" * (self.n in SLOW_SIZES)
        return slow + "{}-{}x{}-d{}.{}-{}".format(self.number, *self.n, *self.width, self.dtype)

    @property
    def lead(self):
        """The batch and head axes of q, () if it is 2-D."""
        return _lead(self.heads)

    def block_sizes(self, algorithm):
        """Return (block_q, block_k); None asks for the algorithm's default, where it has one."""
        if self.blocks is None and algorithm != "block_sparse_attention":
            return None, None
        return _block_sizes(self.blocks or (16, 16), *self.n)

    def inputs(self, algorithm):
        """Return the arrays and options of this case for one algorithm."""
        return Inputs(self, algorithm)


class Inputs:
    """The arrays of a case: `q, k, v, do`, the `options` of the call and those of the `oracle`.

    They come as plain arrays; `lay_out` turns one into the layout of the case.
    """

    def __init__(self, case, algorithm):
        self.case, rng = case, np.random.default_rng([case.number, 2024])
        (n_q, n_k), (d, d_v), lead = case.n, case.width, case.lead
        kv_lead = (*case.heads[0], case.heads[2]) if case.heads else ()
        shapes = (*lead, n_q, d), (*kv_lead, n_k, d), (*kv_lead, n_k, d_v)
        q, k, v = _draw(case, shapes, rng)
        do = rng.standard_normal((*lead, n_q, d_v))
        self.q, self.k, self.v, self.do = (x.astype(case.dtype) for x in (q, k, v, do))
        rules = {
            "causal": case.causal,
            "window": _window(case),
            "mask": _mask(case, rng),
            "bias": _bias(case, rng),
        }
        slopes = None
        if case.alibi:
            slopes = 2.0 ** -rng.integers(0, 8, lead)
        self.block_q, self.block_k = case.block_sizes(algorithm)
        tiles = {}
        if algorithm == "block_sparse_attention":
            grid = (math.ceil(n_q / self.block_q), math.ceil(n_k / self.block_k))
            tiles["block_mask"] = rng.random((*lead, *grid) if case.number % 2 else grid) < 0.6
        seen = seen_pairs(
            lead, n_q, n_k, **rules, **tiles, block_q=self.block_q, block_k=self.block_k
        )
        if case.poison is not None:
            self._poison(rules, seen)
        self.empty_rows = ~seen.any(-1)
        common = {
            **rules,
            "scale": case.scale,
            "softcap": case.softcap,
            "alibi_slopes": slopes,
            "dropout_p": case.dropout_p,
        }
        self.seed = 1000 + case.number
        self.options = {**common, **tiles, "seed": self.seed}
        self.oracle = {**common, **tiles}
        if tiles:
            self.oracle |= {"block_q": self.block_q, "block_k": self.block_k}

    def lay_out(self, x):
        """Return x in the memory layout of the case, or as what else may stand for an array."""
        return LAYOUTS[self.case.layout](x)

    def _poison(self, rules, seen):
        """Put NaN or inf wherever nobody may look; a bias counts as seen if the rest agrees."""
        case = self.case
        self.q[~seen.any(-1)] = self.do[~seen.any(-1)] = case.poison
        keys = seen.any(-2)
        if case.heads:
            batch, heads_q, heads_kv = case.heads
            keys = keys.reshape(*batch, heads_kv, heads_q // heads_kv, -1).any(-2)
        self.k[~keys] = self.v[~keys] = case.poison
        if case.bias == "full":
            rules["bias"] = np.where(seen, rules["bias"], case.poison).astype(case.dtype)


def _lead(heads):
    return () if heads is None else (*heads[0], heads[1])


def _block_sizes(blocks, n_q, n_k):
    return (n_q + 7, n_k + 7) if blocks in (MORE, None) else blocks


def _draw(case, shapes, rng):
    """Return q, k, v as float64; different numbers in every head."""
    d = case.width[0]
    normal = [rng.standard_normal(shape) for shape in shapes]
    match case.data:
        case "std 1" | "std 3" | "std 10":
            return [int(case.data[4:]) * x for x in normal]
        case "uniform":
            return [rng.random(shape) for shape in shapes]
        case "zeros":  # every score is 0; a v of zeros would hide everything else
            return np.zeros(shapes[0]), np.zeros(shapes[1]), normal[2]
        case "constant 1000":
            return [np.full(shape, 1000.0) for shape in shapes]
        case "near -2.4e5":  # by the default scale, with differences of order 1 between the keys
            far = math.sqrt(2.4e5 / math.sqrt(d))
            return far + normal[0] / far, -far + normal[1] / far, normal[2]
        case "heavy tails":
            return [rng.standard_t(2, shape) for shape in shapes]
        case "real":
            return _real(case, shapes)


def _real(case, shapes):
    """Return activations of a trained transformer, repeated where a shape asks for more of them."""
    from flashref.data import real_qkv

    arrays = real_qkv(layer=(0, 1, 5)[case.number % 3])
    cut = []
    for x, (*lead, n, d) in zip(arrays, shapes, strict=True):
        heads = np.arange(math.prod(lead)).reshape(lead)
        for axis, index in ((0, heads.ravel()), (1, np.arange(n)), (2, np.arange(d))):
            x = x.take(index, axis, mode="wrap")
        cut.append(x.reshape(*lead, n, d).astype(np.float64))
    return cut


def _window(case):
    if case.window is None:
        return None
    return tuple(sum(case.n) + 3 if side == MORE else side for side in case.window)


def _mask(case, rng):
    """Return a mask of the shape that its kind is usually given in."""
    n_q, n_k = case.n
    match case.mask:
        case None:
            return None
        case "random":
            return rng.random((n_q, n_k)) < 0.7
        case "rows":
            return rng.random((n_q, 1)) < 0.7
        case "keys":  # padding before and behind, of another length in each batch
            batch = case.heads[0] if case.heads else ()
            first = rng.integers(0, n_k // 2 + 1, (*batch, 1))
            last = rng.integers(n_k // 2, n_k + 1, (*batch, 1))
            mask = (np.arange(n_k) >= first) & (np.arange(n_k) < last)
            return mask[..., None, None, :] if case.heads else mask
        case "per head":
            return rng.random((*case.lead, n_q, n_k)) < 0.7


def _bias(case, rng):
    n_q, n_k = case.n
    match case.bias:
        case None:
            return None
        case "full":
            bias = 2 * rng.standard_normal((*case.lead, n_q, n_k))
        case "keys":
            bias = 2 * rng.standard_normal(n_k)
        case "-inf":
            bias = np.where(rng.random((n_q, n_k)) < 0.3, -np.inf, rng.standard_normal((n_q, n_k)))
    return bias.astype(case.dtype)


class _OnlyDLPack:
    """An array of another library: no `__array__`, only DLPack and a shape."""

    def __init__(self, x):
        self._x, self.shape = x.copy(), x.shape  # a read-only array cannot be exported

    def __dlpack__(self, **how):
        return self._x.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


class _OnlyArray:
    """An array of another library: `__array__` and a shape."""

    def __init__(self, x):
        self._x, self.shape = x, x.shape

    def __array__(self, dtype=None, copy=None):
        return np.array(self._x, dtype=dtype, copy=copy)


def _every_second(x):
    spread = np.full([2 * n for n in x.shape], np.nan, x.dtype)
    part = spread[(slice(None, None, 2),) * x.ndim]
    part[...] = x
    return part


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "plain": np.copy,
    "list": np.ndarray.tolist,
    "Fortran": lambda x: np.array(x, order="F"),
    "every second": _every_second,
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "read-only": _read_only,
    "DLPack": _OnlyDLPack,
    "__array__": _OnlyArray,
}


# One small problem with every option: 4 query heads on 2 key heads, 5 queries, 7 keys -------------


def small_problem(seed=0):
    """Return normal q (4, 5, 3), k (2, 7, 3), v (2, 7, 2) and do (4, 5, 2) in float64."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in ((4, 5, 3), (2, 7, 3), (2, 7, 2), (4, 5, 2))]


def _small_options():
    """Return options for the small problem: each in turn, then all together."""
    rng = np.random.default_rng(7)
    mask = rng.random((5, 7)) < 0.7
    mask[2] = False  # a query that sees nothing
    mask[:, 4] = False  # a key that nobody sees
    bias = rng.standard_normal((4, 5, 7))
    in_turn = {
        "scale": {"scale": 0.8},
        "negative scale": {"scale": -0.6},
        "causal": {"causal": True},
        "top-left": {"causal": "top-left"},
        "window": {"window": (2, 1)},
        "mask": {"mask": mask},
        "bias": {"bias": bias},
        "bias -inf": {"bias": np.where(rng.random((5, 7)) < 0.3, -np.inf, bias[0])},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 1.0])},
        "softcap": {"softcap": 1.5},
        "dropout": {"dropout_p": 0.4, "seed": 11},
    }
    together = {
        "scale": 0.8, "causal": True, "window": (4, None), "mask": mask, "bias": bias,
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 1.0]), "softcap": 1.5, "dropout_p": 0.4,
        "seed": 11,
    }  # fmt: skip
    return {"none": {}, **in_turn, "all": together}


SMALL_OPTIONS = _small_options()


def pairs_of(values):
    """Return every pair of ((axis, value), (axis, value)) in a choice of values, in axis order."""
    return set(itertools.combinations(values.items(), 2))


def possible_pairs(axes=AXES):
    """Return every pair of values of two axes that can meet."""
    singles = [(name, value) for name in axes for value in axes[name]]
    return {
        (a, b)
        for a, b in itertools.combinations(singles, 2)
        if a[0] != b[0] and possible(dict([a, b]))
    }


def all_pairs(axes=AXES, seed=0, tries=20):
    """Return choices of one value per axis in which every possible pair of values meets.

    Greedy: each choice starts with a pair not met yet and takes, axis by axis, the value that meets
    the most such pairs; the best of several tries in random order is kept.
    """
    rng = random.Random(seed)
    singles = [(name, value) for name in axes for value in axes[name]]
    number = {single: at for at, single in enumerate(singles)}
    owed = np.zeros((len(singles), len(singles)), np.int16)
    for a, b in possible_pairs(axes):
        owed[number[a], number[b]] = owed[number[b], number[a]] = 1
    choices = []
    while owed.any():
        a, b = (singles[at] for at in np.argwhere(owed)[rng.randrange(owed.sum())])
        attempts = [_fill(dict([a, b]), axes, number, owed, rng) for _ in range(tries)]
        best, met = max(attempts, key=lambda attempt: len(attempt[1]))
        owed[tuple(np.transpose(met))] = 0
        choices.append({name: best[name] for name in axes})
    return choices


def _fill(values, axes, number, owed, rng):
    """Complete a choice of values; also return the pairs that it meets for the first time."""
    chosen = [number[single] for single in values.items()]
    gain = owed[chosen].sum(axis=0)
    for name in rng.sample(list(axes), len(axes)):
        if name in values:
            continue
        options = sorted(axes[name], key=lambda v: (-gain[number[name, v]], rng.random()))
        values[name] = next(v for v in options if possible({**values, name: v}))
        chosen.append(number[name, values[name]])
        gain += owed[chosen[-1]]
    at = np.ix_(chosen, chosen)
    met = [(chosen[i], chosen[j]) for i, j in np.argwhere(owed[at])]
    return values, met


def _slow_choices(size, seed):
    """Return a few choices at one size, in which every value that is possible there occurs."""
    rng = random.Random(seed)
    left = {
        name: [v for v in axes if possible({"n": size, name: v})] for name, axes in AXES.items()
    }
    left["n"] = [size]
    some = {name: list(values) for name, values in left.items()}
    choices = []
    while any(left[name] for name in left if name != "n"):
        values = {"n": size}
        for name in rng.sample(list(AXES), len(AXES)):
            if name == "n":
                continue
            options = left[name] + rng.sample(some[name], len(some[name]))
            values[name] = next(v for v in options if possible({**values, name: v}))
            if values[name] in left[name]:
                left[name].remove(values[name])
        choices.append({name: values[name] for name in AXES})
    return choices


CASES = [Case(number, **values) for number, values in enumerate(all_pairs())]
SLOW_CASES = [
    Case(1000 * (1 + at) + number, **values)
    for at, size in enumerate(SLOW_SIZES)
    for number, values in enumerate(_slow_choices(size, seed=at))
]

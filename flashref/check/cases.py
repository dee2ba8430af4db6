"""The questions that a check asks: from numbers one can follow by hand to what breaks wrong code.

One input is no test: equal maxima hide a missing rescale, square inputs hide alignment, sizes that
divide hide tails, equal heads hide head errors, do = 1 hides D, small scores hide every overflow.
So each sequence holds several of each, and no two rows are alike. Options come together, and with
heads; some cases ask for o alone, where most ask for lse too. Cases share shapes where they
can, and those that ask again in one more shape are marked: JAX compiles every operation anew for
each shape, and that takes it longer than all else.

Scores that hunt for overflow are whole numbers, exact in float32 too, and keep away from where one
precision overflows and the other does not (88 to 104, 709 to 746).
"""

import zlib
from dataclasses import dataclass, field, replace

import numpy as np

AXES = {"lse": 1, "lse_a": 1, "lse_b": 1, "x": 1}  #: of the plain size; 2 for what is not here
UNLIFTED = ("mask", "block_mask")
#: of the backward pass, (n_q, n_k), for what is compiled anew for each: gradients take long there
FEW_SIZES = {(2, 3), (3, 3), (3, 2), (7, 9), (40, 40), (131, 150)}
GROUPED = "fewer key heads than query heads"
LOWEST = -(2.0**31)  #: a score; a power of two: exact in any precision
WIDE = "d = 3 and d_v = 6: values wider than keys"
#: with 4 on 2 alone, h // 2 and h // H_kv are right too; and with 6 on 3, h // 2
GROUPS = tuple(
    (f"{n_heads} query heads on {n_kv} key head{'s' * (n_kv > 1)}", (batch, n_heads), (batch, n_kv))
    for batch, n_heads, n_kv in ((2, 4, 2), (1, 6, 3), (1, 6, 2), (1, 3, 1))
)
FEW_PAIRS = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool)  #: a mask that leaves no row empty
ODD_SCALES = (
    ("scale=0: all keys weigh the same", 0.0),
    ("scale=-1: the smallest product weighs most", -1.0),
)


@dataclass(frozen=True)
class Case:
    """One call: what goes in, and what the function must be able to do for it."""

    title: str
    inputs: dict  #: what every function takes
    options: dict = field(default_factory=dict)  #: what it must have, or the case is left out
    blocks: tuple | None = None  #: (B_r, B_c) where the function has them; None leaves them out
    larger: str = ""  #: a size that a function may refuse: what to call it in the report
    hunts: bool = False  #: for overflow and the like, with the wider tolerance
    plain: str = ""  #: the title for a function without blocks, if it is another one
    again: bool = False  #: asks in one more shape what others ask; left out where shapes are dear
    alone: bool = False  #: asks for o alone, as most callers do, where lse can be had too

    def __getitem__(self, role):
        return self.inputs[role] if role in self.inputs else self.options[role]

    def __contains__(self, role):
        return role in self.inputs or role in self.options

    def get(self, role, default=None):
        """Return an input or an option, or the default."""
        return self[role] if role in self else default

    @property
    def refusable(self):
        """What a function may refuse here, if it says so by `raise` or `assert`; "" for nothing."""
        by_position = self.get("causal") or self.get("window") is not None
        if by_position and not self.square:
            sign = "<" if self["q"].shape[-2] < self["k"].shape[-2] else ">"
            return f"{'causal' if self.get('causal') else 'a window'} with n_q {sign} n_k"
        masks = (self.get("causal"), self.get("window") is not None, self.get("mask") is not None)
        if sum(map(bool, masks)) > 1:
            return "two masks at once"
        scale = self.get("scale")
        return "a scale of 0 or below" if scale is not None and scale <= 0 else ""

    @property
    def square(self):
        """Whether there are as many queries as keys."""
        return "q" not in self or self["q"].shape[-2] == self["k"].shape[-2]

    def lifted(self, axes):
        """Return the case with more axes of length 1 in front, for functions that need them."""
        extra = (None,) * axes
        arrays = {
            role: x[extra] if isinstance(x, np.ndarray) and role not in UNLIFTED else x
            for role, x in self.inputs.items()
        }
        return replace(self, inputs=arrays)

    def equally_wide(self):
        """Return the case with d_v = d, for functions that know one width only."""
        if "q" not in self:
            return (
                self if "d" not in self else replace(self, inputs={**self.inputs, "d_v": self["d"]})
            )
        d, inputs = self["q"].shape[-1], dict(self.inputs)
        for role in ("v", "do"):
            if role in inputs:
                x = inputs[role]
                columns = [x[..., c % x.shape[-1]] + c // x.shape[-1] for c in range(d)]
                inputs[role] = np.stack(columns, axis=-1)
        return replace(self, inputs=inputs)


class Numbers:
    """Random numbers that depend on the seed and on what they are for, not on their order."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, title, *shape):
        """Return standard normal numbers."""
        rng = np.random.default_rng([self.seed, zlib.crc32(title.encode())])
        return rng.standard_normal(shape)

    def integers(self, title, *shape, low=-3, high=4):
        """Return small whole numbers as floats."""
        rng = np.random.default_rng([self.seed, zlib.crc32(title.encode())])
        return rng.integers(low, high, shape).astype(float)


def arrays(*rows):
    """Return lists as float arrays."""
    return [np.array(x, float) for x in rows]


# --- softmax ------------------------------------------------------------------------------------


def softmax_cases(seed):
    """Return the cases for softmax and online softmax."""
    random = Numbers(seed)
    rows = []

    def row(title, x, block=2, **more):
        rows.append(Case(title, {"x": np.asarray(x, float)}, blocks=(block, block), **more))

    row("three scores", [1, 2, 3], 3)
    row("the largest score comes last", [1, 2, 3, 10])
    row("the largest score comes first", [9, 4, 2, 1])
    row("the largest score twice", [1, 3, 3, 2], 1)
    tail = "five scores in blocks of 2: the last block is shorter"
    row(tail, [2, 0, 1, 3, 2.5], plain="five scores")
    row("fewer scores than a block holds", [0.5, -1, 2], 8, plain="three scores of both signs")
    row("one score", [-4], 1)
    row("negative scores", [-3, -1, -2, -5])
    row("blocks of one", [3, 1, 4, 1.5, 9], 1, plain="other five scores")
    row("random scores", 3 * random("softmax 1", 9), 4)
    row("other random scores", 3 * random("softmax 2", 9), 4)
    row("scores that grow, from -15 to 15", np.linspace(-15, 15, 40) + random("grow", 40) / 9, 16)
    row("scores that fall, from 15 to -15", np.linspace(15, -15, 41) + random("fall", 41) / 9, 16)
    row("large scores", [1000, 999, 0], 2, hunts=True)
    row("large scores that grow", [0, 1000, 1001, 2000, 1999], 2, hunts=True)
    row("very negative scores", [-1000, -1001], 1, hunts=True)
    row("very negative scores that grow", [-3000, -2000, -2001, -1000, -1002], 2, hunts=True)
    row("huge scores of both signs", [-20000, 10000, 9999, 0], 2, hunts=True)
    row("scores near -20000", [-20000, -20001], 1, hunts=True)
    row("scores near -20000, the last block shorter", [-20000, -20001, -20003], 2, hunts=True)
    # all weight on one score: float32 holds its lse exactly
    row("scores of -240000 and lower", [-240000, -480000], 1, hunts=True)
    row("one score far above the others, last", [0, 1, 2, 900], 2, hunts=True)
    row("one score far above the others, first", [900, 2, 1, 0], 2, hunts=True)
    row("1050 scores", 4 * random("long", 1050) + np.linspace(-5, 5, 1050), 100)
    # a square one first: there rows that use each other's numbers raise no error
    square = [[1, 2, 3], [3, 1, -1], [0, 4, 2]]
    row("three rows of three", square, 2, larger="rows of a matrix")
    for options, title in (({}, ""), ({"axis": -1}, ", axis=-1")):
        table = [[1, 2, 3], [3, 1, -1]]
        row(f"two rows{title}", table, 2, larger="rows of a matrix", options=options)
    far_apart = [[1000, 999, 998], [-1000, -1001, -1000], [0, 1, -1]]
    row("rows far apart", far_apart, 2, larger="rows of a matrix", hunts=True)
    row("a random matrix", 3 * random("matrix", 5, 7), 3, larger="rows of a matrix")
    row("three axes", 3 * random("cube", 2, 3, 5), 2, larger="rows of a matrix")
    for axis in (0, 1, -2):
        options = {"axis": axis}
        x = 3 * random(f"axis {axis}", 4, 6, 5)
        row(f"three axes, axis={axis}", x, 3, larger="rows of a matrix", options=options)
    return rows


def masked_rows():
    """Return rows with scores of -inf, as masks make them."""
    inf = np.inf
    rows = [-inf, 1, 2, 3], [-inf, -inf, 1, 1], [3, 1, -inf, -inf], [2, -inf, 1, -inf], [-inf, -inf]
    return tuple(
        Case(f"[{', '.join(f'{x:g}' for x in row)}]", {"x": np.array(row)}, blocks=(2, 2))
        for row in rows
    )


def masked_matrix():
    """Return rows of which one is masked, and another in part."""
    inf = np.inf
    x = np.array([[1, 2, 3], [-inf, -inf, -inf], [-inf, 1, 0]])
    return Case("rows, one of them all -inf", {"x": x}, blocks=(2, 2), larger="rows of a matrix")


def merge_cases(seed):
    """Return the cases for merge_attention."""
    random = Numbers(seed)
    cases, inf = [], np.inf

    def case(title, o_a, lse_a, o_b, lse_b, **more):
        o_a, lse_a, o_b, lse_b = arrays(o_a, lse_a, o_b, lse_b)
        inputs = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
        cases.append(Case(title, inputs, **more))

    case("one row: 1 with lse 0, 3 with lse log 3", [[1]], [0], [[3]], [np.log(3)])
    case(
        "two rows, three columns",
        [[1, 2, 3], [4, 5, 6]], [0, 2], [[3, 0, 1], [1, 1, 2]], [1, -1],
    )  # fmt: skip
    case("two parts of the same weight", [[1, 2], [3, 4], [5, 0]], [2, 0, 1],
         [[3, 0], [1, 2], [4, 6]], [2, 1, 1])  # fmt: skip
    # there weights along the wrong axis raise no error
    case("as many rows as columns", [[1, 2], [3, 5]], [0, 2], [[3, 0], [1, 1]], [1, -1])
    case("the heavier part first", [[1, 5, 2]], [3], [[7, 6, 5]], [-1])

    def both(title, n, d, shift=0, spread=3):
        o_a, o_b = random(f"{title} a", n, d), random(f"{title} b", n, d)
        lse_a, lse_b = random(f"{title} lse a", n), random(f"{title} lse b", n)
        return o_a, spread * lse_a + shift, o_b, spread * lse_b + shift

    case("random parts", *both("merge 1", 5, 3))
    case("other random parts", *both("merge 2", 5, 3))
    case("one value column", *both("merge 3", 7, 1))
    case("both lse around 1000", [[1, 2], [3, 4], [2, 0]], [1000, 1003, 1001],
         [[5, 7], [0, 1], [1, 2]], [1001, 1000, 1001], hunts=True)  # fmt: skip
    case("both lse around -2000", [[1, 2], [3, 4], [2, 0]], [-2000, -2003, -2001],
         [[5, 7], [0, 1], [1, 2]], [-2001, -2000, -2001], hunts=True)  # fmt: skip
    case("lse far apart", [[1, 2], [3, 4], [2, 0]], [-1000, 1000, 5],
         [[5, 7], [0, 1], [1, 2]], [1000, -1000, -3000], hunts=True)  # fmt: skip
    case("the first part is empty", [[0, 0]], [-inf], [[5, 7]], [1.5])
    case("the second part is empty", [[5, 7]], [-1.5], [[0, 0]], [-inf])
    case("both parts are empty", [[0, 0], [1, 2]], [-inf, 0.5], [[0, 0], [4, 3]], [-inf, 1])
    o_a, lse_a, o_b, lse_b = both("merge heads", 30, 3)
    lead = (2, 3, 5)
    parts = [x.reshape(*lead, *x.shape[1:]) for x in (o_a, lse_a, o_b, lse_b)]
    case("batch and heads, (2, 3, 5, 3)", *parts, larger="batch and heads")
    return cases


# --- attention ----------------------------------------------------------------------------------


def with_scores(S, V):
    """Return q, k, v with d = 4 whose scores at the default scale 1/2 are exactly S, (<= 4, n)."""
    S, V = arrays(S, V)
    K = np.zeros((S.shape[1], 4))
    K[:, : len(S)] = S.T
    return {"q": 2 * np.eye(len(S), 4), "k": K, "v": V}


def values(n, d_v=2):
    """Return small values, no two rows alike: [1, 2], [3, 4], ..."""
    return np.arange(1.0, n * d_v + 1).reshape(n, d_v)


def random_qkv(random, title, n_q, n_k, d=8, d_v=5, lead=(), kv_lead=None, spread=1.0):
    """Return random q, k, v; `spread` widens the scores."""
    kv_lead = lead if kv_lead is None else kv_lead
    return {
        "q": spread * random(f"{title} q", *lead, n_q, d),
        "k": random(f"{title} k", *kv_lead, n_k, d),
        "v": random(f"{title} v", *kv_lead, n_k, d_v),
    }


def growing(random, title, n_q, n_k, low=-15, high=15):
    """Return q, k, v whose scores grow from key to key, so that the maximum changes often."""
    s = np.linspace(low, high, n_k) + random(f"{title} s", n_k) / 9
    q = np.concatenate([2 + random(f"{title} q", n_q, 1) / 9, random(f"{title} r", n_q, 3)], axis=1)
    k = np.concatenate([s[:, None], random(f"{title} k", n_k, 3)], axis=1)
    return {"q": q, "k": k, "v": random(f"{title} v", n_k, 3)}


def real_qkv(rows):
    """Return q, k, v of one head of a trained transformer; its scores reach from -22 to 11."""
    from flashref.data import real_qkv

    q, k, v = (x[9, :rows].astype(float) for x in real_qkv(layer=1))
    return {"q": q, "k": k, "v": v}


def attention_cases(seed):
    """Return the cases for attention."""
    random = Numbers(seed)
    cases = []

    def case(title, inputs, blocks, options=None, **more):
        cases.append(Case(title, inputs, options or {}, blocks, **more))

    late = [[1, 2, 3, 10], [10, 3, 2, 1], [1, 1, 1, 1]]

    case("2 queries, 3 keys", with_scores([[0, 1, 2], [2, 0, 1]], values(3)), (2, 3))
    case("the largest score last in row 0, first in row 1", with_scores(late, values(4)), (3, 2))
    tail = with_scores([[1, 0, 2, 1, 3], [0, 2, 1, 1, -1]], values(5))
    title = "5 keys in blocks of 2: the last block is shorter"
    case(title, tail, (2, 2), plain="2 queries, 5 keys")
    case(
        "3 queries in blocks of 2: the last block is shorter",
        with_scores([[1, 0], [0, 2], [3, 1]], values(2)),
        (2, 2),
        plain="3 queries, 2 keys",
    )
    small = with_scores([[1, 2, 1], [0, 2, 4]], values(3))
    other, another = "2 queries, 3 keys, other scores", "2 queries, 3 keys, yet other scores"
    case("blocks larger than the matrix", small, (8, 8), plain=other)
    ones = with_scores([[1, 3, 2], [2, 0, 1]], values(3))
    case("blocks of one", ones, (1, 1), plain=another)
    case("one query", random_qkv(random, "one query", 1, 3, 4, 2), (2, 2), again=True)
    case("one key", random_qkv(random, "one key", 3, 1), (2, 2), again=True)
    case("d = 1", random_qkv(random, "d = 1", 4, 5, 1, 1), (3, 2), again=True)
    case(WIDE, random_qkv(random, WIDE, 5, 7, 3, 6), (2, 4))
    case("d = 80", random_qkv(random, "d = 80", 5, 7, 80, 70), (2, 4), again=True)
    case("random numbers", random_qkv(random, "attention 1", 7, 9), (3, 4))
    case("other random numbers", random_qkv(random, "attention 2", 7, 9), (3, 4), alone=True)
    case("as many queries as keys", random_qkv(random, "square", 11, 11, spread=2), (4, 3))
    case("scores that grow from key to key", growing(random, "grow", 9, 41), (4, 16), again=True)
    case(
        "scores that fall from key to key",
        growing(random, "fall", 9, 41, 15, -15),
        (4, 16),
        again=True,
    )
    for scale in (0.3, 1.0):
        inputs = random_qkv(random, "scale", 7, 9)
        case(f"scale={scale}", inputs, (2, 4), {"scale": scale})
    for title, scale in ODD_SCALES:
        case(title, with_scores([[0, 1, 2], [2, 0, 1]], values(3)), (2, 2), {"scale": scale})
    case("real activations", real_qkv(64), (32, 48))
    for n_q, n_k in ((131, 150), (3, 1050), (1050, 3)):
        inputs = growing(random, f"{n_q} {n_k}", n_q, n_k, -5, 12)
        case(f"{n_q} queries, {n_k} keys", inputs, (64, 32), again=n_q > n_k)
    case("131 queries, 150 keys, blocks left out", growing(random, "free", 131, 150, -9, 9), None)

    def hunt(title, S, blocks, options=None):
        case(title, with_scores(S, values(len(S[0]))), blocks, options, hunts=True)

    hunt("large scores", [[1000, 999, 998], [0, 1000, 2000], [2000, 1000, 1000]], (2, 2))
    hunt("very negative scores", [[-1000, -1001, -1002], [-2000, -3000, -2001]], (2, 2))
    hunt("very negative scores that grow", [[-4000, -3000, -2000, -2001], [1, 2, 3, 4]], (2, 1))
    hunt("huge scores of both signs", [[-10000, 10000, 9999, 0], [0, -10000, 5, 6]], (2, 2))
    low = [[-20000, -20001, -20002], [-240000, -480000, -480001]]
    hunt("scores near -20000, and of -240000 and lower", low, (2, 2))
    # at the scale 1/2; at -1/2 their signs turn. Two keys lead at either end: the answer shows how
    # far apart they are, so abs(scale) is not taken for a scale of 1
    turned = [[-2000, -1999, 1000, 999], [-999, -1000, 0, 1]]
    hunt("scale=-0.5, large scores", turned, (2, 2), {"scale": -0.5})

    causal_cases(case, random, real_qkv(64))
    causal = {"causal": True}
    low = [[-20000, 0, 0], [-20001, -20000, 5], [1, -20000, 2]]
    hunt("causal, very negative scores", low, (2, 2), causal)
    lowest = [[LOWEST, 0, 0], [1, 2, 0], [LOWEST, 0, 1]]
    hunt("causal, a score of -2147483648", lowest, (1, 1), causal)
    hunt("causal, large scores", [[1000, 0, 0], [0, 1000, 2], [-1000, 2000, 1999]], (2, 2), causal)
    free = growing(random, "causal free", 70, 70, -9, 9)
    case("causal, 70 queries and 70 keys, blocks left out", free, None, causal, again=True)
    window_and_mask_cases(case, hunt, random)

    scale, window, mask = {"scale": 0.3}, {"window": (1, 0)}, {"mask": FEW_PAIRS}
    for title, options in (
        ("causal, scale=0.3", causal | scale),
        ("causal with a mask", causal | mask),
        ("a mask, scale=0.3", mask | scale),
        ("a window with a mask", window | mask),
        ("a window, scale=0.3", window | scale),
    ):
        inputs = random_qkv(random, title, 3, 3, 4, 2)
        case(f"{title}, 3 queries and 3 keys", inputs, (2, 2), options)

    def heads(title, lead, kv_lead, n_q, n_k, options=None, larger="several heads", **more):
        inputs = random_qkv(random, title, n_q, n_k, 4, 3, lead, kv_lead)
        again = bool(options) or lead == (1, 2)
        case(title, inputs, (2, 4), options, larger=larger, again=again, **more)

    heads("3 heads, (3, 5, 4)", (3,), None, 5, 7)
    heads("batch of 2 with 3 heads, (2, 3, 5, 4)", (2, 3), None, 5, 7)
    heads("batch of 2 with 3 heads, causal", (2, 3), None, 6, 6, causal)
    heads("batch of 1 with 2 heads, (1, 2, 5, 4)", (1, 2), None, 5, 7, alone=True)
    heads("2 heads, causal, 5 queries and 7 keys", (1, 2), None, 5, 7, causal, alone=True)
    heads("2 heads, scale=0.3", (1, 2), None, 3, 3, scale)
    heads("2 heads, window=(1, 0)", (1, 2), None, 3, 3, window)
    heads("2 heads, a mask", (1, 2), None, 3, 3, mask)
    for title, lead, kv_lead in GROUPS:
        heads(title, lead, kv_lead, 5, 7, larger=GROUPED, alone=kv_lead[-1] == 1)
    heads("4 query heads on 2 key heads, causal", (1, 4), (1, 2), 6, 6, causal, GROUPED)
    return cases


def causal_cases(case, random, real, spread=9):
    """Add the cases with a causal mask; `real` are q, k, v of a model."""
    causal = {"causal": True}
    S = [[1, 2, 0, 3], [2, 1, 3, 0], [0, 1, 1, 2], [3, 0, 2, 1]]
    for n, blocks in ((2, (2, 2)), (3, (2, 2)), (4, (2, 2))):
        inputs = with_scores([row[:n] for row in S[:n]], values(n))
        case(f"causal, {n} queries and {n} keys", inputs, blocks, causal, again=n != 3)
    case(
        "causal, 1 query and 3 keys: it sees them all",
        with_scores([S[0][:3]], values(3)),
        (2, 2),
        causal,
        again=True,
    )
    case(
        "causal, 2 queries and 4 keys: the last query sees the last key",
        with_scores(S[:2], values(4)),
        (2, 2),
        causal,
    )
    few = with_scores([row[:2] for row in S[:3]], values(2))
    case(
        "causal, 3 queries and 2 keys: the last query sees the last key, the first none",
        few,
        (2, 2),
        causal,
    )
    for n_q, n_k, blocks in ((11, 11, (3, 4)), (11, 11, (4, 2)), (7, 9, (3, 5)), (12, 7, (5, 3))):
        inputs = random_qkv(random, f"causal {n_q} {n_k} {blocks}", n_q, n_k)
        title = f"causal, random, {n_q} queries and {n_k} keys"
        other = blocks == (4, 2)
        title += ", other numbers" if other else ""
        case(title, inputs, blocks, causal, again=n_q > n_k, alone=other or n_q > n_k)
    for n_q, n_k in ((150, 150), (131, 150)):
        inputs = growing(random, f"causal {n_q} {n_k}", n_q, n_k, -spread, spread)
        case(f"causal, {n_q} queries and {n_k} keys", inputs, (64, 32), causal, again=n_q == n_k)
    case("causal, real activations", real, (16, 8), causal)


def window_and_mask_cases(case, hunt, random):
    """Add the cases with a window, or with a mask that the caller gives."""

    def window(n_q, n_k, window, blocks, causal=None):
        left, _ = window
        options = {"window": window} if causal is None else {"window": window, "causal": causal}
        title = f"window={window}{', causal' * bool(causal)}, {n_q} queries and {n_k} keys"
        shape = (4, 2) if n_q < 7 else (8, 5) if n_q < 100 else (4, 3)
        again = (n_q == n_k and n_q not in (3, 11)) or n_q > n_k
        inputs = random_qkv(random, title, n_q, n_k, *shape)
        case(title, inputs, blocks, options, again=again, alone=left == 0)

    window(3, 3, (1, 0), (2, 2))
    window(3, 3, (1, 1), (2, 2), causal=True)
    window(6, 6, (1, 0), (2, 2))
    window(11, 11, (0, 0), (2, 2))
    window(11, 11, (2, 1), (3, 4))
    window(7, 9, (2, 1), (2, 3))
    window(11, 11, (3, 2), (4, 2), causal=True)
    window(9, 7, (2, 1), (2, 3))
    window(7, 9, (0, 3), (2, 2))
    window(131, 150, (2, 0), (16, 16))
    window(131, 150, (5, 1), (64, 64))
    window(150, 150, (5, 1), (64, 64))
    low = [[-20000, 1, 2, 3], [0, -20000, 1, 2], [3, 2, -20000, 1], [1, 2, 3, -20000]]
    hunt("window=(0, 0), very negative scores", low, (2, 2), {"window": (0, 0)})

    def mask(title, seen, blocks, S=None, **more):
        seen = np.array(seen, bool)
        if S is None:
            inputs = random_qkv(random, title, *seen.shape)
        else:
            inputs = with_scores(S, values(seen.shape[1]))
        case(title, inputs, blocks, {"mask": seen}, **more)

    mask("a mask", [[1, 0, 1], [0, 1, 1]], (2, 2), [[1, 2, 3], [2, 0, 1]])
    first = [[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]]
    mask("a mask that hides a row's first block", first, (2, 2), [[0, 0, 1, 2]] * 3)
    mask("a mask that hides a whole row", [[1, 1, 0], [0, 0, 0]], (2, 2), [[1, 2, 3], [2, 0, 1]])
    seen = random("mask", 7, 9) > 0
    seen[:, 4] = True
    mask("a random mask", seen, (3, 4), alone=True)
    blind = random("mask 2", 11, 11) > 0.7
    blind[[2, 5]] = False
    mask("a random mask with empty rows", blind, (3, 4))
    late = np.zeros((5, 300), bool)
    late[:, 270:] = True
    late[3, :3] = True
    mask("a mask that hides most rows' first 270 keys", late, (4, 64))
    low = [[-20000, 1, 2], [0, -20000, 1]]
    mask("a mask, very negative scores", np.eye(2, 3), (2, 2), low, hunts=True)


# --- the backward pass --------------------------------------------------------------------------


def backward_cases(seed):
    """Return the cases for the backward pass; o and lse are added by the exercise."""
    random = Numbers(seed)
    cases = []

    def case(title, inputs, blocks, options=None, **more):
        shape = (*inputs["q"].shape[:-1], inputs["v"].shape[-1])
        do = random.integers(f"do {title}", *shape, low=-1, high=2)
        do += np.linspace(0.25, 0.75, shape[-2])[:, None]  # no row alike, none of zeros
        cases.append(Case(title, {"do": do, **inputs}, options or {}, blocks, **more))

    case("2 queries, 3 keys", with_scores([[0, 1, 2], [2, 0, 1]], values(3)), (2, 3))
    late = [[1, 2, 3, 5], [1, 1, 1, 1], [0, 1, 1, 2]]
    late = with_scores(late, values(4))
    case("3 queries, 4 keys in blocks of 2", late, (2, 2), plain="3 queries, 4 keys")
    case(
        "5 keys in blocks of 2: the last block is shorter",
        with_scores([[1, 0, 2, 1, 3]] * 2, values(5)),
        (1, 2),
        plain="2 queries, 5 keys",
    )
    other, another = "2 queries, 3 keys, other scores", "2 queries, 3 keys, yet other scores"
    small = with_scores([[1, 2, 1], [0, 2, 4]], values(3))
    case("blocks larger than the matrix", small, (8, 8), plain=other)
    ones = with_scores([[1, 3, 2], [2, 0, 1]], values(3))
    case("blocks of one", ones, (1, 1), plain=another)
    case("one query", random_qkv(random, "one query", 1, 3, 4, 2), (2, 2))
    case("one key", random_qkv(random, "one key", 3, 1), (2, 2))
    case("d = 1", random_qkv(random, "d = 1", 4, 5, 1, 1), (3, 2))
    case(WIDE, random_qkv(random, WIDE, 5, 7, 3, 6), (2, 4))
    case("random numbers", random_qkv(random, "backward 1", 7, 9), (3, 4))
    case("other random numbers", random_qkv(random, "backward 2", 7, 9), (3, 4))
    case("as many queries as keys", random_qkv(random, "square", 11, 11, spread=2), (4, 3))
    case("scores that grow from key to key", growing(random, "grow", 9, 40, -6, 6), (4, 16))
    inputs = random_qkv(random, "scale", 7, 9)
    case("scale=0.3", inputs, (2, 4), {"scale": 0.3})
    for title, scale in ODD_SCALES:
        case(title, with_scores([[0, 1, 2], [2, 0, 1]], values(3)), (2, 2), {"scale": scale})
    case("real activations", real_qkv(40), (16, 8))
    for n_q, n_k in ((131, 150), (3, 520), (520, 3)):
        inputs = growing(random, f"{n_q} {n_k}", n_q, n_k, -4, 4)
        case(f"{n_q} queries, {n_k} keys", inputs, (64, 32))
    case("131 queries, 150 keys, blocks left out", growing(random, "free", 131, 150, -4, 4), None)

    def hunt(title, k, options=None):
        # large queries and small keys: the other way round, dq would be a small difference of
        # large numbers, and float32 too coarse for it
        k, v = np.pad(arrays(k)[0], ((0, 0), (0, 2))), values(len(k))
        case(title, {"q": 2000 * np.eye(2, 4), "k": k, "v": v}, (2, 2), options, hunts=True)

    hunt("large scores", [[1, 1], [1, 0], [-1, 2]])
    hunt("very negative scores", [[-1, -3], [-1, -2], [-2, -1]])
    causal_cases(case, random, real_qkv(40), spread=4)
    hunt("causal, large scores", [[1, 1], [1, 1], [-1, 1]], {"causal": True})
    hunt("causal, very negative scores", [[-1, -2], [-1, -2], [-2, -2]], {"causal": True})

    def heads(title, lead, kv_lead, n_q, n_k, options=None, larger="several heads"):
        inputs = random_qkv(random, title, n_q, n_k, 4, 3, lead, kv_lead)
        again = len(lead) == 1 or bool(options)
        case(title, inputs, (2, 4), options, larger=larger, again=again)

    causal, scale = {"causal": True}, {"scale": 0.3}
    inputs = random_qkv(random, "causal scale", 7, 9)
    case("causal, scale=0.3", inputs, (3, 5), causal | scale)
    heads("3 heads, (3, 5, 4)", (3,), None, 5, 7)
    heads("batch of 2 with 3 heads, (2, 3, 5, 4)", (2, 3), None, 5, 7)
    heads("2 heads, causal", (1, 2), None, 3, 3, causal)
    heads("2 heads, scale=0.3", (1, 2), None, 3, 3, scale)
    for title, lead, kv_lead in GROUPS:
        heads(title, lead, kv_lead, 5, 7, larger=GROUPED)
    heads("4 query heads on 2 key heads, causal", (1, 4), (1, 2), 6, 6, causal, GROUPED)
    return [
        c
        if c.larger or c.title == WIDE
        else replace(c, again=(len(c["q"]), len(c["k"])) not in FEW_SIZES)
        for c in cases
    ]


# --- block-sparse attention ---------------------------------------------------------------------


def block_sparse_cases(seed):
    """Return the cases for block-sparse attention."""
    random = Numbers(seed)
    cases = []

    def case(title, inputs, blocks, block_mask, options=None, **more):
        inputs = {**inputs, "block_mask": np.array(block_mask, bool)}
        cases.append(Case(title, inputs, options or {}, blocks, **more))

    S = [[1, 2, 3, 10], [0, 2, 1, 1], [2, 1, 0, 3], [1, 0, 4, 2]]
    case("4 × 4 in tiles of 2, one absent", with_scores(S, values(4)), (2, 2), [[1, 0], [1, 1]])
    case("all tiles there", with_scores(S[:2], values(4)), (2, 2), [[1, 1]])
    case("the diagonal", with_scores(S, values(4)), (2, 2), [[1, 0], [0, 1]])
    case("5 keys in tiles of 2", with_scores([[1, 0, 2, 1, 3], [0, 2, 1, 1, -1]], values(5)),
         (2, 2), [[1, 0, 1]])  # fmt: skip
    line = {"q": np.arange(3.0)[:, None], "k": np.arange(5.0)[:, None], "v": values(5, 1)}
    case("a row of tiles that is empty", line, (2, 2), [[1, 0, 1], [0, 0, 0]])
    case("the first tile of a row is absent", with_scores(S, values(4)), (2, 2), [[0, 1], [0, 1]])
    case("tiles larger than the matrix", with_scores(S[:2], values(4)), (8, 8), [[1]])
    case("tiles of one", with_scores([[1, 3, 2], [2, 0, 1]], values(3)), (1, 1),
         [[1, 0, 1], [0, 1, 1]])  # fmt: skip

    def randomly(title, n_q, n_k, blocks, keep, options=None, **more):
        T_r, T_c = -(-n_q // blocks[0]), -(-n_k // blocks[1])
        there = random(f"{title} mask", T_r, T_c) < keep
        if more.get("larger"):  # work to do in every row: else a function of matrices may not raise
            there[:, 0] = True
        inputs = random_qkv(random, title, n_q, n_k, **more.pop("shape", {}))
        case(title, inputs, blocks, there, options, **more)

    randomly("random tiles, 9 queries and 11 keys", 9, 11, (2, 3), 0.3)
    randomly("other random tiles, 9 queries and 11 keys", 9, 11, (2, 3), 0.3, alone=True)
    randomly("random tiles, 12 queries and 7 keys", 12, 7, (5, 2), 0)
    randomly("random tiles of 3 × 3, 10 queries and 8 keys", 10, 8, (3, 3), 0.3)
    randomly("random tiles of 16 × 16, 60 queries and 50 keys", 60, 50, (16, 16), 0)
    randomly("random tiles, 60 queries and 50 keys", 60, 50, (16, 8), 0)
    wide = growing(random, "sparse", 20, 40)
    butterfly = [[1, 1, 1, 0, 1], [1, 1, 0, 1, 0], [1, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    case("scores that grow from key to key", wide, (5, 8), butterfly)
    inputs = random_qkv(random, "sparse scale", 5, 6, 4, 3)
    case("scale=0.3", inputs, (2, 4), [[1, 0], [0, 1], [1, 1]], {"scale": 0.3})
    for title, scale in ODD_SCALES:
        inputs = with_scores([[0, 1, 2], [2, 0, 1]], values(3))
        case(title, inputs, (2, 2), [[1, 1]], {"scale": scale})
    inputs = random_qkv(random, WIDE, 5, 7, 3, 6)
    case(WIDE, inputs, (2, 4), [[1, 0], [0, 1], [1, 1]])
    case("real activations", real_qkv(60), (16, 8), random("real tiles", 4, 8) < 0.3)

    def hunt(title, S, blocks, block_mask, options=None):
        inputs = with_scores(S, values(len(S[0])))
        case(title, inputs, blocks, block_mask, options, hunts=True)

    hunt("large scores", [[1000, 999, 998], [0, 1000, 2000]], (1, 2), [[1, 1], [1, 0]])
    hunt("very negative scores", [[-1000, -1001, -1002], [-2000, -3000, 0]], (1, 2),
         [[1, 1], [1, 0]])  # fmt: skip
    hunt("scores near -20000", [[-20000, -20001, 0], [5, 6, -20000]], (1, 2), [[1, 0], [0, 1]])
    causal = {"causal": True}
    few = with_scores([row[:2] for row in S[:3]], values(2))
    case(
        "causal, 3 queries and 2 keys: the last query sees the last key, the first none",
        few,
        (2, 2),
        [[1], [1]],
        causal,
    )
    hunt("causal, a score of -2147483648", [[LOWEST, 0], [1, 2]], (2, 2), [[1]], causal)
    case("causal, 4 × 4 in tiles of 2", with_scores(S, values(4)), (2, 2), [[1, 1], [1, 1]], causal)
    randomly("causal, random tiles, 9 queries and 9 keys", 9, 9, (2, 3), 0.3, causal)
    randomly("causal, random tiles, 7 queries and 11 keys", 7, 11, (2, 3), 0.3, causal, alone=True)
    randomly("causal, random tiles, 11 queries and 7 keys", 11, 7, (3, 2), 0.3, causal)
    scale = {"scale": 0.3}
    randomly("causal, scale=0.3, 7 queries and 11 keys", 7, 11, (2, 3), 0.3, causal | scale)

    def heads(title, lead, kv_lead=None, options=None, larger="several heads", **more):
        shape = {"d": 4, "d_v": 3, "lead": lead, "kv_lead": kv_lead}
        randomly(title, 5, 7, (2, 3), 0.3, options, larger=larger, shape=shape, **more)

    heads("3 heads, (3, 5, 4)", (3,))
    heads("batch of 2 with 3 heads, (2, 3, 5, 4)", (2, 3))
    heads("batch of 1 with 2 heads, (1, 2, 5, 4)", (1, 2), alone=True)
    heads("2 heads, causal", (1, 2), options=causal)
    heads("2 heads, scale=0.3", (1, 2), options=scale)
    for title, lead, kv_lead in GROUPS:
        heads(title, lead, kv_lead, larger=GROUPED)
    return cases


# --- counts -------------------------------------------------------------------------------------


def block_sizes_cases(seed):
    """Return the cases for block_sizes: sizes of lessons and machines, then random ones."""
    pairs = [(64, 4), (48, 4), (50, 4), (100, 3), (16, 4), (1, 64), (3, 1), (1000, 64)]
    pairs += [(7169, 256)]  # 7.001: rounding up by adding 0.999 falls short
    pairs += [(25600, 64), (51200, 64), (98304, 64), (98304, 128), (51200, 128), (49152, 128)]
    rng = np.random.default_rng(seed)
    pairs += [(int(rng.integers(1, 10**6)), int(rng.integers(1, 300))) for _ in range(40)]
    return [Case(f"M = {M}, d = {d}", {"sram_elements": M, "d": d}) for M, d in pairs]


def traffic_cases(seed, closed_form):
    """Return the cases for traffic: sizes for a closed form, or arrays for a tiled algorithm."""
    sizes = [(8, 8, 4, 4, 2, 4), (8, 8, 4, 4, 4, 2), (8, 8, 4, 4, 8, 8), (5, 6, 4, 4, 2, 2)]
    sizes += [(5, 7, 4, 4, 2, 3), (13, 17, 8, 5, 4, 5), (3, 4, 2, 3, 8, 8), (4, 3, 2, 2, 1, 1)]
    sizes += [(64, 64, 16, 16, 16, 32)]
    if closed_form:
        sizes += [(1024, 1024, 64, 64, 64, 200), (1000, 777, 64, 32, 96, 48)]
        rng = np.random.default_rng(seed)
        sizes += [tuple(int(x) for x in rng.integers(1, 60, 6)) for _ in range(40)]
        sizes += [(n, n, d, d, B_r, B_c) for n, _, d, _, B_r, B_c in sizes[-20:]]
    random = Numbers(seed)
    cases = []
    for n_q, n_k, d, d_v, *blocks in sizes:
        queries = "query" if n_q == 1 else "queries"
        keys = "key" if n_k == 1 else "keys"
        sides = " × ".join(map(str, blocks))
        title = f"{n_q} {queries}, {n_k} {keys}, d = {d}, d_v = {d_v}, blocks of {sides}"
        inputs = {"n_q": n_q, "n_k": n_k, "n": n_q, "d": d, "d_v": d_v}
        if not closed_form:
            inputs = random_qkv(random, title, n_q, n_k, d, d_v)
        cases.append(Case(title, inputs, blocks=tuple(blocks)))
    return cases

"""A check says the same of a function here and of one in another process, to the letter."""

import importlib.util

import pytest

from flashref import check
from flashref.check import remote

SOURCE = """
import array
import collections
import decimal
import fractions
import functools
import numpy as np


def right(q, k, v):
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


# --- softmax ---

def softmax_right(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def softmax_with_lists(x):
    if not isinstance(x, list):
        raise TypeError("give me a list")
    if isinstance(x[0], list):
        return [softmax_with_lists(row) for row in x]
    top = max(x)
    e = [2.718281828459045 ** (s - top) for s in x]
    return [s / sum(e) for s in e]

def softmax_changes_a_list(x):
    top = max(x)
    for i in range(len(x)):
        x[i] = float(np.exp(x[i] - top))
    return [s / sum(x) for s in x]

def softmax_in_place(x):
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    return x / x.sum(-1, keepdims=True)

def softmax_gives_the_input_back(x):
    x[...] = softmax_right(x)
    return x

def softmax_gives_a_view_back(x):
    x[...] = softmax_right(x)
    return x[:]

def softmax_naive(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

def softmax_float16(x):
    return softmax_right(x.astype(np.float16))

def softmax_float32(x, *, axis=-1):
    return np.moveaxis(softmax_right(np.moveaxis(x.astype(np.float32), axis, -1)), -1, axis)

def softmax_not_written(x):
    raise NotImplementedError

def softmax_not_written_with_words(x):
    raise NotImplementedError("your code here")

def softmax_forgets_to_return(x):
    softmax_right(x)

def softmax_a_word(x):
    return "0.5"

def softmax_complex(x):
    return softmax_right(x) + 0j

def softmax_of_decimals(x):
    return [decimal.Decimal(float(p)) for p in softmax_right(x)]

def softmax_of_fractions(x):
    return np.array([fractions.Fraction(float(p)) for p in softmax_right(x)])

def softmax_of_fractions_beyond_any_float(x):
    return [fractions.Fraction(10**400)] * len(x)

def softmax_of_no_decimals(x):
    return np.array([decimal.Decimal("sNaN")] * len(x))

def softmax_longdouble(x):
    return softmax_right(x.astype(np.longdouble))

def softmax_in_a_deque(x):
    return collections.deque(softmax_right(x))

def softmax_in_an_array_of_one_type(x):
    return array.array("d", softmax_right(x))

def softmax_ragged(x):
    return [[0.5], [0.25, 0.25]]

def softmax_objects(x):
    return np.array([object()] * len(x))

def softmax_nan(x):
    return np.where(x == x.max(), np.nan, softmax_right(x))

def softmax_wrong_shape(x):
    return softmax_right(x)[..., None]

def softmax_mistyped(x):
    return softmax_rihgt(x)

def softmax_deep(x):
    def inner(y):
        return y / {}["no such key"]
    return inner(x)

def softmax_unknown_argument(x, temperature):
    return softmax_right(x / temperature)

def softmax_no_argument():
    return 1

softmax_partial = functools.partial(softmax_float32, axis=-1)
softmax_lambda = lambda row: softmax_right(row)

calls = 0

def softmax_unsteady(x):
    global calls
    calls += 1
    return softmax_right(x) + 1e-3 * (calls % 2 == 0)

last = {}

def softmax_answers_from_the_last_call(x):
    answer = last.get("answer")
    last["answer"] = softmax_right(x)
    return softmax_right(x) if answer is None or answer.shape != x.shape else answer

def softmax_remembers_by_identity(x):
    if last.get("x") is not x:
        last.update(x=x, y=softmax_right(x))
    return last["y"].copy()


# --- attention ---

def attention_right(q, k, v):
    return right(q, k, v)

class Attention:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, Q, K, V, is_causal=False):
        s = self.factor * Q @ np.swapaxes(K, -1, -2) / np.sqrt(Q.shape[-1])
        if is_causal:
            s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ V

    def method(self, q, k, v):
        return self(q, k, v)

attention_object = Attention(1)
attention_wrong_object = Attention(2)
attention_method = Attention(1).method

def attention_one_head_for_all(q, k, v):
    if q.ndim == 4:
        return np.stack([[right(q[b, h], k[b, 0], v[b, 0]) for h in range(q.shape[1])]
                         for b in range(len(q))])
    return right(q, k, v)

def attention_plain_only(q, k, v):
    n, d = q.shape
    return right(q, k, v)

def attention_of_heads_by_zip(q, k, v):
    if q.ndim > 2:
        return np.stack([attention_of_heads_by_zip(*one) for one in zip(q, k, v)])
    return right(q, k, v)

def without_names(function):
    def attention_without_names(*args, **kwargs):
        return function(*args, **kwargs)
    return attention_without_names

@without_names
def attention_without_names(q, k, v, block_q, block_k):
    return right(q, k, v)

def attention_empty_rows(q, k, v, causal=False, return_lse=False):
    s = q @ k.T / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tri(*s.shape, len(k) - len(q), dtype=bool), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    o = e / e.sum(-1, keepdims=True) @ v
    return (o, s.max(-1) + np.log(e.sum(-1))) if return_lse else o

class attention_class:
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return right(q, k, v)

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        s = q @ k.T / np.sqrt(q.shape[-1])
        e = np.exp(s - s.max(-1, keepdims=True))
        p = e / e.sum(-1, keepdims=True)
        dp = do @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return ds @ k, ds.T @ q, p.T @ do

    @classmethod
    def apply(cls, q, k, v):
        class Context:
            def save_for_backward(self, *arrays):
                self.saved_tensors = arrays
        return cls.forward(Context(), q, k, v)

attention_backward_class = attention_class

class attention_backward_wrong_class(attention_class):
    forward = attention_class.__dict__["forward"]

    @staticmethod
    def backward(ctx, do):
        dq, dk, dv = attention_class.backward(ctx, do)
        return dq * np.sqrt(do.shape[-1]), dk, dv


# --- the others ---

def merge_attention_average(o_a, lse_a, o_b, lse_b):
    return (o_a + o_b) / 2, np.logaddexp(lse_a, lse_b)

def block_sizes_swapped(M, d):
    c = -(-M // (4 * d))
    return c, min(c, d)

def block_sizes_as_floats(M, d):
    c = np.ceil(M / (4 * d))
    return [min(c, d), c]

def traffic_closed(n_q, n_k, d, d_v, block_q, block_k):
    blocks = -(-n_q // block_q)
    return n_q * d + blocks * n_k * (d + d_v), n_q * (d_v + 1)

def traffic_keys_once(n_q, n_k, d, block_q, block_k):
    return n_q * d + n_k * 2 * d, n_q * (d + 1)

def traffic_reloads(q, k, v, block_q, block_k, memory):
    from flashref import flash_attention_2
    for i in range(0, len(q), block_q):
        for j in range(block_k, len(k), block_k):
            memory.load("Q", q, slice(i, min(i + block_q, len(q))))
    return flash_attention_2(q, k, v, block_q=block_q, block_k=block_k, memory=memory)

def traffic_moves_nothing(q, k, v, block_q, block_k, memory):
    return right(q, k, v)
"""

NAMES = [
    line.split()[1].split("(")[0].rstrip(":") if line[:4] in ("def ", "clas") else line.split()[0]
    for line in SOURCE.splitlines()
    if line[:1].isalpha() and any(line.split(" ", 1)[-1].startswith(c) or line.startswith(c)
                                  for c in (f"{check_}_" for check_ in remote.CHECKS))
]  # fmt: skip


def check_of(name):
    """Return the check that a function's name begins with, the longest such name."""
    return max((c for c in remote.CHECKS if name.startswith(f"{c}_")), key=len)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("same") / "homework.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def homework(path):
    return remote.read_homework(path)


@pytest.mark.parametrize("name", NAMES)
def test_the_reports_are_equal(path, homework, name):
    spec = importlib.util.spec_from_file_location("homework", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run_check = getattr(check, check_of(name))
    here = run_check(getattr(module, name))

    with remote.Workplace() as workplace:
        process = remote.Process(homework, workplace, remote.Limits(), name, check_of(name))
        try:
            process.load()
            there = run_check(remote.Remote(process))
        finally:
            process.close()
    assert process.ended is None
    # a longer name may break lines elsewhere
    told_there = str(there).replace(process.function, "f").split()
    assert told_there == str(here).replace(here.function, "f").split()
    assert (there.passed, there.mistake) == (here.passed, here.mistake)
    assert there.passed == (name in PASS)


PASS = {
    "softmax_right", "softmax_with_lists", "softmax_float32", "softmax_partial", "softmax_lambda",
    "softmax_of_decimals", "softmax_of_fractions", "softmax_longdouble", "softmax_in_a_deque",
    "softmax_in_an_array_of_one_type", "attention_of_heads_by_zip",
    "attention_right", "attention_object", "attention_plain_only", "attention_method",
    "attention_class", "attention_backward_class", "block_sizes_as_floats", "traffic_closed",
}  # fmt: skip


def test_there_are_right_and_wrong_ones():
    assert set(NAMES) > PASS and len(NAMES) > 2 * len(PASS)

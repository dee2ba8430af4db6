"""Functions of any signature are understood, and what cannot be understood is asked for."""

import functools
import importlib.util
import inspect

import numpy as np
import pytest

import flashref
from flashref import check
from flashref.check import calling, exercises
from flashref.check.calling import NotUnderstood
from flashref.tests.check.solutions import correct

ATTENTION = exercises.EXERCISES["attention"]


def understood(function, name="attention"):
    exercise = exercises.EXERCISES[name]
    return calling.understand(
        function, exercise.main, exercise.options, backward=name.endswith("backward")
    )


# MISTAKES.md, section 1
SPELLINGS = {
    "q": ("q", "Q", "query"),
    "k": ("k", "K", "key"),
    "v": ("v", "V", "value"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "block_q": ("block_q", "Br", "B_r", "block_m"),
    "block_k": ("block_k", "Bc", "B_c", "block_n"),
    "block": ("block", "block_size", "B"),
    "return_lse": ("return_lse",),
    "window": ("window",),
    "mask": ("mask",),
}


def with_parameters(names, function):
    """Return the function with parameters of other names, called by position."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names
    ]
    signature = inspect.Signature(parameters)

    def renamed(*args, **kwargs):
        return function(*signature.bind(*args, **kwargs).args)

    renamed.__signature__ = signature
    return renamed


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, names in SPELLINGS.items() for name in names]
)
def test_every_spelling_is_known(role, name):
    others = [r for r in ("q", "k", "v") if r != role]
    learner = understood(with_parameters([name, *others], lambda *args: None))
    assert learner.parameters[role].name == name
    assert learner.by_position == ()


@pytest.mark.parametrize(
    "names",
    [
        ("do", "q", "k", "v", "o", "lse"),
        ("dO", "Q", "K", "V", "O", "L"),
        ("dout", "query", "key", "value", "out", "LSE"),
        ("grad_output", "q", "k", "v", "out", "lse"),
        ("dout", "q", "k", "v", "out", "softmax_lse"),
    ],
)
def test_spellings_of_the_backward_pass(names):
    def backward(do, q, k, v, o, lse):
        return flashref.flash_attention_2_backward(do, q, k, v, o, lse)

    assert check.attention_backward(with_parameters(names, backward)).passed


@pytest.mark.parametrize(
    "names",
    [
        ("o_a", "lse_a", "o_b", "lse_b"),
        ("o1", "lse1", "o2", "lse2"),
        ("O_1", "L_1", "O_2", "L_2"),
        ("out_x", "lse_x", "out_y", "lse_y"),
        ("output_left", "lse_left", "output_right", "lse_right"),
        ("first", "its_lse", "second", "other_lse"),
    ],
)
def test_spellings_of_a_merge(names):
    assert check.merge_attention(with_parameters(names, flashref.merge_attention)).passed


def test_the_order_of_a_merge_follows_the_names():
    def by_kind(o1, o2, lse1, lse2):
        return flashref.merge_attention(o1, lse1, o2, lse2)

    assert check.merge_attention(by_kind).passed


@pytest.mark.parametrize("names", [("M", "d"), ("sram_elements", "d"), ("size", "width")])
def test_spellings_of_block_sizes(names):
    assert check.block_sizes(with_parameters(names, flashref.block_sizes)).passed


# --- kinds of callables -------------------------------------------------------------------------


def attention(q, k, v, causal=False, scale=None):
    return flashref.standard_attention(q, k, v, causal=causal, scale=scale)


class Callable:
    def __call__(self, q, k, v, *, causal=False):
        return attention(q, k, v, causal)

    def method(self, Q, K, V):
        return attention(Q, K, V)

    @staticmethod
    def static(Q, K, V, /, causal=False):
        return attention(Q, K, V, causal)

    @classmethod
    def of_class(cls, q, k, v):
        return attention(q, k, v)


class Inherits(correct.FlashClass):
    """A second attempt that changes nothing."""


def positional_only(q, k, v, causal=False, /):
    return attention(q, k, v, causal)


def keyword_only(*, v, k, q, scale):
    return attention(q, k, v, scale=scale)


def any_keywords(**arrays):
    return attention(**arrays)


@pytest.mark.parametrize(
    "function",
    [
        attention,
        Callable(),
        Callable().method,
        Callable.static,
        Callable.of_class,
        positional_only,
        keyword_only,
        functools.partial(attention, causal=False),
        functools.partial(attention, scale=None),
        correct.quiet(attention),
        np.vectorize(attention, signature="(n,d),(m,d),(m,e)->(n,e)"),
        lambda *args: attention(*args),
        lambda a, b, c: attention(a, b, c),
        lambda a, b, c, verbose=False: attention(a, b, c),
        lambda q, keys, v: attention(q, keys, v),
        lambda v, q, k: attention(q, k, v),
        correct.FlashClass,
        Inherits,
        correct.OnlyApply,
    ],
)
def test_every_kind_of_callable_is_a_function(function):
    report = check.attention(function)
    assert report.passed, report


def test_a_partial_that_fixes_causal_is_asked_without_it_too():
    """`functools.partial(f, causal=True)` still takes causal; what it fixes is only a default."""
    assert check.attention(functools.partial(attention, causal=True)).passed


@pytest.mark.parametrize("function", [correct.FlashClass, Inherits])
def test_a_class_with_apply_has_gradients(function):
    report = check.attention_backward(function)
    assert report.passed, report
    assert any("causal" in title for title in report.right)


def test_the_first_gradients_count():
    class Function:
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return attention(q, k, v)

        @staticmethod
        def backward(ctx, do):
            return (*correct.gradients_of_matrices(do, *ctx.saved_tensors), None, None)

        @classmethod
        def apply(cls, *args):
            return cls.forward(calling._Context(), *args)

    assert check.attention(Function).passed
    assert check.attention_backward(Function).passed


def test_options_are_given_by_their_own_names():
    given = []

    def flash(Q, K, V, Br, Bc, *, softmax_scale=None, is_causal=False, extra="mine"):
        given.append((Br, Bc, softmax_scale, is_causal, extra))
        return attention(Q, K, V, is_causal, softmax_scale)

    assert check.attention(flash).passed
    blocks = {(Br, Bc) for Br, Bc, *_ in given}
    assert {(2, 2), (1, 1), (8, 8), (3, 4)} <= blocks
    assert {scale for *_, scale, _, _ in given} == {None, 0.3, 1.0, 0.0, -0.5, -1.0}
    assert {causal for *_, causal, _ in given} == {False, True}
    assert {extra for *_, extra in given} == {"mine"}


def test_required_options_are_always_given():
    def flash(q, k, v, scale, causal, window, mask, block_size, return_lse):
        assert isinstance(scale, float)
        o, lse = flashref.standard_attention(
            q, k, v, scale=scale, causal=causal, window=window, mask=mask, return_lse=True
        )
        return (o, lse) if return_lse else o

    report = check.attention(flash)
    assert report.passed, report


def test_blocks_are_left_out_where_there_are_defaults():
    given = []

    def flash(q, k, v, block_q=16, block_k=16):
        given.append((block_q, block_k))
        return attention(q, k, v)

    assert check.attention(flash).passed
    assert (16, 16) in given


# --- what is asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("attention", np.ones(3), "this is a value of type ndarray"),
        ("attention", None, "a value of type NoneType"),
        ("attention", lambda q, k, v, rng: q, "an argument called 'rng'"),
        ("attention", lambda data: data, "<lambda>(q, k, v)"),
        ("attention", lambda: 0, "takes no arguments"),
        ("attention", lambda v, foo, bar: 0, "a way to give it q, k"),
        ("block_sparse_attention", lambda q, k, v, block_mask: q, "takes no block sizes"),
        ("traffic", lambda q, k, v: q, "either of two things"),
        ("traffic", lambda: 0, "either of two things"),
        ("merge_attention", lambda o_a, o_b: 0, "o_a, lse_a, o_b, lse_b"),
    ],
)
def test_what_cannot_be_understood_is_asked_for(name, function, words):
    report = getattr(check, name)(function)
    assert not report.passed
    assert report.failures[0].kind == "not_understood"
    assert report.mistake is None
    assert words in str(report).replace("\n  ", " ")


def test_understand_itself_raises():
    with pytest.raises(NotUnderstood, match="Names that I know here: q, k, v"):
        understood(lambda q, k, v, temperature: q)


# --- calls --------------------------------------------------------------------------------------


def test_a_call_gets_arrays_of_its_own():
    seen = []

    def attention_(q, k, v):
        seen.append((q, k, v))
        return attention(q, k, v)

    check.attention(attention_)
    ids = [id(x) for arrays in seen for x in arrays]
    assert all(x.flags.writeable for arrays in seen for x in arrays)
    # the last calls get used arrays on purpose
    assert len(set(ids)) >= len(ids) - 6


def test_error_states_and_warnings_of_a_call_stay_inside():
    def attention_(q, k, v):
        np.seterr(all="raise")
        with np.errstate(all="ignore"):
            return attention(q, k, v)

    before = np.geterr()
    assert check.attention(attention_).passed
    assert np.geterr() == before


def test_learner_errors_carry_text_and_lines():
    error = calling.LearnerError("KeyError: 'x'", [{"place": "hw.py, line 3", "line": "d['x']"}])
    assert str(error) == error.text == "KeyError: 'x'"
    assert error.kind == "KeyError"
    assert error.learner_traceback == "hw.py, line 3:  d['x']"
    assert not error.fatal
    for kind in (calling.TimeLimit, calling.MemoryLimit, calling.Crashed):
        assert kind("it stopped").fatal
        assert kind("it stopped").kind == ""


def test_a_class_with_apply_may_do_without_a_context():
    class Attention:
        @staticmethod
        def forward(q, k, v):
            return flashref.standard_attention(q, k, v)

        @classmethod
        def apply(cls, *inputs):
            return cls.forward(*inputs)

    assert check.attention(Attention).passed


def test_compiled_code_is_called_by_position():
    """Its signature is not to be had."""
    assert understood(max, "softmax").by_position == ("x",)
    assert "p has shape (); it should be (3,)" in str(check.softmax(max))


def test_a_cell_of_a_notebook_is_called_a_cell():
    code = "def softmax(x):\n    return x / zero\n"
    exec(compile(code, "<ipython-input-3-0123456789ab>", "exec"), made := {})
    assert "your cell, line 2, in softmax" in str(check.softmax(made["softmax"]))


def test_an_exception_that_cannot_be_printed_is_named():
    class Mine(Exception):
        def __str__(self):
            return self.reason  # there is none

    def softmax(x):
        raise Mine

    report = check.softmax(softmax)
    assert report.failures[0].kind == "error" and "\n    Mine\n" in f"{report}\n"


def test_no_memory_left_is_said_so():
    def softmax(x):
        raise MemoryError("Unable to allocate 7.3 TiB")

    report = check.softmax(softmax)
    assert "wanted more memory than there is" in str(report) and "7.3 TiB" in str(report)


def test_a_library_that_cannot_be_imported_is_not_tried():
    def softmax(x):
        raise ImportError("jax needs a newer jaxlib")

    assert "ImportError: jax needs a newer jaxlib" in str(check.softmax(softmax))


def test_a_partial_of_a_function_of_lists_gets_lists():
    def softmax(function, x):
        return function(x.copy() if x.count(x[0]) else None)  # an array has no `count`

    report = check.softmax(functools.partial(softmax, correct.softmax_in_plain_python))
    assert report.passed, report


# --- tensors ------------------------------------------------------------------------------------


class Tensor:
    """Stands for a tensor on a GPU: its numbers come only by way of the CPU."""

    dtype = "torch.bfloat16"

    def __init__(self, array, home=False):
        self.array, self.home = array, home

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self.array, home=True)

    def float(self):
        return self

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype) if self.home else self.numpy()


@pytest.mark.parametrize("pack", [lambda o, lse: Tensor(o), lambda o, lse: (Tensor(o), Tensor(lse)),
                                  lambda o, lse: [Tensor(row) for row in o]])  # fmt: skip
def test_a_tensor_is_fetched_from_where_it_lies(pack):
    def attention(q, k, v):
        assert q.ndim == 2, "one head"
        return pack(*flashref.standard_attention(q, k, v, return_lse=True))

    report = check.attention(attention)
    assert report.passed, report


torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@torch
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_an_autograd_function_is_a_class_with_apply(name):
    report = getattr(check, name)(correct.torch_function())
    assert report.passed, report


@torch
def test_tensors_may_not_be_changed_either():
    import torch

    def attention_(q, k, v):
        o = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
        q.zero_()
        return o

    report = check.attention(attention_)
    assert report.failures[0].kind == "changed"


@torch
def test_an_error_on_tensors_is_the_one_that_is_shown():
    import torch

    def attention_(q, k, v):
        return torch.softmax(q @ k, dim=-1) @ v

    report = check.attention(attention_)
    assert "RuntimeError" in str(report)


@torch
def test_mistakes_in_torch_have_names_too():
    import torch

    def unscaled(q, k, v):
        return torch.einsum("...ij,...jc->...ic", torch.softmax(q @ k.mT, dim=-1), v)

    def tail_dropped(q, k, v):
        n = k.shape[-2] // 16 * 16
        S = q @ k[..., :n, :].transpose(-1, -2) * q.size(-1) ** -0.5
        return torch.nan_to_num(S.softmax(-1)) @ v[..., :n, :]

    assert check.attention(unscaled).mistake == "scale_missing"
    assert check.attention(tail_dropped).mistake == "tail_keys_dropped"


# --- names that a decorator hides ---------------------------------------------------------------


def without_names(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def in_blocks(q, k, v, block_q, block_k):
    return flashref.flash_attention_2(q, k, v, block_q=block_q, block_k=block_k)


def in_blocks_by_name(q, k, v, *, block_q, block_k):
    return in_blocks(q, k, v, block_q, block_k)


@pytest.mark.parametrize("function", [in_blocks, in_blocks_by_name])
def test_what_a_decorator_hides_is_asked_for(function):
    report = check.attention(without_names(function))
    assert not report.passed
    text = " ".join(str(report).split())
    assert "call shows no names of its arguments, so what else it takes cannot be given" in text
    assert "put @functools.wraps(function) on the inner function" in text
    report = check.attention(functools.wraps(function)(without_names(function)))
    assert report.passed and not report.notes


def test_options_that_a_decorator_hides_are_not_asked_and_that_is_said():
    report = check.attention(without_names(attention))
    assert report.passed
    assert "call shows no names of its arguments" in report.notes[-1]
    assert "causal" in report.not_asked


def test_other_errors_are_no_decorators():
    def named(a, b, c):
        return in_blocks(a, b, c)  # without blocks

    text = str(check.attention(named))
    assert "missing 2 required positional arguments" in text and "shows no names" not in text
    text = str(check.attention(without_names(lambda q, k, v: q @ k)))
    assert "mismatch" in text and "shows no names" not in text

"""Docstrings say what the code does: examples run, and parameters are those of the signature."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import flashref

# cuda decides at import between a GPU and the simulator; its own tests see to it
ELSEWHERE = re.compile(r"flashref\.(tests|cuda)\b|flashref\..*__main__")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(flashref.__path__, "flashref.")
    if not ELSEWHERE.match(module.name)
]
OPTIONAL = {"matplotlib", "ipywidgets", "IPython", "nbformat", "nbclient", "numba"}


def load(name):
    """Import a module; skip the test where what it draws with is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        cause = error.name or getattr(error.__cause__, "name", None) or ""
        if cause.split(".")[0] in OPTIONAL:
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("name", ["flashref", *MODULES])
def test_modules_say_what_they_are_and_their_examples_run(name):
    module = load(name)
    assert module.__doc__, f"{name} has no docstring"
    assert module.__doc__.strip().splitlines()[0].endswith((".", ":")), "not a sentence"
    failed, _ = doctest.testmod(module)
    assert failed == 0, f"{failed} examples of {name} failed; pytest shows them above"


def test_there_are_modules_to_test():
    """An empty list would pass everything."""
    core = "softmax standard flash1 flash2 block_sparse scores dropout heads memory io_model"
    assert {f"flashref.{name}" for name in core.split()} <= set(MODULES)


# Every public function ----------------------------------------------------------------------------


def public_functions():
    """Return qualified name: function, for whatever a user may call."""
    found = {
        f"flashref.{name}": getattr(flashref, name)
        for name in flashref.__all__
        if not inspect.ismodule(getattr(flashref, name))
    }
    for name in ("io_model", "block_sparse"):
        module = importlib.import_module(f"flashref.{name}")
        for attribute, fn in inspect.getmembers(module, inspect.isfunction):
            if not attribute.startswith("_") and fn.__module__ == module.__name__:
                found[f"flashref.{name}.{attribute}"] = fn
    return found


PUBLIC = public_functions()
every_public = pytest.mark.parametrize("fn", PUBLIC.values(), ids=PUBLIC)


def sections(fn):
    """Return section title: lines, of a numpydoc docstring; the summary is under ''."""
    found, title = {"": []}, ""
    lines = inspect.getdoc(fn).splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line and below == "-" * len(line):
            title = line
            assert title not in found, f"{title} twice"
            found[title] = []
        elif not (title and line == "-" * len(title)):
            found[title].append(line)
    return found


def documented(lines):
    """Return the names that a Parameters section describes: its lines without indent."""
    heads = [line.split(" : ")[0] for line in lines if line and not line.startswith(" ")]
    return [name.strip(" *") for head in heads for name in head.split(",")]


@every_public
def test_every_public_function_has_the_sections(fn):
    parts = sections(fn)
    wanted = ["Parameters", "Examples"]
    wanted += ["Attributes"] if inspect.isclass(fn) else ["Returns"]
    assert not set(wanted) - set(parts), f"{set(wanted) - set(parts)} is missing"
    for title in wanted:
        assert any(line.strip() for line in parts[title]), f"{title} is empty"
    order = "Parameters Returns Attributes Raises Notes References Examples".split()
    assert [title for title in parts if title] == [title for title in order if title in parts]
    summary = inspect.getdoc(fn).splitlines()
    assert summary[0].endswith(".")
    assert len(summary) == 1 or summary[1] == "", "the summary is one line"


@every_public
def test_the_documented_parameters_are_those_of_the_signature(fn):
    names = list(inspect.signature(fn).parameters)
    described = documented(sections(fn)["Parameters"])
    assert sorted(described) == sorted(names)


@pytest.mark.parametrize("name", MODULES)
def test_no_docstring_describes_a_parameter_that_is_not_there(name):
    """Private functions, classes and pictures too: whoever lists parameters lists these."""
    module = load(name)
    for attribute, fn in inspect.getmembers(module, inspect.isfunction):
        if fn.__module__ == name and fn.__doc__ and "Parameters" in sections(fn):
            described = documented(sections(fn)["Parameters"])
            assert sorted(described) == sorted(inspect.signature(fn).parameters), attribute


@every_public
def test_every_public_function_has_an_example_with_a_result(fn):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(fn))
    assert any(example.want for example in examples)


@every_public
def test_full_signatures(fn):
    """No **kwargs for a reader to guess at."""
    for parameter in inspect.signature(fn).parameters.values():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def test_the_parser_sees_a_wrong_docstring():
    def f(a, b, c):
        """Add.

        Parameters
        ----------
        a, b : int
            Numbers; d : is no parameter.
        x
            Nobody.

        Returns
        -------
        y : int
        """

    parts = sections(f)
    assert documented(parts["Parameters"]) == ["a", "b", "x"]
    assert list(parts) == ["", "Parameters", "Returns"]


# Signatures that courses and graders rely on ------------------------------------------------------

OPTIONS = (
    "scale=None, causal=False, window=None, mask=None, bias=None, alibi_slopes=None, "
    "softcap=None, dropout_p=0.0, seed=None, memory=None"
)
BLOCKS = "block_q=None, block_k=None"
SIGNATURES = {
    "naive_softmax": "x, axis=-1",
    "safe_softmax": "x, axis=-1",
    "online_softmax": "x, block=1, axis=-1",
    "online_softmax_steps": "x, v=None, block=1",
    "merge_attention": "o_a, lse_a, o_b, lse_b",
    "standard_attention": f"q, k, v, *, return_lse=False, {OPTIONS}",
    "flash_attention_1": f"q, k, v, *, {BLOCKS}, return_lse=False, {OPTIONS}",
    "flash_attention_2": f"q, k, v, *, {BLOCKS}, return_lse=False, {OPTIONS}",
    "block_sparse_attention": (
        f"q, k, v, block_mask, *, block_q, block_k, return_lse=False, {OPTIONS}"
    ),
    "flash_attention_varlen": (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, *, {BLOCKS}, return_lse=False, "
        + OPTIONS.replace("mask=None, bias=None, ", "")
    ),
    "standard_attention_backward": f"do, q, k, v, *, {OPTIONS}",
    "flash_attention_1_backward": f"do, q, k, v, o, lse, *, {BLOCKS}, {OPTIONS}",
    "flash_attention_2_backward": f"do, q, k, v, o, lse, *, {BLOCKS}, {OPTIONS}",
    "block_sparse_attention_backward": (
        f"do, q, k, v, o, lse, block_mask, *, block_q, block_k, {OPTIONS}"
    ),
    "alibi_slopes": "n_heads",
    "dropout_keep": "seed, shape, p",
    "block_sizes": "sram_elements, d",
    "Memory": "sram_elements=None, *, listener=None",
    "io_model.standard_traffic": "n_q, n_k, d, d_v",
    "io_model.standard_backward_traffic": "n_q, n_k, d, d_v",
}
TRAFFIC = "n_q, n_k, d, d_v, *, block_q, block_k, causal=False, window=None"
SIGNATURES |= {
    f"io_model.{rung}_{form}": TRAFFIC
    for rung in ("fa1", "fa2")
    for form in ("traffic", "backward_traffic")
}
SIGNATURES |= {
    f"io_model.block_sparse_{form}": TRAFFIC.replace("*, ", "*, block_mask, ")
    for form in ("traffic", "backward_traffic")
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    fn = flashref
    for part in name.split("."):
        fn = getattr(fn, part)
    assert str(inspect.signature(fn)) == f"({SIGNATURES[name]})"


def test_the_public_names_are_these():
    assert set(flashref.__all__) == {name.split(".")[0] for name in SIGNATURES}
    assert flashref.__all__ == sorted(flashref.__all__)


CHECKS = (
    "softmax online_softmax merge_attention attention attention_backward block_sparse_attention "
    "block_sizes traffic"
).split()


@pytest.mark.parametrize("name", CHECKS)
def test_homework_checks_take_a_function(name):
    """`check.softmax(fn)`: what else there is has a name and a default, and is documented."""
    fn = getattr(importlib.import_module("flashref.check"), name)
    first, *others = inspect.signature(fn).parameters.values()
    assert first.name == "fn"
    assert all(p.kind == p.KEYWORD_ONLY and p.default is not p.empty for p in others)
    test_the_documented_parameters_are_those_of_the_signature(fn)
    test_every_public_function_has_the_sections(fn)

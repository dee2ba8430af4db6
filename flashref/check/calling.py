"""Calling a learner's function: what its arguments are called, what it takes, what it gave back.

`understand` reads the signature once, `call` calls. Whatever happens in between comes back as an
`Answer`: arrays, or an error that shows the learner's lines and none of ours.

A function may live in another process and be called through a stand-in with its `__signature__`.
"""

import copy
import functools
import importlib
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# meaning -> spellings, as MISTAKES.md lists them and a few more that can mean nothing else
SPELLINGS = {
    "x": ("x", "X", "s", "S", "scores", "logits", "row"),
    "q": ("q", "Q", "query", "queries"),
    "k": ("k", "K", "key", "keys"),
    "v": ("v", "V", "value", "values"),
    "do": ("do", "dO", "DO", "dout", "d_o", "d_out", "grad_output", "grad_out", "grad_o"),
    "o": ("o", "O", "out", "output"),
    "lse": ("lse", "L", "LSE", "logsumexp", "softmax_lse"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "block_q": ("block_q", "Br", "B_r", "block_m", "BLOCK_M", "b_r", "br"),
    "block_k": ("block_k", "Bc", "B_c", "block_n", "BLOCK_N", "b_c", "bc"),
    "block": ("block", "block_size", "B"),
    "return_lse": ("return_lse", "return_LSE", "return_l", "return_L"),
    "window": ("window",),
    "mask": ("mask",),
    "axis": ("axis", "dim"),
    "block_mask": ("block_mask",),
    "memory": ("memory", "hbm"),
    "sram_elements": ("sram_elements", "M", "sram", "sram_size"),
    "d": ("d", "head_dim", "D"),
    "d_v": ("d_v", "dv", "D_v"),
    "n_q": ("n_q", "nq", "N_q", "Nq"),
    "n_k": ("n_k", "nk", "N_k", "Nk"),
    "n": ("n", "N", "seq_len"),
}
PART = re.compile(r"(?P<what>o|out|output|lse|l)_?(?P<part>a|b|1|2|x|y|left|right|old|new)")


class LearnerError(Exception):
    """The learner's code did not return an answer.

    Parameters
    ----------
    text : str
        What happened, as "TypeError: unsupported operand" or a sentence.
    lines : iterable of dict
        The learner's own lines, outermost first, each {"place": ..., "line": ...}.
    """

    headline = "Your code raised an error here:"

    def __init__(self, text, lines=()):
        super().__init__(text)
        self.text, self.lines = text, _innermost(lines)

    @property
    def learner_traceback(self):
        """The learner's own lines as text, the innermost last; nothing of ours."""
        return "\n".join(f"{at['place']}:  {at['line']}".rstrip(": ") for at in self.lines)

    @property
    def kind(self):
        """The name of the exception's type, or "" for a sentence."""
        name = self.text.partition(":")[0]
        return name if name.isidentifier() else ""

    @property
    def fatal(self):
        """Whether calling again is of no use."""
        return False


class TimeLimit(LearnerError):
    """The learner's code was stopped because it ran too long."""

    headline = "Your code ran out of time. Is there a loop that never ends?"
    fatal = True


class MemoryLimit(LearnerError):
    """The learner's code was stopped because it wanted too much memory."""

    headline = "Your code wanted more memory than there is. Which array is larger than it must be?"
    fatal = True


class Crashed(LearnerError):
    """The process that ran the learner's code ended without an answer."""

    headline = "Your code ended the Python process that ran it."
    fatal = True


class NotUnderstood(Exception):
    """The function cannot be called yet; the message asks for what is missing."""


@dataclass
class Answer:
    """What came of one call."""

    value: Any = None  #: what the function returned, as it is
    error: LearnerError | None = None  #: what it raised instead
    changed: list = field(default_factory=list)  #: (its name, before, after) of changed arguments
    given_back: str = ""  #: the name of an argument that was returned, or whose memory was
    text: str = ""  #: the call, as the learner would write it
    arguments: dict = field(default_factory=dict)  #: what was given, by the learner's names

    @property
    def said(self):
        """What the function said instead of an answer, in a line."""
        return self.error.text if self.error is not None else "an answer of another shape"


@dataclass
class Learner:
    """A function that somebody wrote, and how to call it."""

    function: Any
    name: str
    parameters: dict  #: meaning -> inspect.Parameter, of those that were recognised
    by_position: tuple = ()  #: meanings passed by position, where no name was recognised
    in_order: tuple = ()  #: names that stand before the first one that was not recognised
    library: str = "numpy"  #: what it wants its arrays as: numpy, torch, torch32, jax, list

    def has(self, role):
        """Whether the function takes this option."""
        return role in self.parameters

    def requires(self, role):
        """Whether a call without this option is an error."""
        return self.has(role) and self.parameters[role].default is inspect.Parameter.empty

    @property
    def nameless(self):
        """Whether its signature shows no names: *args, as of what most decorators make."""
        try:
            kinds = [p.kind for p in inspect.signature(self.function).parameters.values()]
        except (TypeError, ValueError):  # compiled code
            return False
        return bool(kinds) and all("VAR_" in kind.name for kind in kinds)

    @property
    def about_names(self):
        """What to do about a signature without names, as a sentence."""
        return (
            f"{self.name} shows no names of its arguments, so what else it takes cannot be given: "
            f"if a decorator made it, put @functools.wraps(function) on the inner function."
        )

    @property
    def square_causal(self):
        """Whether its `causal` is PyTorch's, which is top-left: the same on squares only."""
        return self.has("causal") and self.parameters["causal"].name == "is_causal"

    def bind(self, arguments):
        """Return (args, kwargs, {its name: value}) for {meaning: value}."""
        if self.by_position:
            args = [arguments[role] for role in self.by_position]
            named = {r: a for r, a in arguments.items() if r not in self.by_position}
            names = {role: role for role in self.by_position}
        else:
            args, named, names = [], dict(arguments), {}
        # by position where nothing unknown stands before: that works for wrappers and compiled code
        # too, and behind a gap a value would land in it
        leading = True
        kwargs = {}
        for role, parameter in self.parameters.items():
            if role not in named:
                leading = False
                continue
            leading = leading and parameter.name in self.in_order
            if leading or parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(named[role])
            else:
                kwargs[parameter.name] = named[role]
            names[role] = parameter.name
        return args, kwargs, {names[role]: a for role, a in arguments.items() if role in names}


def understand(function, main, options=(), backward=False):
    """Return the `Learner` of a function.

    Parameters
    ----------
    function : callable, or a class with `apply`
    main : tuple of str
        The meanings of the arguments it must take, in their usual order; a "?" at the end marks
        one that it may leave out.
    options : tuple of str
        The meanings of what else it may take.
    backward : bool
        Whether a class with `apply` is asked for its gradients.

    Raises
    ------
    NotUnderstood
        With a sentence that says what to give, or how to name the arguments.
    """
    if not callable(function):
        raise NotUnderstood(
            f"Give the function itself, as in check(my_function); this is a value of type "
            f"{type(function).__name__}. Did you call the function, or is its name taken?"
        )
    name = getattr(function, "__name__", None) or getattr(
        getattr(function, "func", function), "__name__", type(function).__name__
    )
    function = as_function(function, backward)
    needed = [role for role in main if not role.endswith("?")]
    main = [role.rstrip("?") for role in main]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code has none to show
        return Learner(function, name, {}, tuple(needed))
    found = _recognise(signature, [*main, *options])
    if all(role in found for role in needed):
        recognised = {parameter.name for parameter in found.values()}
        names = (parameter.name for parameter in _positional(signature))
        in_order = tuple(itertools.takewhile(recognised.__contains__, names))
        learner = Learner(function, name, found, in_order=in_order)
    else:
        learner = _by_position(function, name, signature, found, main, needed, options)
    known = {p.name for p in learner.parameters.values()}
    for parameter in _positional(signature)[: len(learner.by_position)]:
        known.add(parameter.name)
    for parameter in signature.parameters.values():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in known and parameter.default is parameter.empty and not variable:
            raise NotUnderstood(
                f"{name} asks for an argument called {parameter.name!r}, and I cannot tell what to "
                f"give it. Names that I know here: {_names([*main, *options])}. "
                f"Rename it, or give it a default."
            )
    return learner


def as_function(function, backward=False):
    """Return a class with `apply` (as `torch.autograd.Function`) as a function; others as they are.

    With `backward`, the function takes do and the arguments of the class's `forward`, and returns
    the gradients of q, k and v.
    """
    if not inspect.isclass(function) or not callable(getattr(function, "apply", None)):
        return function
    if not _writes(function, "forward") or (backward and not _writes(function, "backward")):
        return function.apply
    parameters = list(inspect.signature(function.forward).parameters.values())
    if parameters and parameters[0].name not in SPELLINGS["q"]:  # ctx, whatever it is called
        parameters = parameters[1:]
    signature = inspect.Signature(parameters)
    if not backward:

        def run(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function.apply(*bound.args)

        run.__signature__, run.__wrapped__ = signature, function.forward
        return run

    def gradients(do, *args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if any(base.__module__.startswith("torch") for base in function.__mro__):
            return _autograd(function, do, *bound.args)
        context = _Context()
        function.forward(context, *bound.args)
        return tuple(function.backward(context, do))[:3]

    first = inspect.Parameter("do", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    gradients.__signature__ = inspect.Signature([first, *parameters])
    gradients.__wrapped__ = function.forward
    return gradients


def _writes(cls, name):
    """Whether a class defines a method itself, or inherits it from one that is not PyTorch's."""
    own = (base for base in cls.__mro__ if not base.__module__.startswith("torch"))
    return any(name in base.__dict__ for base in own)


def _autograd(function, do, q, k, v, *rest):
    """Return torch's gradients of a `torch.autograd.Function`."""
    import torch

    inputs = [torch.as_tensor(x).detach().clone().requires_grad_() for x in (q, k, v)]
    o = function.apply(*inputs, *rest)
    o = o[0] if isinstance(o, tuple) else o
    return torch.autograd.grad(o, inputs, torch.as_tensor(do))


class _Context(types.SimpleNamespace):
    """What PyTorch hands to `forward` and `backward` as ctx, for classes without PyTorch."""

    def save_for_backward(self, *arrays):
        self.saved_tensors = arrays


def _recognise(signature, roles):
    """Return {meaning: parameter} for the parameters whose names are known, in their order."""
    by_name = {name: role for role in roles for name in SPELLINGS.get(role, (role,))}
    found, parts = {}, []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = by_name.get(parameter.name)
        if "lse_a" in roles and (part := PART.fullmatch(parameter.name.lower())):
            if part["part"] not in parts:
                parts.append(part["part"])
            what = "o" if part["what"].startswith("o") else "lse"
            role = f"{what}_{'ab'[parts.index(part['part'])]}" if len(parts) < 3 else None
        if role in roles and role not in found:
            found[role] = parameter
    return found


def _positional(signature):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in signature.parameters.values() if p.kind in kinds]


def _by_position(function, name, signature, found, main, needed, options):
    """Return a `Learner` that gets its main arguments by position, if that contradicts no name."""
    positional = _positional(signature)
    stars = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    required = [p for p in positional if p.default is p.empty]
    roles = main if len(main) <= len(required) else needed
    role_of = {p.name: role for role, p in found.items()}
    places = dict(zip((p.name for p in positional), roles, strict=False))
    agree = all(places.get(p, role) == role for p, role in role_of.items() if role in main)
    agree = agree and all(role_of.get(p, role) == role for p, role in places.items())
    if not agree or (len(positional) < len(roles) and not stars):
        missing = [role for role in needed if role not in found]
        have = ", ".join(signature.parameters) or "no arguments"
        raise NotUnderstood(
            f"{name} takes {have}. I need a way to give it {_names(missing)}; name its arguments "
            f"so, as in {name}({', '.join(needed)})."
        )
    extra = {role: p for role, p in found.items() if role in options}
    return Learner(function, name, extra, tuple(roles))


def _names(roles):
    return ", ".join(dict.fromkeys(roles))


def _shown(name, value):
    """Return an argument of a call, as the learner would write it; arrays by their name."""
    if isinstance(value, np.ndarray):
        return name
    if isinstance(value, float):
        value = f"{value:.6g}"
    elif not isinstance(value, bool | int | tuple | str | None):
        return f"{name}=..."
    return f"{name}={value}"


# --- calling ------------------------------------------------------------------------------------


def call(learner, arguments, *, fresh=True):
    """Call the learner's function with {meaning: value}; return an `Answer`.

    Parameters
    ----------
    learner : Learner
    arguments : dict
        By meaning; arrays as NumPy arrays, which are copied unless `fresh` is False.
    fresh : bool
        Whether each call gets arrays of its own.
    """
    given = {r: _give(learner.library, a) if fresh else a for r, a in arguments.items()}
    before = {role: copy.deepcopy(_values(a)) for role, a in given.items() if _is_data(a)}
    args, kwargs, _ = learner.bind(given)
    _, _, named = learner.bind(arguments)
    shown = ", ".join(_shown(name, value) for name, value in named.items())
    answer = Answer(text=f"{learner.name}({shown})", arguments=named)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer.value = learner.function(*args, **kwargs)
    except KeyboardInterrupt:  # the user's
        raise
    except LearnerError as error:
        answer.error = error
    except BaseException as error:  # exit() too, and exception classes of the learner's own
        answer.error = learner_error(error)
    for role, was in before.items():
        now = _values(given[role])
        if not _same(was, now):
            answer.changed.append((_name(learner, role), was, now))
        elif answer.error is None and _holds(answer.value, given[role]):
            answer.given_back = _name(learner, role)
    return answer


def _name(learner, role):
    return learner.parameters[role].name if role in learner.parameters else role


def _give(library, value):
    """Return a copy of an array as what the function wants; other values as they are."""
    if not isinstance(value, np.ndarray):
        return value
    if library == "list":
        return value.tolist()
    if library.startswith("torch"):
        import torch

        tensor = torch.from_numpy(value.copy())
        return tensor.float() if library == "torch32" and value.dtype == float else tensor
    if library == "jax":
        import jax.numpy

        return jax.numpy.asarray(value)
    return value.copy()


def _is_data(value):
    return isinstance(value, np.ndarray | list) or hasattr(value, "__array__")


def _values(value):
    """Return the numbers of an argument, to compare them later."""
    return value if isinstance(value, list) else np.asarray(value)


def _same(was, now):
    """Whether an argument is what it was, NaN being equal to NaN."""
    try:
        return bool(np.array_equal(was, now, equal_nan=True))
    except (TypeError, ValueError):  # a list that is no longer a table of numbers
        return False


def _holds(result, argument):
    """Whether a result is, or contains, an argument or a view of its memory."""
    if isinstance(result, tuple) or (isinstance(result, list) and result is not argument):
        return any(_holds(item, argument) for item in list(result)[:4])
    return (result is argument and _is_data(result)) or share(result, argument)


def share(a, b):
    """Whether two results have memory in common."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return any(share(x, y) for x, y in zip(a, b, strict=False))
    a, b = (x.detach() if hasattr(x, "detach") else x for x in (a, b))
    try:
        a, b = (x.numpy() if hasattr(x, "numpy") else x for x in (a, b))
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return both and bool(np.shares_memory(a, b))
    except Exception:  # whatever a foreign tensor raises; then it is not ours
        return False


def to_array(value):
    """Return a result as a NumPy array of numbers, or raise ValueError with what it is instead."""
    if value is None:
        raise ValueError("None")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    if isinstance(value, list | tuple) and any(hasattr(x, "detach") for x in value):
        value = [to_array(x) for x in value]
    try:
        array = np.asarray(value)
    except Exception as error:  # ragged lists, and what foreign types raise
        ragged = isinstance(value, list | tuple)
        raise ValueError("a ragged list" if ragged else f"a {type(value).__name__}") from error
    if array.dtype == object:
        try:
            array = array.astype(float)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"a {type(value).__name__} of objects") from error
    if array.dtype.kind not in "fiubc":
        raise ValueError(f"a {type(value).__name__}" if array.ndim == 0 else f"dtype {array.dtype}")
    return array


def learner_error(error):
    """Return an exception as a `LearnerError` with the learner's own lines."""
    try:
        text = str(error)
    except BaseException:  # a learner's own exception class
        text = ""
    if isinstance(error, MemoryError):
        return MemoryLimit(f"out of memory: {text}", _own_lines(error))
    name = type(error).__name__
    if not isinstance(error, Exception):
        return Crashed(f"it ended the program ({name}: {text})", _own_lines(error))
    return LearnerError(f"{name}: {text}".rstrip(": "), _own_lines(error))


def _innermost(lines, most=10):
    """Return the innermost of a traceback's lines; those that a recursion repeats stand once."""
    once = {(at["place"], at["line"]): at for at in reversed(list(lines))}
    return list(once.values())[:most][::-1]


def _own_lines(error):
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _own(f.filename)]
    return [
        {
            "place": f"{_place(f.filename)}, line {f.lineno}, in {f.name}",
            "line": (f.line or linecache.getline(f.filename, f.lineno or 0)).strip(),
        }
        for f in frames
    ]


@functools.lru_cache
def _own(filename):
    """Whether a file is the learner's: neither Python's, nor a library's, nor ours."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.abspath(filename)
    if path.startswith(os.path.join(package, "tests") + os.sep):  # they play the learner
        return True
    libraries = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib")]
    within = any(path.startswith(folder + os.sep) for folder in (package, *libraries))
    return not within and "site-packages" not in path and not filename.startswith("<frozen")


def _place(filename):
    """Return what people call a file; a notebook's cells have names that no one would know."""
    if "ipykernel" in filename or filename.startswith("<ipython"):
        return "your cell"
    return os.path.basename(filename) or "your code"


def libraries(learner, error):
    """Return the kinds of arrays worth trying after this error on NumPy arrays."""
    tried = []
    for library in ("torch", "jax"):
        if (speaks_of(library, learner, error) or library in sys.modules) and _importable(library):
            tried += ["torch", "torch32"] if library == "torch" else ["jax"]
    return [*tried, "list"]


def speaks_of(library, learner, error):
    """Whether a function, or its error on NumPy arrays, mentions a library of tensors."""
    text = f"{error.text} {error.learner_traceback}"
    words = {"torch": ("torch", "Tensor", "ndarray' object has"), "jax": ("jax", "jnp")}[library]
    names = {getattr(x, "__name__", "").partition(".")[0] for x in _globals(learner.function)}
    code = getattr(inspect.unwrap(learner.function), "__code__", None)
    names |= set(getattr(code, "co_names", ()))
    return library in names or any(word in text for word in words)


def _globals(function):
    """Return the global values that a function can see, modules among them."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = function if hasattr(function, "__globals__") else type(function).__call__
    return list(getattr(inspect.unwrap(code), "__globals__", {}).values())


def _importable(library):
    try:
        return bool(importlib.import_module(library))
    except Exception:  # not installed, or broken
        return False

"""The child's side of the homework command: it runs the learner's code and knows no right answer.

`remote.py` starts this file as a process of its own and sends it the homework, then one call after
the other; back come arrays, or what went wrong. Whatever the learner's code does to this process is
its own loss: the parent compares what comes back, and believes and runs none of it.

A message is two lengths, a JSON header, and the raw bytes of arrays: no pickle, nothing that can
hold code. Arrays carry numbers known to both ends, so that what was one array stays one array: an
input that is returned, or changed in place, is seen as such on the other side (`Exchange`).

The file needs NumPy alone, so that a child starts in the time that `import numpy` takes.
"""

import __future__

import ast
import builtins
import collections
import faulthandler
import inspect
import itertools
import json
import linecache
import math
import numbers
import os
import re
import signal
import struct
import sys
import traceback
import types
import warnings
from array import array as array_of_one_type

import numpy as np

LENGTHS = struct.Struct("<QQ")  # bytes of JSON, bytes of arrays
MOST_JSON, MOST_BYTES = 16 << 20, 64 << 20  # of one message; homework answers are far smaller
MOST_LINES = 1000  # of a traceback: a recursion may be deeper
REMEMBERED_CALLS = 2  # how long an array that was sent is still known by its number
SEQUENCES = (list, collections.deque, array_of_one_type)
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


class ProtocolError(Exception):
    """What came through the pipe is no message."""


# --- messages, for both ends ---------------------------------------------------------------------


def read_message(fd):
    """Return (header, bytes of the arrays), or None at the end of the pipe."""
    lengths = _read(fd, LENGTHS.size)
    if lengths is None:
        return None
    n_json, n_bytes = LENGTHS.unpack(lengths)
    if n_json > MOST_JSON or n_bytes > MOST_BYTES:
        raise ProtocolError("an answer of more than 64 MiB, or bytes that are not an answer")
    text, body = _read(fd, n_json), _read(fd, n_bytes)
    if text is None or body is None:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bytes that are not an answer") from error
    if not isinstance(header, dict):
        raise ProtocolError("bytes that are not an answer")
    return header, body


def _read(fd, n):
    parts = []
    while n > 0:
        part = os.read(fd, min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def write_message(fd, message):
    """Write all the bytes of a message."""
    view = memoryview(message)
    while view:
        view = view[os.write(fd, view) :]


def message(header, body=b""):
    """Return a header and the bytes of arrays as the bytes of one message."""
    text = json.dumps(header).encode("ascii")
    if len(text) > MOST_JSON or len(body) > MOST_BYTES:
        raise ValueError("an answer of more than 64 MiB")
    return LENGTHS.pack(len(text), len(body)) + text + body


class Passing:
    """Marks an array that is sent as it is now, without a number to know it by later."""

    def __init__(self, value):
        self.value = value


class Items:
    """Marks a list that is sent as the items it has now."""

    def __init__(self, value):
        self.value = value


class _Shared:
    """An array that both ends have; `obj` is what this end's code holds (an array, or a tensor)."""

    def __init__(self, obj, array, call):
        self.obj, self.array, self.call = obj, array, call
        self.sent = None

    def state(self):
        return self.array.shape, self.array.dtype, self.array.tobytes()


class Exchange:
    """Turns values into messages and back, and keeps shared arrays alike at both ends.

    With every message go all arrays that this end changed since the other end last saw them.

    Parameters
    ----------
    first : int
        0 at one end and 1 at the other: both number their arrays in steps of 2.
    as_array : callable
        Returns the NumPy array behind an array or tensor, or None for anything else.
    as_given : callable
        Returns what to hand on for (array, library), the inverse of `as_array`.
    special, unspecial : callable
        Values of any other kind, to JSON and from JSON.
    """

    def __init__(self, first, as_array, as_given, special, unspecial):
        self.first, self.numbers = first, itertools.count(first, 2)
        self.as_array, self.as_given = as_array, as_given
        self.special, self.unspecial = special, unspecial
        self.shared = {}  # number -> _Shared
        self.number_of = {}  # id(obj) -> number, while `shared` keeps obj alive
        self.call = 0
        self.given = {}  # the lists among the arguments of this call, by place or name
        self.lists = {}  # id(list) -> its key in `given`

    def begin(self, call, args, kwargs):
        """Start a call: a list among its arguments stays one list at both ends, like an array."""
        self.call = call
        arguments = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
        self.given = {key: a for key, a in arguments.items() if type(a) is list}
        self.lists = {id(a): key for key, a in self.given.items()}

    def pack(self, header, **values):
        """Return the bytes of one message: the header's fields, and the values."""
        table, parts = [], []

        def add(number, array, library):
            array = np.asarray(array)
            if array.dtype.name not in DTYPES:
                raise ValueError(f"an array of dtype {array.dtype}")
            fields = {"dtype": array.dtype.name, "shape": array.shape, "library": library}
            table.append({"number": number, "writeable": bool(array.flags.writeable), **fields})
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            parts.append(native.tobytes())

        self._forget()
        encoded = {name: self._encode(value, add) for name, value in values.items()}
        states = {number: shared.state() for number, shared in self.shared.items()}
        for number, shared in self.shared.items():
            if states[number] != shared.sent:
                add(number, shared.array, library_of(shared.obj))
        packed = message({**header, "values": encoded, "arrays": table}, b"".join(parts))
        for number, shared in self.shared.items():
            shared.sent = states[number]
        return packed

    def unpack(self, header, body):
        """Bring the shared arrays up to date; return the message's values by name."""
        self._forget()
        try:
            passing, start = {}, 0
            for entry in header["arrays"]:
                start = self._take(entry, body, start, passing)
            return {name: self._decode(value, passing) for name, value in header["values"].items()}
        except ProtocolError:
            raise
        except Exception as error:  # a missing field, a wrong type, a depth without end
            raise ProtocolError("an answer that cannot be read") from error

    def _forget(self):
        for number, shared in list(self.shared.items()):
            if shared.call < self.call - REMEMBERED_CALLS:
                del self.shared[number], self.number_of[id(shared.obj)]

    def _encode(self, value, add):
        kind = type(value)
        if value is None or kind in (bool, float):
            return value
        if kind is str:
            return value[:10_000]
        if kind is int and abs(value) < 2**4096:
            return value
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is list and id(value) in self.lists:
            return {"given": self.lists[id(value)]}
        if kind in SEQUENCES:
            return {"list": [self._encode(item, add) for item in value]}
        if isinstance(value, tuple):
            return {"tuple": [self._encode(item, add) for item in value]}
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: self._encode(item, add) for key, item in value.items()}}
        if kind is slice:
            return {"slice": [self._encode(x, add) for x in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, Items):
            return {"list": [self._encode(item, add) for item in value.value]}
        if isinstance(value, Passing):
            array = self.as_array(value.value)
            if array is None:
                return self._encode(value.value, add)
            return {"passing": self._pass(array, add)}
        array = self.as_array(value)
        if array is None or array.dtype.name not in DTYPES:
            floats = as_floats(value if array is None else array)
            return {"special": self.special(value)} if floats is None else self._encode(floats, add)
        if array.nbytes > MOST_BYTES:  # before it is copied, and before it is remembered
            raise ValueError("an answer of more than 64 MiB")
        if isinstance(value, np.generic):
            return {"scalar": self._pass(array, add)}
        view = self._view(array) if id(value) not in self.number_of else None
        return {"view": view} if view else {"array": self._share(value, array)}

    def _pass(self, array, add):
        number = next(self.numbers)
        add(number, array, "numpy")
        return number

    def _share(self, obj, array):
        number = self.number_of.get(id(obj))
        if number is None:
            number = next(self.numbers)
            self._remember(number, obj, array)
        self.shared[number].call = self.call
        return number

    def _view(self, array):
        """Return [number, offset, shape, strides, dtype] of a view of an array that was given."""
        for number, shared in self.shared.items():
            whole = shared.array
            given = number % 2 != self.first % 2 and whole.flags.c_contiguous
            if given and array.size and np.may_share_memory(array, whole):
                offset = array.ctypes.data - whole.ctypes.data
                return [number, offset, array.shape, array.strides, array.dtype.name]
        return None

    def _remember(self, number, obj, array):
        self.shared[number] = shared = _Shared(obj, array, self.call)
        self.number_of[id(obj)] = number
        return shared

    def _take(self, entry, body, start, passing):
        """Read one array from the body: a new one, or the new state of a shared one."""
        number, name, shape = entry["number"], entry["dtype"], tuple(entry["shape"])
        readable = type(number) is int and name in DTYPES and len(shape) <= 32
        if not readable or not all(type(n) is int and 0 <= n <= MOST_BYTES for n in shape):
            raise ProtocolError("an array that cannot be read")
        dtype = np.dtype(name)
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(body):
            raise ProtocolError("an array that is shorter than its shape")
        array = np.ndarray(shape, dtype, body, start).copy()
        shared = self.shared.get(number)
        if shared is None:
            if number % 2 == self.first % 2 or not 0 <= number < 2**62:
                raise ProtocolError("an array that nobody sent")
            array.flags.writeable = entry["writeable"] is True
            passing[number] = (self.as_given(array, entry["library"]), array)
        elif shared.array.dtype == dtype and shared.array.size == array.size:
            self._update(shared, array.reshape(shared.array.shape))
        return end

    def _update(self, shared, array):
        flags, writeable = shared.array.flags, shared.array.flags.writeable
        try:
            if (
                not writeable
            ):  # the other end has made its array writeable; so can we, if it is ours
                flags.writeable = True
            np.copyto(shared.array, array)
            if not writeable:
                flags.writeable = False
        except ValueError as error:
            raise ProtocolError("new values for an array that cannot be written") from error
        shared.sent = shared.state()

    def _decode(self, value, passing):
        if not isinstance(value, dict):
            if value is None or type(value) in (bool, int, float, str):
                return value
            raise ProtocolError("a value that cannot be read")
        [(kind, content)] = value.items()
        if kind == "array":
            if content not in self.shared:
                obj, array = passing[content]
                shared = self._remember(content, obj, array)
                shared.sent = shared.state()
            self.shared[content].call = self.call
            return self.shared[content].obj
        if kind == "passing":
            return passing[content][0]
        if kind == "scalar":
            return passing[content][1][()]
        if kind == "list":
            return [self._decode(item, passing) for item in content]
        if kind == "tuple":
            return tuple(self._decode(item, passing) for item in content)
        if kind == "dict":
            return {key: self._decode(item, passing) for key, item in content.items()}
        if kind == "slice":
            return slice(*(self._decode(item, passing) for item in content))
        if kind == "complex":
            return complex(*content)
        if kind == "given":
            return self.given[content]
        if kind == "view":
            number, offset, shape, strides, name = content
            dtype = {name: np.dtype(name) for name in DTYPES}[name]
            if math.prod(shape) * dtype.itemsize > MOST_BYTES:  # all zero strides, say
                raise ProtocolError("an answer of more than 64 MiB")
            whole = self.shared[number].array  # np.ndarray refuses what reaches beyond it
            return np.ndarray(shape, dtype, whole, offset, strides)
        if kind == "ellipsis":
            return Ellipsis
        if kind == "special":
            return self.unspecial(content)
        raise ProtocolError("a value that cannot be read")


def library_of(obj):
    """Return the name of the library that an array or tensor comes from."""
    if isinstance(obj, np.ndarray):
        return "numpy"
    return "torch" if hasattr(obj, "detach") else "jax"


def as_array(value):
    """Return the NumPy array behind an array, number or tensor; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, type) or not hasattr(type(value), "__array__"):
        return None
    try:
        if hasattr(value, "detach"):  # a torch tensor, perhaps one that wants gradients
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":
                value = value.float()
        return np.asarray(value)
    except Exception:  # whatever a foreign type raises: then it is no array
        return None


def as_floats(value):
    """Return a longdouble, Decimal or Fraction, or an array of them, as floats; None for the rest.

    Here is what a check does with them where it can see them itself.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind not in "fO":
        return None
    if not isinstance(value, np.ndarray | numbers.Number) or isinstance(value, int):
        return None
    try:
        return np.asarray(value, object).astype(float)
    except Exception:  # no numbers, or one that is too large
        return None


# --- the child -----------------------------------------------------------------------------------


def main():
    """Serve the parent until it closes the pipe."""
    # the parent's pipe moves out of the way: the learner's print goes where stderr goes
    inbox, outbox = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    errors = os.dup(2)
    faulthandler.enable(errors, all_threads=False)
    if hasattr(faulthandler, "register"):  # the parent asks where we are when time is up
        faulthandler.register(signal.SIGUSR1, errors, all_threads=False)
    setup, _ = read_message(inbox)
    limit_resources(**setup["limits"])
    warnings.simplefilter("ignore", RuntimeWarning)  # overflow on purpose is part of the cases
    child = Child(inbox, outbox, setup)
    try:
        child.serve()
    except BaseException as error:
        # not the learner's function but this file has met something: a changed NumPy or builtin
        child.send(message({"broken": f"{type(error).__name__}: {guarded(str, error)[:300]}"}))


def limit_resources(seconds, mebibytes, file_mebibytes, tasks):
    """Let this process and its children use only so much, where the system can hold them to it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the parent
    try:
        import resource
    except ImportError:  # Windows
        return
    wanted = {
        "RLIMIT_AS": mebibytes << 20,
        "RLIMIT_CPU": seconds + 1,
        "RLIMIT_FSIZE": file_mebibytes << 20,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": tasks,
    }
    for name, value in wanted.items():
        limit = getattr(resource, name, None)
        if limit is None or value is None:
            continue
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):  # macOS refuses some; the parent's clock still runs
            pass


class Child:
    """The learner's module, and the pipe to the parent."""

    def __init__(self, inbox, outbox, setup):
        self.inbox, self.outbox, self.setup = inbox, outbox, setup
        self.pid = os.getpid()
        self.exchange = Exchange(1, as_array, as_given, special, self.unspecial)
        self.source = Homework(setup)

    def serve(self):
        """Load the homework, say what is there, and answer calls until the pipe ends."""
        source, exchange = self.source, self.exchange
        source.run()
        function, ready = None, {"problems": source.problems, "notes": source.notes}
        if self.setup["function"] is None:
            ready["found"] = source.find(self.setup["names"])
        else:
            wanted = self.setup["function"], self.setup["backward"]
            function, ready["function"] = source.function(*wanted)
        self.send(message(ready))
        while (received := read_message(self.inbox)) is not None:
            header, body = received
            exchange.call = header["call"]
            values = exchange.unpack(header, body)
            self.send(self.answer(function, header["call"], values["args"], values["kwargs"]))

    def answer(self, function, call, args, kwargs):
        """Return what a call gave, or how it went wrong, as a message."""
        self.exchange.begin(call, args, kwargs)
        lists = {key: [value, repr(value)] for key, value in self.exchange.given.items()}
        try:
            result = function(*args, **kwargs)
            flush()
            changed = {k: Items(x) for k, (x, was) in lists.items() if repr(x) != was}
            return self.exchange.pack({"call": call}, result=result, changed=changed)
        except BaseException as error:  # also exit(): it must not end this process quietly
            flush()
            return message({"call": call, "error": self.source.describe(error)})

    def send(self, answer):
        """Write to the parent, unless this is a copy of the process that the learner forked."""
        if os.getpid() != self.pid:
            os._exit(0)
        write_message(self.outbox, answer)

    def ask(self, memory, do, *args, **kwargs):
        """Let the parent do something with one of its objects; return what comes back."""
        header = {"call": self.exchange.call, "memory": memory, "do": do}
        self.send(self.exchange.pack(header, args=args, kwargs=kwargs))
        header, body = read_message(self.inbox)
        values = self.exchange.unpack(header, body)
        if "raise" in header:
            kind, text = header["raise"]
            raise getattr(builtins, kind)(text)
        return values["value"]

    def unspecial(self, content):
        """Return this end's stand-in for an object that stays with the parent."""
        return remote_memory(self.ask, content["memory"])


def flush():
    """Hand on what the learner printed: the next call may be the last."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or replaced, by the learner
            pass


def as_given(array, library):
    """Return the array as the kind of tensor that the parent had."""
    if library == "torch":
        import torch

        return torch.from_numpy(array)
    if library == "jax":
        import jax.numpy

        return jax.numpy.asarray(array)
    return array


def special(value):
    """Return what the parent may know of a value that is no number and no array."""
    return {"type": type(value).__name__[:100], "repr": guarded(repr, value)[:300]}


def guarded(text_of, value):
    """Return text_of(value), or a word on why there is none: the learner may have written it."""
    try:
        return str(text_of(value))
    except BaseException as error:
        return f"<{type(error).__name__} while printing>"


def remote_memory(ask, number):
    """Return a `Memory` whose loads and stores happen, and are counted, in the parent."""
    base = getattr(sys.modules.get("flashref.memory"), "Memory", object)

    class Memory(base):
        def __init__(self):  # the parent's holds the counts; this one holds nothing
            pass

        def load(self, name, array, rows):
            here = array[rows]
            there = ask(number, "load", name, array, rows)
            # a view where the values agree, as from the parent's own Memory
            return here if np.array_equal(as_array(here), there, equal_nan=True) else there

        def store(self, name, array, rows, tile):
            ask(number, "store", name, array, rows, Passing(tile))

        def on_chip(self, rows, cols, **tiles):
            tiles = {name: Passing(tile) for name, tile in tiles.items()}
            ask(number, "on_chip", rows, cols, **tiles)

        loads = property(lambda self: ask(number, "get", "loads"))
        stores = property(lambda self: ask(number, "get", "stores"))
        peak_sram = property(lambda self: ask(number, "get", "peak_sram"))
        loads_by_array = property(
            lambda self: collections.Counter(ask(number, "get", "loads_by_array"))
        )
        stores_by_array = property(
            lambda self: collections.Counter(ask(number, "get", "stores_by_array"))
        )
        sram_elements = property(lambda self: ask(number, "get", "sram_elements"))
        head = property(
            lambda self: ask(number, "get", "head"),
            lambda self, value: ask(number, "set head", value),
        )

        def __repr__(self):
            return f"<Memory loads={self.loads} stores={self.stores}>"

    return Memory()


# --- the homework --------------------------------------------------------------------------------


class Homework:
    """The learner's file as a module that is run statement by statement, past what fails.

    An error is noted, with its line and cell, and what comes after it is still run: one bad line
    does not hide the exercises below it.
    """

    def __init__(self, setup):
        self.path, self.folder, self.notebook = setup["path"], setup["folder"], setup["notebook"]
        self.cells = setup["cells"]  # [[label, file name in tracebacks, source], ...]
        self.checks = setup["checks"]
        self.problems, self.notes = [], []
        # in Jupyter the code is __main__; in a file that is imported it is not
        name = "__main__" if self.notebook else setup["module"]
        self.module = sys.modules[name] = types.ModuleType(name)
        self.module.__file__ = self.path
        self.labels = {filename: label for label, filename, _ in self.cells}

    def run(self):
        """Run all statements of all cells."""
        sys.path.insert(0, self.folder)
        if self.notebook:
            self.module.__dict__.update(display=lambda *args, **kwargs: None, get_ipython=NoShell)
        if any("flashref" in source for *_, source in self.cells):
            quiet_checks(self.checks)
        flags = 0
        for label, filename, source in self.cells:
            try:
                tree, source, notes = parse(filename, source, self.notebook)
            except Exception as error:  # SyntaxError, a null byte, a depth without end
                self.problem(error)
                continue
            self.notes += [f"{label}, {note}" for note in notes]
            lines = source.splitlines(keepends=True)
            linecache.cache[filename] = (len(source), None, lines, filename)
            for statement in tree.body:
                try:
                    tree = ast.Module([statement], [])
                    code = compile(tree, filename, "exec", flags, dont_inherit=True)
                    flags |= code.co_flags & __future__.annotations.compiler_flag
                    exec(code, self.module.__dict__)
                except BaseException as error:  # exit() too: the functions may stand below
                    self.problem(error)
        flush()

    def problem(self, error):
        """Note that a statement failed; after twenty there is no news in it."""
        if len(self.problems) < 20:
            self.problems.append(self.describe(error))

    def find(self, names):
        """Return what the module has under these names: "function", "flashref's" or "value"."""
        found = {}
        for name in names:
            if name in self.module.__dict__:
                found[name] = self.kind(self.module.__dict__[name])
        return found

    @staticmethod
    def kind(obj):
        """Return what an object of the module is to us."""
        if isinstance(obj, types.ModuleType) or not callable(obj):
            return "value"
        home = getattr(obj, "__module__", None)
        return "flashref's" if str(home).split(".")[0] == "flashref" else "function"

    def function(self, name, backward):
        """Return the function of that name, and what the parent needs to know of it."""
        if name not in self.module.__dict__:
            return None, {"kind": "missing"}
        obj = self.module.__dict__[name]
        kind = self.kind(obj)
        if kind != "function":
            return None, {"kind": kind, "type": type(obj).__name__}
        if inspect.isclass(obj):
            from flashref.check.calling import as_function

            obj = as_function(obj, backward)
        libraries = [name for name in ("torch", "jax") if name in sys.modules]
        return obj, {"kind": kind, "parameters": parameters(obj), "libraries": libraries}

    def describe(self, error):
        """Return an exception as text, with the learner's own lines alone."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [line for frame in frames if (line := self.own_line(frame))]
        text = guarded(str, error)
        if isinstance(error, SyntaxError) and (line := self.own_line(syntax_frame(error))):
            lines.append(line)
            text = str(error.msg)  # str(error) would name the place again
        return {
            "type": type(error).__name__[:100],
            "bases": [
                base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"
            ],
            "text": text[:2000],
            "lines": lines[-MOST_LINES:],
        }

    def own_line(self, frame):
        """Return {place, line} of a frame in the learner's files, None elsewhere."""
        place = self.labels.get(frame.filename)
        if place is None:
            if (
                not frame.filename.startswith(self.folder + os.sep)
                or "site-packages" in frame.filename
            ):
                return None
            place = os.path.relpath(frame.filename, self.folder)
        where = "" if frame.name == "<module>" else f", in {frame.name}"
        return {"place": f"{place}, line {frame.lineno}{where}", "line": frame.line or ""}


def syntax_frame(error):
    """Return a SyntaxError's own place as a frame: it never got as far as running."""
    text = (error.text or "").strip()
    return traceback.FrameSummary(
        error.filename or "", error.lineno or 0, "<module>", lookup_line=False, line=text
    )


# a line that IPython understands and Python does not: %magic, !command, x = !command, name?
MAGIC = re.compile(r"\s*([%!?]|[\w.,\s]+=\s*[%!]|.*\?\s*$)")


def parse(filename, source, notebook):
    """Return a cell's syntax tree, its Python source, and notes on what is no Python.

    Magics and shell lines are found by the parser: where it stops at a line that looks like one,
    that line is left out. So a % inside a string or an expression is never taken for one.
    """
    cell_magic = notebook and re.match(r"\s*%%(\w+)", source)
    if cell_magic and cell_magic[1] not in ("time", "timeit", "capture", "prun"):
        return ast.Module([], []), source, [f"line 1: %%{cell_magic[1]} cell left out"]
    lines, notes = source.split("\n"), []
    while True:
        source = "\n".join(lines)
        try:
            return ast.parse(source, filename), source, notes
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not notebook or not 0 <= at < len(lines) or not MAGIC.match(lines[at]):
                raise
            lines[at], left_out = without_magic(lines[at])
            notes += [f"line {at + 1}: {left_out} left out"] if left_out else []


def without_magic(line):
    """Return the line as Python, and what was left out of it."""
    indent, text = re.match(r"(\s*)(.*)", line).groups()
    if timed := re.match(r"%time(?:it)?\s+(?!-)(.+)", text):  # the statement that is timed counts
        return indent + timed[1], ""
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    if assigned := re.match(r"([\w.,\s]+=)\s*[%!]", text):
        return f"{indent}{assigned[1]} None", shown
    return indent + "pass", shown


class NoShell:
    """Stands for IPython's shell, which is not here: every method does nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class NotRun:
    """The report of a check that the homework calls itself while it is being checked."""

    passed, mistake, failures = True, None, ()

    def raise_if_failed(self):
        """Do nothing."""

    def to_dict(self):
        """Return nothing to tell."""
        return {}

    def __repr__(self):
        return "not run here: this file is being checked by the command"


def quiet_checks(names):
    """Turn the homework's own calls of `flashref.check` off: the parent is about to run them."""
    try:
        from flashref import check
    except Exception:  # the homework will meet the same error and show it
        return

    def not_run(*args, **kwargs):
        return NotRun()

    not_run.__module__ = check.__name__  # flashref's own, should the homework import it by name
    for name in names:
        setattr(check, name, not_run)


def parameters(function):
    """Return [name, kind, has a default, default] for each parameter, None if unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    described = []
    for p in signature.parameters.values():
        plain = p.default is None or type(p.default) in (bool, int, float, str)
        default = p.default if plain else None
        described.append([p.name, p.kind.name, p.default is not p.empty, default])
    return described


if __name__ == "__main__":
    main()

"""The parent's side of the homework command: code that nobody vouches for, made callable.

A `Remote` looks like the learner's function to a check: same signature, arrays in, arrays out. Each
call goes to a process of its own (`worker.py`) and is bounded in time and memory. Only this side
compares, so an answer that passes is an answer that is right: the process over there cannot say
"passed", it can only send numbers.

That keeps a run alive and its verdicts honest; it is no wall around the machine. The homework runs
with the rights of whoever starts the command, so code from strangers belongs in a container.
"""

import contextlib
import inspect
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from flashref.check import worker
from flashref.check.calling import Crashed, LearnerError, MemoryLimit, TimeLimit

LINUX = sys.platform == "linux"
BIGGEST_FILE = 16 << 20  # bytes of homework; a notebook with pictures stays below
POLL = 0.1  # seconds between two looks at the clock and at the memory
BOOT = "import sys, runpy; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"

# the names that a homework's functions may have, and the check that each of them goes to;
# a name that could mean two things (naive_softmax, fa2_traffic) is not here
NAMES = {
    "softmax": "softmax",
    "safe_softmax": "softmax",
    "online_softmax": "online_softmax",
    "merge_attention": "merge_attention",
    "attention": "attention",
    "standard_attention": "attention",
    "naive_attention": "attention",
    "flash_attention": "attention",
    "flash_attention_1": "attention",
    "flash_attention_2": "attention",
    "attention_backward": "attention_backward",
    "standard_attention_backward": "attention_backward",
    "naive_attention_backward": "attention_backward",
    "flash_attention_backward": "attention_backward",
    "flash_attention_1_backward": "attention_backward",
    "flash_attention_2_backward": "attention_backward",
    "block_sparse_attention": "block_sparse_attention",
    "block_sizes": "block_sizes",
    "traffic": "traffic",
}
CHECKS = list(dict.fromkeys(NAMES.values()))


class Unreadable(Exception):
    """The homework file cannot be read as what its name says."""


@dataclass(frozen=True)
class Limits:
    """What one exercise may use: its process, with all the processes and threads it starts."""

    seconds: float = 60.0  #: of waiting for it, loading the file included
    mebibytes: int = 4096  #: address space of a process; on Linux also memory of all of them
    file_mebibytes: int = 64  #: size of a file it writes
    tasks: int = 64  #: processes and threads beyond those that its user has already


@dataclass(frozen=True)
class Homework:
    """A homework file as pieces of source text; nothing of it has run."""

    path: Path
    cells: list  #: [label, file name in tracebacks, source] of each code cell; a .py file is one

    @property
    def notebook(self):
        """Whether the file is a notebook."""
        return self.path.suffix == ".ipynb"

    @property
    def labels(self):
        """What people call a piece of code, by what tracebacks call it."""
        return {filename: label for label, filename, _ in self.cells}

    def defines(self, names):
        """Return those names that the text seems to define, without running any of it."""
        text = "\n".join(source for *_, source in self.cells)
        pattern = r"^(?:async\s+def|def|class)\s+{0}\b|^{0}\s*="
        return [name for name in names if re.search(pattern.format(name), text, re.MULTILINE)]

    def line(self, filename, number, function):
        """Return {place, line} for a place in the homework's code."""
        [source] = [source for _, name, source in self.cells if name == filename]
        lines = source.splitlines()
        where = "" if function == "<module>" else f", in {function}"
        return {
            "place": f"{self.labels[filename]}, line {number}{where}",
            "line": lines[number - 1].strip() if 0 < number <= len(lines) else "",
        }


def read_homework(path):
    """Return the `Homework` in a .py or .ipynb file.

    Raises
    ------
    Unreadable
        If there is no such file, or it is neither Python text nor a notebook.
    """
    path = Path(path)
    if path.suffix not in (".py", ".ipynb"):
        raise Unreadable(f"{path} is neither a .py nor an .ipynb file")
    if not path.is_file():  # a pipe of that name would keep us waiting for ever
        raise Unreadable(f"there is no file {path}")
    try:
        if path.stat().st_size > BIGGEST_FILE:
            raise Unreadable(f"{path} is larger than {BIGGEST_FILE >> 20} MiB")
        if path.suffix == ".ipynb":
            return Homework(path.absolute(), _code_cells(path))
        with tokenize.open(path) as file:  # minds the coding cookie
            # a real path for a file, so that numba can cache what it compiles
            return Homework(path.absolute(), [[path.name, str(path.absolute()), file.read()]])
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise Unreadable(f"{path} is not Python text: {error}") from error


def _code_cells(path):
    """Return the pieces of a notebook's code cells (nbformat 4, and 3 with its worksheets)."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = notebook["cells"] if "cells" in notebook else notebook["worksheets"][0]["cells"]
        sources = [
            "".join(cell["source"] if "source" in cell else cell["input"])
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Unreadable(f"{path} is not a notebook: {type(error).__name__}: {error}") from error
    labels = [f"{path.name}, code cell {i}" for i in range(1, len(sources) + 1)]
    return [[label, label, source] for label, source in zip(labels, sources, strict=True)]


class Workplace:
    """Where the processes run: a temporary folder, and a rule that none of them stays behind.

    On Linux the orphans of a process come to us while the workplace is open, so that even one that
    left its group and its session is found and ended.
    """

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="flashref-", ignore_cleanup_errors=True)
        self.folder = Path(self._stack.enter_context(folder))
        self.home = self.folder / "home"
        self.home.mkdir()
        self._before = None
        if LINUX:
            self._stack.enter_context(_process_flag(36, 37, 1))  # PR_SET_CHILD_SUBREAPER
            self._stack.enter_context(_process_flag(4, 3, 0))  # PR_SET_DUMPABLE: no ptrace
            self._before = {pid for pid, parent, _ in _processes() if parent == os.getpid()}
        return self

    def __exit__(self, *exc):
        self.sweep()
        self._stack.close()

    def sweep(self):
        """End and reap whatever the processes left running."""
        deadline = time.monotonic() + 5  # against a fork bomb that is quicker than we are
        while (left := self.running()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def running(self):
        """Return {pid: resident bytes} of all processes started since the workplace was opened."""
        if self._before is None:
            return {}
        below = {}
        for pid, parent, resident in _processes():
            below.setdefault(parent, []).append((pid, resident))
        found, parents = {}, [os.getpid()]
        for parent in parents:
            for pid, resident in below.get(parent, ()):
                if pid not in self._before:
                    found[pid] = resident
                    parents.append(pid)
        return found


@contextlib.contextmanager
def _process_flag(set_it, get_it, value):
    """Set one of Linux's process attributes for a while; a system that refuses goes without."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int(0)
    if get_it == 3:  # PR_GET_DUMPABLE returns its answer, PR_GET_CHILD_SUBREAPER writes it
        before.value = prctl(get_it)
    else:
        prctl(get_it, ctypes.byref(before))
    prctl(set_it, value, 0, 0, 0)
    try:
        yield
    finally:
        prctl(set_it, before.value, 0, 0, 0)


def _processes():
    """Yield (pid, parent's pid, resident bytes) of every process; Linux only."""
    page = os.sysconf("SC_PAGE_SIZE")
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
                fields = stat.rpartition(")")[2].split()
                yield int(name), int(fields[1]), int(fields[21]) * page


def _tasks_of_user():
    """Return how many processes and threads this user has; what RLIMIT_NPROC counts."""
    total, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


class Process:
    """One run of the homework in a process of its own.

    Attributes
    ----------
    ready : dict
        What the process said when the homework was loaded: problems, notes, and what it found.
    ended : LearnerError or None
        Why the process was stopped before its time. An exercise whose process did not live to the
        end has not passed, whatever the check made of the calls until then.
    printed : Printed
        What the homework wrote to its standard output and standard error.
    """

    def __init__(self, homework, workplace, limits, function=None, check=None):
        self.homework, self.workplace, self.limits = homework, workplace, limits
        # without a function: only look which ones are there
        self.function, self.check = function, check or NAMES.get(function)
        self.left = limits.seconds
        self.ready, self.ended, self.printed = {}, None, Printed()
        self._memories, self._closed = [], False
        self.exchange = worker.Exchange(
            0, worker.as_array, lambda array, library: array, self._special, unreadable
        )
        # threads, since on Windows nothing else reads a pipe with a time limit
        self._inbox, self._outbox = queue.Queue(maxsize=2), queue.Queue()
        self._start()

    def _start(self):
        folder = Path(tempfile.mkdtemp(dir=self.workplace.folder))
        boot = BOOT.format(path=_import_path(), file=worker.__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-u", "-X", "utf8", "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env=_environment(self.workplace.home),
            start_new_session=True,
        )
        works = (self._read, self._write, self._drain)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def load(self):
        """Send the homework and wait until it has run; what it says then is `ready`.

        Raises
        ------
        LearnerError
            If it did not get that far: the process crashed, or met a limit.
        """
        limits = {
            "seconds": int(self.limits.seconds),
            "mebibytes": self.limits.mebibytes,
            "file_mebibytes": self.limits.file_mebibytes,
            "tasks": _tasks_of_user() + self.limits.tasks if LINUX else None,
        }
        setup = {
            "path": str(self.homework.path),
            "folder": str(self.homework.path.parent),
            "module": self.homework.path.stem,
            "notebook": self.homework.notebook,
            "cells": self.homework.cells,
            "names": list(NAMES),
            "checks": CHECKS,
            "function": self.function,
            "backward": self.check == "attention_backward",
            "limits": limits,
        }
        self._outbox.put(worker.message(setup))
        self.ready, _ = self._receive()

    def call(self, args, kwargs):
        """Run the learner's function over there; return its result.

        Raises
        ------
        LearnerError
            With the learner's own error, or because the process crashed or met a limit.
        """
        if self.ended is not None:
            raise self.ended
        self.exchange.call += 1
        self._memories.clear()
        self._outbox.put(self.exchange.pack({"call": self.exchange.call}, args=args, kwargs=kwargs))
        self.exchange.begin(self.exchange.call, args, kwargs)
        try:
            while True:
                header, body = self._receive()
                if header.get("call") != self.exchange.call:
                    raise worker.ProtocolError("an answer to a call that nobody made")
                if "error" in header:
                    error = learner_error(header["error"])
                    break
                values = self.exchange.unpack(header, body)
                if "memory" not in header:
                    for key, items in values["changed"].items():
                        self.exchange.given[key][:] = list(items)
                    return values["result"]
                self._serve_memory(header, values)
        except (worker.ProtocolError, KeyError, TypeError, ValueError) as broken:
            raise self.stop(Crashed(f"{GARBLED}: {broken}")) from broken
        raise self.stop(error) if isinstance(error, Crashed | MemoryLimit) else error

    def _serve_memory(self, header, values):
        """Do what the other side asked of one of our memories, and answer."""
        memory, do = self._memories[int(header["memory"])], header["do"]
        answer, value = {"call": self.exchange.call}, None
        try:
            if do in ("load", "store", "on_chip"):
                value = getattr(memory, do)(*values["args"], **values["kwargs"])
            elif do == "get":
                [name] = values["args"]
                value = getattr(memory, name) if name in MEMORY_NUMBERS else None
                value = dict(value) if isinstance(value, dict) else value
            elif do == "set head":
                [memory.head] = values["args"]
        except (TypeError, ValueError, LookupError, AttributeError, MemoryError) as error:
            answer["raise"] = [type(error).__name__, str(error)]
        self._outbox.put(self.exchange.pack(answer, value=worker.Passing(value)))

    def _special(self, value):
        """Return how the other side is told of an object that stays here."""
        if callable(getattr(value, "load", None)) and callable(getattr(value, "store", None)):
            self._memories.append(value)
            return {"memory": len(self._memories) - 1}
        raise TypeError(f"{type(value).__name__} cannot be sent to another process")

    # --- the pipe ---

    def _read(self):
        try:
            while (received := worker.read_message(self._process.stdout.fileno())) is not None:
                self._inbox.put(received)
        except worker.ProtocolError as error:
            self._inbox.put(error)
        except (OSError, ValueError):  # closed by stop()
            pass
        self._inbox.put(None)

    def _write(self):
        with contextlib.suppress(OSError, ValueError):
            while (data := self._outbox.get()) is not None:
                worker.write_message(self._process.stdin.fileno(), data)

    def _drain(self):
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self._process.stderr.fileno(), 1 << 16):
                self.printed.add(part)

    def _receive(self):
        """Return the next message, before time or memory run out."""
        if self.ended is not None:
            raise self.ended
        started = time.monotonic()
        try:
            while True:
                left = self.left - (time.monotonic() - started)
                if left <= 0:
                    raise self._out_of_time()
                try:
                    received = self._inbox.get(timeout=min(POLL, left))
                except queue.Empty:
                    if sum(self.workplace.running().values()) > self.limits.mebibytes << 20:
                        text = f"its processes took more than {self.limits.mebibytes} MiB"
                        raise self.stop(MemoryLimit(text)) from None
                    if self._process.poll() is not None:  # though a copy of it holds the pipe
                        raise self._how_it_ended() from None
                    continue
                if received is None:
                    raise self._how_it_ended()
                if isinstance(received, worker.ProtocolError):
                    raise self.stop(Crashed(f"{GARBLED}: {received}"))
                if "broken" in received[0]:
                    what = "its process broke; does the file change NumPy or Python itself?"
                    raise self.stop(Crashed(f"{what} {received[0]['broken']!s:.500}"))
                return received
        finally:
            self.left -= time.monotonic() - started

    # --- the end ---

    def close(self):
        """End the process and all that it started; a second time there is nothing to do."""
        if self._closed:  # its number may be another's by now
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self._process.pid, signal.SIGKILL)  # no such call on Windows
        self._process.kill()
        self._process.wait()
        self.workplace.sweep()
        self._outbox.put(None)
        deadline = time.monotonic() + 1
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):  # a reader that waits for room must get on
                    self._inbox.get_nowait()
                thread.join(0.01)
        if not any(thread.is_alive() for thread in self._threads):
            # else an escaped process holds a pipe (macOS), and closing it under the thread's hands
            # would let the thread read from whatever gets the same number next
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                pipe.close()

    def stop(self, error):
        """End the process before its time; return the error that says why."""
        self.close()
        self.ended = error
        return error

    def _out_of_time(self):
        if hasattr(signal, "SIGUSR1"):  # faulthandler over there answers with the line it is at
            self.printed.forget_end()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 0.5
            while not self._lines() and time.monotonic() < deadline:
                time.sleep(0.02)
        text = f"still running after {self.limits.seconds:g} s; is there a loop that never ends?"
        return self.stop(TimeLimit(text, self._lines()))

    def _how_it_ended(self):
        """Return the error that says why the process ended, or closed its pipe, by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        code = self._process.returncode
        if code is None:
            text = "it closed the pipe to the checker"
        elif code >= 0:
            text = f"it ended Python itself, with exit code {code}"
        elif -code == getattr(signal, "SIGXCPU", None):
            return self._out_of_time()
        elif -code == signal.SIGKILL:
            text = "it was killed (SIGKILL); is the machine out of memory?"
        else:
            names = {number.value: number.name for number in signal.Signals}
            name = names.get(-code, f"signal {-code}")
            text = f"it crashed the Python interpreter ({name})"
        self.close()  # so that all it wrote has been read, the lines too
        return self.stop(Crashed(text, self._lines()))

    def _lines(self):
        """Return the learner's lines in faulthandler's last dump, outermost first."""
        dump = self.printed.end().rpartition("most recent call first")[2]
        frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', dump)
        ours = {
            name.encode("ascii", "backslashreplace").decode(): name for name in self.homework.labels
        }
        lines = [
            self.homework.line(ours[file], int(number), name.strip())
            for file, number, name in reversed(frames)
            if file in ours
        ]
        return lines


class Printed:
    """The beginning and the end of what a process wrote; a flood in between is let go."""

    def __init__(self):
        self._start, self._end, self._total = b"", b"", 0

    def add(self, part):
        """Take what was written next."""
        self._start += part[: max(0, 4096 - len(self._start))]
        self._end = (self._end + part)[-16384:]
        self._total += len(part)

    def forget_end(self):
        """Start the end anew."""
        self._end = b""

    def end(self):
        """Return the last of it."""
        return self._end.decode(errors="replace")

    def __str__(self):
        """Return the first of it, without what faulthandler wrote at a crash."""
        text = self._start.decode(errors="replace")
        text = re.split(r"^(?:Fatal Python error|Current thread|Stack )", text, flags=re.M)[0]
        more = self._total - len(self._start)
        return text + (f"\n... and {more:,} bytes more" if more else "")


class Remote:
    """The learner's function, as far as a check can tell; every call runs in the other process."""

    def __init__(self, process):
        self._process = process
        self.__name__ = self.__qualname__ = process.function
        self.__signature__ = _signature(process.ready["function"]["parameters"])
        # where a check looks which libraries a function uses, to give it tensors of their kind
        libraries = {str(name) for name in process.ready["function"]["libraries"]}
        self.__globals__ = {name: SimpleNamespace(__name__=name) for name in libraries}

    def __call__(self, *args, **kwargs):
        """Call the learner's function over there."""
        return self._process.call(args, kwargs)


def _signature(parameters):
    """Return the signature that the other side described."""
    if parameters is None:
        return inspect.signature(lambda *args: None)
    return inspect.Signature(
        inspect.Parameter(
            name,
            getattr(inspect.Parameter, kind),
            default=default if has_default else inspect.Parameter.empty,
        )
        for name, kind, has_default, default in parameters
    )


class _Unreadable:
    """Stands for a result that is neither numbers nor arrays; prints like the original."""

    text = ""

    def __repr__(self):
        return self.text


def unreadable(content):
    """Return a stand-in for a result of a kind that no answer can be, with its type's name."""
    name, text = f"{content['type']!s:.100}", f"{content['repr']!s:.300}"
    return type(name if name.isidentifier() else "object", (_Unreadable,), {"text": text})()


def learner_error(fields):
    """Return the learner's exception, described by the other side, as one of ours."""
    kind, text = f"{fields['type']!s:.100}", f"{fields['text']!s:.2000}"
    lines = [{key: f"{at[key]!s:.300}" for key in ("place", "line")} for at in fields["lines"]]
    bases = [str(base) for base in fields["bases"]]
    if "MemoryError" in bases:
        return MemoryLimit(f"out of memory: {text}", lines)
    if "Exception" not in bases:  # SystemExit, KeyboardInterrupt: in-process they would end us
        return Crashed(f"it ended the program ({kind}: {text})", lines)
    return LearnerError(f"{kind}: {text}".removesuffix(": "), lines)


GARBLED = "it wrote to the pipe that belongs to the checker"
MEMORY_NUMBERS = (
    *("loads", "stores", "loads_by_array", "stores_by_array"),
    *("peak_sram", "sram_elements", "head"),
)


def _import_path():
    """Return where the process finds modules: as we do, but not in the folder we started in."""
    here = os.getcwd()
    path = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    root = str(Path(worker.__file__).parents[2])
    return path if root in path else [*path, root]


def _environment(home):
    """Return the few variables that a process needs; one thread for BLAS, so that time is fair."""
    kept = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "WINDIR", "PATHEXT", "NUMBA_ENABLE_CUDASIM")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {k: v for k, v in os.environ.items() if k.startswith(("OPENBLAS_", "CUDA_"))}
    for name in ("OPENBLAS_NUM", "OMP_NUM", "MKL_NUM", "VECLIB_MAXIMUM", "NUMBA_NUM"):
        environment[f"{name}_THREADS"] = "1"
    for name in ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"):
        environment[name] = str(home)
    return {**environment, "LC_ALL": "C.UTF-8", "MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu"}

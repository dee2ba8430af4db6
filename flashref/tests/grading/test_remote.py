"""The proxy behaves like the learner's function, and no message talks the parent into anything."""

import errno
import inspect
import json
import math
import os
import threading

import numpy as np
import pytest

import flashref
from flashref.check import remote, worker
from flashref.check.calling import Crashed, LearnerError, MemoryLimit, TimeLimit

SOURCE = '''
import numpy as np

kept = []
buffer = np.zeros(2)

class Broken(ValueError):
    pass

def softmax(x, axis=-1, *, block_size=None, name="plain", scale=1.5):
    """Does what the first number of x says."""
    case = int(x.flat[0])
    if case == 0:
        return x
    if case == 1:
        x *= 2
        return [1.0, float("nan"), (2, np.float32(0.1)), {"a": None, "b": True}]
    if case == 2:
        buffer[:] = x[1:]
        return buffer
    if case == 3:
        raise Broken("three \\x1b[31m is wrong")
    if case == 4:
        return np.float32(2.5), np.arange(6, dtype=np.float32).reshape(2, 3).T, "text", 1 + 2j
    if case == 5:
        return np.array(["a", "b"]), object(), np.array([1, object()]), 10**30
    if case == 6:
        kept.append(x)
        return len(kept) == 2 and kept[0] is kept[1]
    if case == 7:
        x.setflags(write=True)
        x[0] = -1
        return x.copy()
    if case == 8:
        return axis, block_size, name
    if case == 9:
        return np.zeros((0, 3)), np.float64("-inf"), np.array(5), x[1:]
    if case == 10:
        raise KeyboardInterrupt

def traffic(q, memory):
    q_i = memory.load("Q", q, slice(0, 2))
    o = np.zeros_like(q)
    memory.store("O", o, slice(0, 2), 2 * q_i)
    o[2:] = 7  # behind the memory's back
    first = memory.load("O", o, slice(1, 3))
    try:
        memory.load("Q", q, (0, 1, 2, 3))
    except IndexError as error:
        text = str(error)
    return o, first, memory.loads, memory.stores, np.shares_memory(q_i, q), text

def attention(q, k, v, memory):
    from flashref import flash_attention_2
    return flash_attention_2(q, k, v, block_q=2, block_k=2, memory=memory, return_lse=True)
'''


@pytest.fixture
def workplace():
    with remote.Workplace() as workplace:
        yield workplace
    assert not workplace.running()
    assert not workplace.folder.exists()


@pytest.fixture
def serve(tmp_path, workplace):
    """Return a function that makes a Remote from source text."""
    processes = []

    def serve(source, name, **limits):
        path = tmp_path / "homework.py"
        path.write_text(source)
        homework = remote.read_homework(path)
        process = remote.Process(homework, workplace, remote.Limits(**limits), name)
        processes.append(process)
        process.load()
        return remote.Remote(process)

    yield serve
    for process in processes:
        process.close()


@pytest.fixture
def softmax(serve):
    return serve(SOURCE, "softmax")


def test_signature_and_name(softmax):
    assert softmax.__name__ == "softmax"
    want = "(x, axis=-1, *, block_size=None, name='plain', scale=1.5)"
    assert str(inspect.signature(softmax)) == want


def test_arguments_arrive_by_position_and_by_name(softmax):
    assert softmax(np.array([8.0]), 3, block_size=4, name="other") == (3, 4, "other")
    assert softmax(x=np.array([8.0])) == (-1, None, "plain")


def test_the_input_returned_is_the_input(softmax):
    x = np.array([0.0, 5.0])
    assert softmax(x) is x


def test_an_input_changed_in_place_is_changed_here(softmax):
    x = np.array([1.0, 5.0])
    result = softmax(x)
    np.testing.assert_array_equal(x, [2, 10])
    assert math.isnan(result[1]) and type(result[0]) is float
    assert result[2] == (2, np.float32(0.1)) and type(result[2][1]) is np.float32
    assert result[3] == {"a": None, "b": True}


def test_an_array_that_two_calls_return_is_one_array_here(softmax):
    first = softmax(np.array([2.0, 5.0, 6.0]))
    np.testing.assert_array_equal(first, [5, 6])
    second = softmax(np.array([2.0, 7.0, 8.0]))
    assert second is first  # a check that compares the two answers has to see this
    np.testing.assert_array_equal(first, [7, 8])


def test_an_array_sent_twice_is_one_array_there_with_its_new_values(softmax):
    x = np.array([6.0, 0.0])
    assert softmax(x) is False
    x[1] = 1
    assert softmax(x) is True


def test_lists_among_the_arguments_stay_lists(serve):
    fn = serve(
        """
def softmax(x, y=None):
    x[0] = [7.0, x[1]]
    return (y, x) if y else [1.0, 2.0]
""",
        "softmax",
    )
    x, y = [1.0, float("nan")], [3.0]
    assert fn(x) == [1, 2] and x[0][0] == 7
    given = fn([1.0, 2.0], y=y)
    assert given[0] is y and given[1] == [[7.0, 2.0], 2.0]
    second = [1.0, 2.0]
    assert fn(second, y)[1] is second


def test_a_view_of_an_input_is_a_view_here(serve):
    fn = serve("def softmax(x):\n    return x[::-2, 1:], x.T, x + 0\n", "softmax")
    x = np.arange(12.0).reshape(4, 3)
    reverse, transposed, new = fn(x)
    np.testing.assert_array_equal(reverse, x[::-2, 1:])
    np.testing.assert_array_equal(transposed, x.T)
    assert np.shares_memory(reverse, x) and np.shares_memory(transposed, x)
    np.testing.assert_array_equal(new, x)
    assert not np.shares_memory(new, x)


def test_kinds_of_results(softmax):
    number, matrix, text, z = softmax(np.array([4.0]))
    assert type(number) is np.float32 and number == 2.5
    assert matrix.dtype == np.float32 and matrix.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (text, z) == ("text", 1 + 2j)
    words, thing, mixed, large = softmax(np.array([5.0]))
    assert large == 10**30
    for strange, name in ((words, "ndarray"), (thing, "object"), (mixed, "ndarray")):
        assert type(strange).__name__ == name and type(strange) not in (np.ndarray, object)
    assert repr(words) == "array(['a', 'b'], dtype='<U1')"
    empty, low, nought, tail = softmax(np.array([9.0, 1.0]))
    assert empty.shape == (0, 3) and low == -np.inf and nought.shape == () and tail.tolist() == [1]


def test_a_read_only_input_is_read_only_there(softmax):
    x = np.array([7.0])
    x.flags.writeable = False
    softmax(x)  # it makes its array writeable, as it could here
    assert x[0] == -1 and not x.flags.writeable


def test_an_error_comes_with_the_learners_line_alone(softmax):
    with pytest.raises(LearnerError) as caught:
        softmax(np.array([3.0]))
    assert "Broken: three" in str(caught.value)
    [at] = caught.value.lines
    assert at["place"] == "homework.py, line 22, in softmax"
    assert at["line"].startswith("raise Broken(")
    np.testing.assert_array_equal(softmax(x := np.array([0.0])), x)  # and life goes on


def test_ending_the_program_is_no_ordinary_error(softmax):
    with pytest.raises(Crashed, match="KeyboardInterrupt"):
        softmax(np.array([10.0]))
    with pytest.raises(Crashed):  # once ended, always ended
        softmax(np.array([0.0]))


def test_memory_is_counted_here(serve):
    memory = flashref.Memory()
    q = np.arange(6.0).reshape(3, 2)
    o, first, loads, stores, view, text = serve(SOURCE, "traffic")(q, memory)
    assert (memory.loads, memory.stores) == (loads, stores) == (8, 4)
    assert memory.loads_by_array == {"Q": 4, "O": 4}
    np.testing.assert_array_equal(o, [[0, 2], [4, 6], [7, 7]])
    np.testing.assert_array_equal(first, [[4, 6], [7, 7]])
    assert view  # a tile is a view, there as here
    assert "too many indices" in text


def test_counts_by_array_are_seen_there_and_belong_to_here(serve):
    fn = serve(
        """
def traffic(q, memory):
    memory.load("Q", q, slice(0, 2))
    memory.store("O", q, slice(0, 1), q[:1])
    seen = dict(memory.loads_by_array), dict(memory.stores_by_array), memory.loads_by_array["K"]
    memory.loads_by_array["Q"] = 0
    return seen
""",
        "traffic",
    )
    memory = flashref.Memory()
    assert fn(np.ones((3, 2)), memory) == ({"Q": 4}, {"O": 2}, 0)
    assert memory.loads_by_array == {"Q": 4}


def test_a_recursion_shows_each_of_its_lines_once(serve):
    fn = serve(
        """
def even(n):
    return odd(n - 1)

def odd(n):
    return even(n - 1)

def softmax(x):
    return even(x)
""",
        "softmax",
    )
    with pytest.raises(LearnerError) as caught:
        fn(0.0)
    assert caught.value.kind == "RecursionError"
    lines = [at["line"] for at in caught.value.lines]
    assert lines[0] == "return even(x)"
    assert sorted(lines[1:]) == ["return even(n - 1)", "return odd(n - 1)"]


def test_flashref_over_there_accepts_the_memory_of_here(serve):
    there, here = flashref.Memory(), flashref.Memory()
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    o, lse = serve(SOURCE, "attention")(q, k, v, there)
    want = flashref.flash_attention_2(q, k, v, block_q=2, block_k=2, memory=here, return_lse=True)
    np.testing.assert_array_equal(o, want[0])
    np.testing.assert_array_equal(lse, want[1])
    assert (there.loads, there.stores, there.peak_sram) == (here.loads, here.stores, here.peak_sram)
    assert there.events == here.events


def test_answers_to_calls_that_nobody_made_end_it(serve):
    fn = serve(
        """
import json, os, struct

def softmax(x):
    text = json.dumps({"call": 7, "values": {"result": 1.0, "changed": {}}, "arrays": []}).encode()
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("<QQ", len(text), 0) + text)
        except OSError:
            pass
    return x
""",
        "softmax",
    )
    with pytest.raises(Crashed, match="nobody made"):
        fn(np.ones(3))


def test_tensors_stay_tensors_there(serve):
    torch = pytest.importorskip("torch")
    fn = serve(
        """
import torch

def softmax(x):
    y = torch.nn.Parameter(torch.softmax(x, -1))
    x.mul_(2)
    return y, x, x.bfloat16(), [y[0]]
""",
        "softmax",
    )
    x = torch.randn(3, dtype=torch.float64)
    was = x.clone()
    y, same, coarse, _ = fn(x)
    assert same is x and torch.equal(x, 2 * was)
    np.testing.assert_allclose(y, torch.softmax(was, -1))
    np.testing.assert_array_equal(coarse, x.bfloat16().float())
    assert "torch" in fn.__globals__


@pytest.mark.parametrize("body, error, says", [
    ("while True: pass", TimeLimit, "still running after 2 s"),
    ("import ctypes; ctypes.string_at(0)", Crashed, "SIGSEGV"),
    ("return bytes(10**10)", MemoryLimit, "out of memory"),
])  # fmt: skip
def test_limits_say_where(serve, body, error, says):
    fn = serve(f"def softmax(x):\n    {body}\n", "softmax", seconds=2.0, mebibytes=1000)
    with pytest.raises(error, match=says) as caught:
        fn(np.ones(3))
    assert caught.value.lines == [
        {"place": "homework.py, line 2, in softmax", "line": body},
    ]


# --- the protocol --------------------------------------------------------------------------------


def exchange():
    as_given = lambda array, library: array  # noqa: E731
    return worker.Exchange(0, worker.as_array, as_given, lambda x: None, remote.unreadable)


def entry(**more):
    return {
        "number": 1,
        "dtype": "float64",
        "shape": [2],
        "library": "numpy",
        "writeable": True,
        **more,
    }


BODY = np.array([1.0, 2.0]).tobytes()


@pytest.mark.parametrize("header, body", [
    ({}, b""),
    ({"values": {}}, b""),
    ({"values": [], "arrays": []}, b""),
    ({"values": {"result": {"array": 1}}, "arrays": []}, b""),
    ({"values": {"result": {"array": [1]}}, "arrays": []}, b""),
    ({"values": {"result": {"eval": "1"}}, "arrays": []}, b""),
    ({"values": {"result": [1, 2]}, "arrays": []}, b""),
    ({"values": {"result": {}}, "arrays": []}, b""),
    ({"values": {"result": {"special": {"type": "Report"}}}, "arrays": []}, b""),
    ({"values": {}, "arrays": [entry()]}, BODY[:15]),
    ({"values": {}, "arrays": [entry(dtype="object")]}, BODY),
    ({"values": {}, "arrays": [entry(dtype="O")]}, BODY),
    ({"values": {}, "arrays": [entry(dtype=["float64"])]}, BODY),
    ({"values": {}, "arrays": [entry(shape=[-2])]}, BODY),
    ({"values": {}, "arrays": [entry(shape=[10**30])]}, BODY),
    ({"values": {}, "arrays": [entry(shape=[2.0])]}, BODY),
    ({"values": {}, "arrays": [entry(shape=[1] * 40)]}, BODY),
    ({"values": {}, "arrays": [entry(shape="2")]}, BODY),
    ({"values": {}, "arrays": [entry(number=0)]}, BODY),  # a number that only we give
    ({"values": {}, "arrays": [entry(number=-1)]}, BODY),
    ({"values": {}, "arrays": [entry(number="1")]}, BODY),
    ({"values": {}, "arrays": {"0": entry()}}, BODY),
], ids=str)  # fmt: skip
def test_what_is_no_answer_is_refused(header, body):
    with pytest.raises(worker.ProtocolError):
        exchange().unpack(header, body)


@pytest.mark.parametrize("view", [
    [0, 0, [5], [8], "float64"],  # beyond the end
    [0, -8, [2], [8], "float64"],
    [0, 8, [2], [8], "float64"],
    [0, 0, [2], [2**62], "float64"],
    [0, 0, [10**5, 10**5], [0, 0], "float64"],
    [0, 0, [2], [8], "object"],
    [0, 0, [2.0], [8], "float64"],
    [5, 0, [2], [8], "float64"],
    [0, 0],
], ids=str)  # fmt: skip
def test_views_reach_nowhere_else(view):
    ours = exchange()
    ours.pack({}, args=[np.array([1.0, 2.0])])
    sound = {"result": {"view": [0, 0, [2], [8], "float64"]}}
    np.testing.assert_array_equal(
        ours.unpack({"values": sound, "arrays": []}, b"")["result"], [1, 2]
    )
    with pytest.raises(worker.ProtocolError):
        ours.unpack({"values": {"result": {"view": view}}, "arrays": []}, b"")


def test_a_sound_answer_is_taken():
    header = {"values": {"result": {"array": 1}}, "arrays": [entry()]}
    np.testing.assert_array_equal(exchange().unpack(header, BODY)["result"], [1, 2])


def test_values_nested_without_end_are_refused():
    value = {"list": []}
    for _ in range(100_000):
        value = {"list": [value]}
    with pytest.raises(worker.ProtocolError):
        exchange().unpack({"values": {"result": value}, "arrays": []}, b"")


def read(data):
    """Return what read_message makes of these bytes."""
    out, into = os.pipe()

    def feed():
        try:
            worker.write_message(into, data)
        finally:
            os.close(into)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        return worker.read_message(out)
    finally:
        os.close(out)
        thread.join()


def test_messages_survive_the_pipe_and_half_ones_are_the_end():
    data = worker.message({"a": [1, None, "ü"]}, bytes(300_000))
    assert read(data) == ({"a": [1, None, "ü"]}, bytes(300_000))
    for n in (0, 3, worker.LENGTHS.size, worker.LENGTHS.size + 2, len(data) - 1):
        assert read(data[:n]) is None


@pytest.mark.parametrize(
    "text", [b"{", b"[1]", b"\xff", b"[" * 100_000, b"1" * 10_000, b""], ids=len
)
def test_headers_that_are_no_objects_are_refused(text):
    with pytest.raises(worker.ProtocolError):
        read(worker.LENGTHS.pack(len(text), 0) + text)


@pytest.mark.parametrize("lengths", [(2**63, 0), (2, 2**40), (worker.MOST_JSON + 1, 0)])
def test_lengths_beyond_all_measure_are_refused_before_anything_is_read(lengths):
    with pytest.raises(worker.ProtocolError, match="64 MiB"):
        read(worker.LENGTHS.pack(*lengths))


# --- reading the file ----------------------------------------------------------------------------


def notebook(*cells, version=4):
    if version == 3:
        cells = [{"cell_type": "code", "input": cell} for cell in cells]
        return json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}]})
    cells = [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells]
    cells.insert(0, {"cell_type": "markdown", "source": "# Not code"})
    return json.dumps({"nbformat": 4, "cells": cells})


@pytest.mark.parametrize("version", [3, 4])
def test_notebooks_of_both_formats_are_read(tmp_path, version):
    path = tmp_path / "homework.ipynb"
    path.write_text(notebook("a = 1\nb = 2", "c = 3", version=version))
    labels, names, sources = zip(*remote.read_homework(path).cells, strict=True)
    assert labels == names == ("homework.ipynb, code cell 1", "homework.ipynb, code cell 2")
    assert sources == ("a = 1\nb = 2", "c = 3")


@pytest.mark.parametrize("name, data, says", [
    ("homework.txt", b"", "neither"),
    ("homework.ipynb", b"{", "is not a notebook"),
    ("homework.ipynb", b"[]", "is not a notebook"),
    ("homework.ipynb", b"[" * 100_000, "is not a notebook"),
    ("homework.ipynb", b'{"cells": [{"cell_type": "code"}]}', "is not a notebook"),
    ("homework.ipynb", b'{"cells": [{"cell_type": "code", "source": 1}]}', "is not a notebook"),
    ("homework.py", b"\xff\xfe\x00", "is not Python text"),
    ("homework.py", b"# coding: klingon\n", "is not Python text"),
])  # fmt: skip
def test_files_that_cannot_be_read_are_said_to_be(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(remote.Unreadable, match=says):
        remote.read_homework(tmp_path / name)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "homework.ipynb").open("wb") as file:
        file.truncate(remote.BIGGEST_FILE + 1)
    with pytest.raises(remote.Unreadable, match="larger than 16 MiB"):
        remote.read_homework(tmp_path / "homework.ipynb")


def test_a_file_that_may_not_be_read_is_said_to_be(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root may read every file

    (tmp_path / "homework.py").touch()
    monkeypatch.setattr(remote.tokenize, "open", refuse)
    with pytest.raises(remote.Unreadable, match="cannot be read: Permission denied"):
        remote.read_homework(tmp_path / "homework.py")


def test_a_file_that_is_not_there_is_said_to_be(tmp_path):
    with pytest.raises(remote.Unreadable, match="no file"):
        remote.read_homework(tmp_path / "homework.py")


@pytest.mark.parametrize("cell, left, notes", [
    ("%matplotlib inline\nx = 1", "pass\nx = 1", 1),
    ("if True:\n    !pip install flashref\ny = 2", "if True:\n    pass\ny = 2", 1),
    ("files = !ls\nhere = %pwd", "files = None\nhere = None", 2),
    ("%time x = 1 % 2", "x = 1 % 2", 0),
    ("%timeit -n 3 f()", "pass", 1),
    ("%%time\nx = 1", "pass\nx = 1", 1),
    ("%%bash\nrm -r x", "%%bash\nrm -r x", 1),
    ("max?\n?max", "pass\npass", 2),
    ('s = """\n%not magic\n!nor a command\n"""', None, 0),
    ("x = (5\n% 3)", None, 0),
])  # fmt: skip
def test_magics_are_left_out_and_nothing_else(cell, left, notes):
    tree, source, noted = worker.parse("cell", cell, notebook=True)
    assert source == (cell if left is None else left)
    assert len(noted) == notes
    assert tree.body or cell.startswith("%%bash")


def test_magics_in_a_python_file_are_errors():
    with pytest.raises(SyntaxError):
        worker.parse("homework.py", "%matplotlib inline", notebook=False)

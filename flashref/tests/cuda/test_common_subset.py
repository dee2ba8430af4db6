"""The SIMT rungs stay in the Python that every Numba for CUDA compiles, and the simulator runs.

`max` and `min` do not compile on plain Numba (numba/numba#10753); a bare 0.0 means float64; shared
and local arrays need sizes that are names; two shared arrays on a line are one in the simulator.
"""

import ast
from pathlib import Path

import pytest

import flashref

RUNGS = Path(flashref.__file__).parent / "cuda"
CUDA = {"threadIdx", "blockIdx", "gridDim", "grid", "syncthreads", "shared", "local", "jit"}
MATH = {"exp", "log", "inf"}
BUILTINS = {"range", "float32", "uint32"}
HELPERS = {"load4", "load4_global", "store4", "copy", "load", "load_rows", "load_tile"}
FORBIDDEN = (
    ast.While, ast.With, ast.Try, ast.Raise, ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp,
    ast.GeneratorExp, ast.Dict, ast.Set, ast.List, ast.JoinedStr, ast.Yield, ast.Starred,
)  # fmt: skip


def kernels(tree):
    """Return the functions of a module that run on the device: they ask for their thread."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(name in own_names(f) for name in ("threadIdx", "grid"))]


def own_names(function):
    inner = {
        id(node)
        for child in ast.walk(function)
        if isinstance(child, ast.FunctionDef) and child is not function
        for node in ast.walk(child)
    }
    own = (node for node in ast.walk(function) if id(node) not in inner)
    return {node.attr for node in own if isinstance(node, ast.Attribute)}


def violations(function):
    """Yield what a kernel should not hold, with its line."""
    wrapped = {
        id(node.args[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") == "float32"
    }
    shared_lines = []
    for node in ast.walk(function):
        line = getattr(node, "lineno", 0)
        if isinstance(node, FORBIDDEN):
            yield f"line {line}: {type(node).__name__}"
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            if id(node) not in wrapped:
                yield f"line {line}: {node.value} is a float64"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = {"cuda": CUDA, "math": MATH}.get(node.value.id)
            if known is not None and node.attr not in known:
                yield f"line {line}: {node.value.id}.{node.attr}"
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id not in BUILTINS | HELPERS:
            yield f"line {line}: {node.func.id}()"
        place = ast.unparse(node.func)
        if place in ("cuda.shared.array", "cuda.local.array"):
            shape = node.args[0]
            parts = shape.elts if isinstance(shape, ast.Tuple) else [shape]
            if not all(isinstance(part, ast.Name | ast.Constant) for part in parts):
                yield f"line {line}: the size {ast.unparse(shape)} is not a plain constant"
            if place == "cuda.shared.array":
                shared_lines.append(line)
    for line in {line for line in shared_lines if shared_lines.count(line) > 1}:
        yield f"line {line}: two shared arrays on one line"


@pytest.mark.parametrize("rung, least", [("naive", 3), ("tiled", 6), ("registers", 2)])
def test_kernels_stay_in_the_common_subset(rung, least):
    tree = ast.parse((RUNGS / f"{rung}.py").read_text(encoding="utf-8"))
    functions = kernels(tree)
    assert len(functions) >= least, [f.name for f in functions]
    found = [f"{f.name}: {what}" for f in functions for what in violations(f)]
    assert found == []


@pytest.mark.parametrize(
    "line, what",
    [
        ("m = max(m, s)", "max()"),
        ("acc = 0.0", "0.0 is a float64"),
        ("p = math.exp2(s)", "math.exp2"),
        ("s = cuda.shfl_xor_sync(1, s, 1)", "cuda.shfl_xor_sync"),
        ("a = cuda.local.array(2 * n, float32)", "2 * n"),
        ("a, b = cuda.shared.array(n, f), cuda.shared.array(n, f)", "two shared arrays"),
        ("x = [i for i in range(3)]", "ListComp"),
        ("while s > m: s -= 1", "While"),
    ],
)
def test_what_does_not_belong_is_seen(line, what):
    (function,) = kernels(ast.parse(f"def kernel():\n    t = cuda.threadIdx.x\n    {line}\n"))
    assert any(what in found for found in violations(function))


def test_ptx_text_stands_in_one_module():
    """Every `InlineAsm`, so a port to another compiler rewrites one file."""
    users = [f.name for f in RUNGS.glob("*.py") if "InlineAsm(" in f.read_text(encoding="utf-8")]
    assert users == ["ptx.py"]

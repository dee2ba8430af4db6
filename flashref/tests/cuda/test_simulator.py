"""The SIMT rungs in Numba's simulator, each in a Python of its own that starts with it.

A green simulator is no GPU result: its threads take turns, so it does not find races.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashref

pytest.importorskip("numba", reason="the GPU kernels are Numba's")
ROOT = Path(flashref.__file__).parents[1]


def suite(*arguments, simulator="1"):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": simulator, "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-m", "flashref.tests.cuda.suite", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("rung", ["naive", "tiled", "registers"])
def test_right_answers(rung):
    run = suite(rung)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


@pytest.mark.parametrize(
    "rung, healthy, broken",
    [
        ("naive", "S[b, h, i, j] = s * scale", "S[b, h, i, j] = s"),
        ("naive", "h // (q.shape[1] // k.shape[1])", "h % k.shape[1]"),  # grouped heads
        ("naive", "n_k if i + 1 + offset > n_k else i + 1 + offset", "n_k"),  # causal
        ("tiled", "l *= correction", "l *= float32(1)"),
        ("tiled", "O_i[c] *= correction", "O_i[c] *= float32(1)"),
        ("tiled", "count = B if seen - start > B else seen - start", "count = B"),
        ("tiled", "(dp - D_i) * scale", "dp * scale"),
        ("tiled", "skip = since - start if since - start > 0 else 0", "skip = 0"),
        ("tiled", "(kv_head + 1) * group", "kv_head * group + 1"),  # one head of the group
        ("registers", "if start + BK > full:", "if start + BK > full + BK:"),  # the mask
        ("registers", "l[a] *= correction", "l[a] *= float32(1)"),
        ("registers", "O[RD * a + x] *= correction", "O[RD * a + x] *= float32(1)"),
        ("registers", "4 * tx + c * TX", "4 * tx"),  # the thread's further columns
    ],
)
def test_the_suite_sees_what_is_broken(rung, healthy, broken):
    run = suite(rung, healthy, broken)
    assert run.returncode == 1 and rung in run.stdout, run.stdout + run.stderr[-2000:]

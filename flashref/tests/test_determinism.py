"""The same call gives the same bits: on a rerun, and whatever the number of threads."""

import os
import subprocess
import sys

import numpy as np
import pytest

import flashref
from flashref import heads
from flashref.tests.rungs import rungs

THREADS = ("1", "2", "3")
LARGE = 600  # 600 x 600 scores a head, beyond the size from which threads are used
SIZES = [(128, 128), (200, 300)]


def draw(dtype, n_q=LARGE, n_k=LARGE + 37, d=16, d_v=24):
    """Return q, k, v, do with batch 2 and two query heads for each key head."""
    rng = np.random.default_rng(0)
    shapes = [(2, 4, n_q, d), (2, 2, n_k, d), (2, 2, n_k, d_v), (2, 4, n_q, d_v)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def bits(arrays):
    """Return the bytes of every array."""
    return [x.tobytes() for x in arrays]


@pytest.mark.parametrize("rung", rungs(blocks=SIZES), ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_same_bits_for_every_number_of_threads(rung, dtype, monkeypatch):
    """Forward and backward, grouped heads (FA#414: dk, dv are sums in one order)."""
    q, k, v, do = draw(dtype)
    options = {"causal": True, "softcap": 5.0, "dropout_p": 0.1, "seed": 1}
    assert q.shape[-2] * k.shape[-2] > heads.THREADS_FROM  # else nothing would run in threads
    want = None
    for threads in (*THREADS, "3"):
        monkeypatch.setenv("FLASHREF_NUM_THREADS", threads)
        assert heads.num_threads() == int(threads)
        got = bits(rung.run(q, k, v, do, **options))
        assert want is None or got == want, f"other bits with {threads} threads"
        want = got


@pytest.mark.parametrize("name", ["flash_attention_1", "flash_attention_2"])
def test_same_bits_with_default_blocks(name, monkeypatch):
    """The default block size does not follow the number of threads."""
    forward, backward = getattr(flashref, name), getattr(flashref, name + "_backward")
    q, k, v, do = draw(np.float32, n_q=1100, n_k=1100)
    want = None
    for threads in THREADS:
        monkeypatch.setenv("FLASHREF_NUM_THREADS", threads)
        o, lse = forward(q, k, v, return_lse=True)
        got = bits([o, lse, *backward(do, q, k, v, o, lse)])
        assert want is None or got == want, f"other bits with {threads} threads"
        want = got


def test_same_bits_of_packed_sequences(monkeypatch):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1500, h, 16)).astype(np.float32) for h in (4, 2, 2))
    ends = [0, 700, 700, 710, 1500]
    want = None
    for threads in THREADS:
        monkeypatch.setenv("FLASHREF_NUM_THREADS", threads)
        got = bits(
            flashref.flash_attention_varlen(
                q, k, v, ends, ends, causal=True, return_lse=True, block_q=128, block_k=128
            )
        )
        assert want is None or got == want, f"other bits with {threads} threads"
        want = got


@pytest.mark.parametrize("rung", rungs(blocks=[(3, 2), (16, 16)]), ids=str)
def test_same_bits_on_a_rerun_of_a_small_call(rung):
    q, k, v, do = draw(np.float32, n_q=9, n_k=11, d=3, d_v=2)
    assert bits(rung.run(q, k, v, do)) == bits(rung.run(q, k, v, do))


@pytest.mark.parametrize("rung", rungs(blocks=[(3, 2), (16, 16)]), ids=str)
def test_return_lse_changes_no_bit_of_o(rung):
    q, k, v, _ = draw(np.float32, n_q=9, n_k=11, d=3, d_v=2)
    args, options = rung._arguments(q, k, {"causal": True})
    o = getattr(flashref, rung.name)(q, k, v, *args, **options)
    assert o.tobytes() == rung.forward(q, k, v, causal=True)[0].tobytes()


def test_threads_are_really_used(monkeypatch):
    """Otherwise the tests above compare one serial run with another."""
    pytest.importorskip("threadpoolctl")
    asked = []

    class Pool(heads.ThreadPoolExecutor):
        def __init__(self, threads):
            asked.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(heads, "ThreadPoolExecutor", Pool)
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "3")
    q, k, v, do = draw(np.float32)
    for rung in rungs(blocks=[(128, 128)]):
        asked.clear()
        rung.run(q, k, v, do)
        assert asked == [3, 3], str(rung)
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "1")
    asked.clear()
    flashref.flash_attention_2(q, k, v)
    assert asked == []


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    """A pool that swallowed errors would return an array nobody has written."""
    from flashref.scores import Tile

    def broken(self, Q_i, K_j):
        raise RuntimeError("broken tile")

    monkeypatch.setattr(Tile, "scores", broken)
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "2")
    q, k, v, _ = draw(np.float32)
    with pytest.raises(RuntimeError, match="broken tile"):
        flashref.flash_attention_2(q, k, v, block_q=128, block_k=128)


def test_the_number_of_threads(monkeypatch):
    monkeypatch.delenv("FLASHREF_NUM_THREADS", raising=False)
    assert 1 <= heads.num_threads() <= (os.cpu_count() or 1)
    usable = heads.num_threads()
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "")  # set to nothing is not set
    assert heads.num_threads() == usable
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "7")
    assert heads.num_threads() == 7


@pytest.mark.parametrize("asked", ["0", "-1", "two", " ", "1.5", "²"])
def test_the_number_of_threads_is_checked(asked, monkeypatch):
    monkeypatch.setenv("FLASHREF_NUM_THREADS", asked)
    with pytest.raises(ValueError, match="FLASHREF_NUM_THREADS"):
        heads.num_threads()


def test_the_number_of_threads_is_checked_in_every_call(monkeypatch):
    """Also in calls that start no threads: a mistake shows before the first large one."""
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "two")
    x = np.ones((3, 2))
    for rung in rungs(blocks=[(2, 2)]):
        for options in ({}, {"memory": flashref.Memory()}):
            with pytest.raises(ValueError, match="FLASHREF_NUM_THREADS='two'"):
                rung.forward(x, x, x, **options)
            with pytest.raises(ValueError, match="FLASHREF_NUM_THREADS='two'"):
                rung.backward(x, x, x, x, x, x[:, 0], **options)
    with pytest.raises(ValueError, match="FLASHREF_NUM_THREADS='two'"):
        flashref.flash_attention_varlen(x[:, None], x[:, None], x[:, None], [0, 3], [0, 3])


SCRIPT = """
import hashlib
import numpy as np
import flashref
rng = np.random.default_rng(5)
q, k, v, do = (rng.standard_normal((2, 600, 16)).astype(np.float32) for _ in range(4))
options = dict(causal=True, dropout_p=0.2, seed=3, block_q=128, block_k=128)
o, lse = flashref.flash_attention_2(q, k, v, return_lse=True, **options)
grads = flashref.flash_attention_2_backward(do, q, k, v, o, lse, **options)
print(hashlib.sha256(b"".join(x.tobytes() for x in (o, lse, *grads))).hexdigest())
"""


def test_same_bits_in_a_fresh_process():
    """No hash seed, address or start order has a say, nor how many threads BLAS would like."""
    digests = set()
    for threads, blas in (("1", "1"), ("2", "2"), ("3", "1")):
        environment = {
            **os.environ, "FLASHREF_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": blas,
            "PYTHONHASHSEED": threads,
        }  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        digests.add(run.stdout)
    assert len(digests) == 1

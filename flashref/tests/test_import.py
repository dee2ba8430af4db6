"""`import flashref` needs NumPy alone, is quick, and says one clear sentence about what is missing.

Each test starts a Python of its own; a finder that refuses every other package stands in for an
environment in which nothing else is installed.
"""

import os
import pathlib
import statistics
import subprocess
import sys

import pytest

import flashref

ROOT = pathlib.Path(flashref.__file__).parents[1]

BARE = """
import sys

class NumpyAlone:
    allowed = {*sys.stdlib_module_names, "numpy", "flashref"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NumpyAlone())
"""
ATTEND = """
import numpy as np
import flashref
rng = np.random.default_rng(0)
q, k, v, do = (rng.standard_normal((2, 600, 16)).astype(np.float32) for _ in range(4))
o, lse = flashref.flash_attention_2(q, k, v, causal=True, block_q=128, block_k=128, return_lse=True)
"""


def python(source):
    """Run source in a fresh interpreter and return what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_finder_refuses_what_is_installed():
    """Otherwise the tests below would prove nothing."""
    source = "\ntry:\n    import pytest\nexcept ModuleNotFoundError as e:\n    print(e)"
    assert python(BARE + source) == "No module named 'pytest'\n"


def test_numpy_alone_is_enough():
    """Every public function, without threadpoolctl too (then in one thread), to the same bits."""
    show = """
grads = flashref.flash_attention_2_backward(do, q, k, v, o, lse, causal=True)
print([float(abs(x).sum()) for x in (o, lse)], all(np.isfinite(x).all() for x in grads))
tiles = np.ones((2, 2), bool)
for fn in (flashref.standard_attention, flashref.flash_attention_1):
    assert np.allclose(fn(q, k, v, causal=True), o, atol=1e-5)
assert flashref.block_sparse_attention(q, k, v, tiles, block_q=300, block_k=300).shape == o.shape
assert flashref.dropout_keep(1, (4, 4), 0.5).shape == (4, 4)
"""
    bare, full = python(BARE + ATTEND + show), python(ATTEND + show)
    assert bare == full
    assert bare.endswith("True\n")


def test_import_takes_nothing_along():
    heavy = "{'numba', 'matplotlib', 'ipywidgets', 'IPython', 'threadpoolctl', 'torch', 'pytest'}"
    source = f"import sys, flashref\nprint(sorted({heavy} & set(sys.modules)))"
    assert python(source) == "[]\n"
    source = (
        "import sys, numpy\nbefore = set(sys.modules)\nimport flashref\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    assert python(source) == "['flashref']\n"


def test_import_time_beyond_numpy():
    """Under 0.3 s; in fact some hundredths. The median of five fresh interpreters."""
    source = (
        "import numpy, time\nstart = time.perf_counter()\nimport flashref\n"
        "print(time.perf_counter() - start)"
    )
    assert statistics.median(float(python(source)) for _ in range(5)) < 0.3


@pytest.mark.parametrize(("name", "needs"), [("plots", "matplotlib"), ("widgets", "ipywidgets")])
def test_what_is_missing_is_named_in_one_sentence(name, needs):
    """And how to get it; `import flashref` itself is not disturbed."""
    source = f"""
import sys
sys.modules[{needs!r}] = None  # as if it were not installed, and the rest were
import flashref
try:
    flashref.{name}
except ImportError as error:
    print(error)
"""
    said = python(source)
    assert needs in said
    assert "pip install" in said
    assert len(said.splitlines()) == 1


def test_modules_on_demand():
    """`flashref.check` and the like need no import line; a wrong name is an AttributeError."""
    source = "import flashref\nprint(flashref.check.__name__, flashref.data.__name__)"
    assert python(source) == "flashref.check flashref.data\n"
    with pytest.raises(AttributeError, match="no attribute 'flash_attention_4'"):
        _ = flashref.flash_attention_4


def test_every_public_name_is_there():
    for name in flashref.__all__:
        assert getattr(flashref, name) is not None
    assert python("from flashref import *\nprint(flash_attention_2.__module__)") == (
        "flashref.flash2\n"
    )


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import PackageNotFoundError, version

    try:
        assert version("flashref") == flashref.__version__
    except PackageNotFoundError:
        pytest.skip("flashref is run from its folder, not installed")


@pytest.mark.skipif(sys.platform == "win32", reason="a directory without write access")
def test_import_writes_nothing(tmp_path):
    """No cache, no configuration file in the user's home or in the working directory."""
    run = subprocess.run(
        [sys.executable, "-B", "-c", "import flashref"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []

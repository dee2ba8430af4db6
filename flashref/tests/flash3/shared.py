"""What the tests of `flash3` share: one head, any schedule, and a module with a wound."""

import importlib
import sys

import numpy as np
import pytest
from hypothesis import strategies as st

import flashref
from flashref import flash3, standard_attention
from flashref.tests.test_sabotage import Wounded

Q, K, V = np.random.default_rng(7).standard_normal((3, 24, 4))
EXACT = standard_attention(Q, K, V)

times = st.one_of(st.integers(0, 6), st.floats(0, 6))
any_schedule = dict(
    kind=st.sampled_from(list(flash3.KINDS)),
    blocks=st.integers(1, 6),
    times=st.fixed_dictionaries({name: times for name in ("load", "qk", "softmax", "pv")}),
    buffers=st.integers(1, 6),
)


def is_refused(call, error, message):
    """Assert that a call raises this error, in one sentence."""
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def wounded(module, healthy, broken):
    """Return a second `flash3`, with `broken` in the place of `healthy` in one of its modules."""
    name = f"flashref.flash3.{module}"
    finder = Wounded(name, importlib.import_module(name).__file__, healthy, broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        patch.setattr(flashref, "flash3", flash3)  # the import binds the second one
        for loaded in [name for name in sys.modules if name.startswith("flashref.flash3")]:
            patch.delitem(sys.modules, loaded)
        return importlib.import_module("flashref.flash3")


def passes_and_can_fail(check_it, module, healthy, broken):
    """Assert that a check of `flash3` passes, and does not once a module has the wound."""
    second = wounded(module, healthy, broken)
    check_it(flash3)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        check_it(second)

"""What the tests of the emulated kernels share: halves as bits, and modules with a wound."""

import importlib
import importlib.util
import sys
import types

import numpy as np

import flashref
from flashref.cuda import emulator

MODULES = (  # each imports from those before
    "fragments", "tensor_core_backward", "tensor_core", "hopper_tiles", "hopper",
)  # fmt: skip


def encode(x, half):
    """Return floats as the bits of the nearest float16 or bfloat16."""
    if half == "float16":
        return np.asarray(x).astype(np.float16).view(np.uint16)
    return emulator.to_bf16(x).astype(np.uint16)


def decode(bits, half):
    """Return what the bits mean, in float64."""
    if half == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def draw(n_q, n_k, d, d_v, heads, half, seed):
    """Return do, q, k, v of one sequence as bits; heads is (H_q, H_kv)."""
    rng = np.random.default_rng(seed)
    rows = ((heads[0], n_q, d_v), (heads[0], n_q, d), (heads[1], n_k, d), (heads[1], n_k, d_v))
    return [encode(rng.standard_normal((1, *s)).astype(np.float32), half) for s in rows]


def wound(monkeypatch, module, *changes):
    """Put copies of the modules where the emulator finds them, with changes in one's source."""
    for name in MODULES:
        spec = importlib.util.find_spec(f"flashref.cuda.{name}")
        with open(spec.origin, encoding="utf-8") as file:
            source = file.read()
        for healthy, broken in changes if name == module else ():
            assert healthy in source, f"stale sabotage, not in the source: {healthy}"
            source = source.replace(healthy, broken)
        copy = types.ModuleType(spec.name)
        copy.__spec__ = spec
        importlib.import_module(spec.name)
        monkeypatch.setitem(sys.modules, spec.name, copy)
        monkeypatch.setattr(flashref.cuda, name, copy)
        exec(compile(source, spec.origin, "exec"), copy.__dict__)

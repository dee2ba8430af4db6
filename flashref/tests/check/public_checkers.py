"""What public homework checkers let through, beside what `flashref.check` says: a table.

Eight checkers of attention homework are made again from their shapes, the law of their inputs, and
their tolerances; none of their code is here. Rounding to their low precision is left out, and
batches, heads and lengths are cut down where only the size would change (4096 rows to 1024).

`python -m flashref.tests.check.public_checkers` writes `public_checkers.md` again.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import flashref
from flashref import check
from flashref.check import mistakes
from flashref.check.cases import Case

TABLE = Path(__file__).with_suffix(".md")
ACCEPTS, BLIND, REJECTS = "accepts", "blind", "rejects"


@dataclass(frozen=True)
class Call:
    """One comparison of a checker."""

    shape: tuple  #: of q: (..., n, d)
    law: str = "normal"
    options: dict = field(default_factory=dict)
    kv_heads: int | None = None
    dtype: type = np.float64

    def inputs(self, seed):
        """Return q, k and v."""
        rng = np.random.default_rng(seed)
        kv = self.shape
        if self.kv_heads is not None:
            kv = (*self.shape[:-3], self.kv_heads, *self.shape[-2:])
        return [LAWS[self.law](rng, name, x).astype(self.dtype) for name, x in
                (("q", self.shape), ("k", kv), ("v", kv))]  # fmt: skip


def _ramps(rng, name, shape):
    """CS149: the same small numbers in every head, growing along rows and columns."""
    row, column = {"q": (2e-4, 1e-4), "k": (6e-4, 3e-4), "v": (1.5e-4, 8e-4)}[name]
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    return np.broadcast_to(row * i + column * j, shape)


LAWS = {
    "normal": lambda rng, name, shape: rng.standard_normal(shape),
    "normal, std 0.5": lambda rng, name, shape: 0.5 * rng.standard_normal(shape),
    "normal, q and k times 10": lambda rng, name, shape: (
        (1 if name == "v" else 10) * rng.standard_normal(shape)
    ),
    "uniform, -0.5 to 0.5": lambda rng, name, shape: rng.random(shape) - 0.5,
    "ramps": _ramps,
    "ones": lambda rng, name, shape: np.ones(shape),
}


@dataclass(frozen=True)
class Checker:
    """A public checker: what it calls, with which blocks, and how it compares."""

    name: str
    calls: tuple
    rtol: float
    atol: float
    blocks: tuple = (32, 32)  #: that a solution to it works with
    lse: bool = False  #: whether lse is compared too
    do: str = ""  #: the law of do, for a checker of gradients

    def verdict(self, form, seeds=range(3)):
        """Say what becomes of a wrong answer: accepted, rejected, or right wherever it looks."""
        shown = False
        for seed in seeds:
            for call in self.calls:
                for a, b in self._answers(form, call, seed):
                    with np.errstate(invalid="ignore"):
                        if not (np.abs(a - b) <= self.atol + self.rtol * np.abs(a)).all():
                            return REJECTS
                        exact = 1e-4 if call.dtype == np.float32 else 1e-9
                        shown = shown or (np.abs(a - b) > exact * (1 + np.abs(a))).any()
        return ACCEPTS if shown else BLIND

    def _answers(self, form, call, seed):
        """Return [(right, answer)] for each array that is compared."""
        q, k, v = call.inputs(seed)
        exact = [x.astype(float) for x in (q, k, v)]
        inputs, given = {"q": q, "k": k, "v": v}, dict(zip(GIVEN, self.blocks, strict=True))
        if self.do:
            do = LAWS[self.do](np.random.default_rng([seed, 1]), "do", v.shape)
            got = form(Case("", {"do": do, **inputs}, call.options, self.blocks), given)
            right = flashref.standard_attention_backward(do, *exact, **call.options)
            return list(zip(right, got.values(), strict=True))
        got = form(Case("", inputs, call.options, self.blocks), given)
        right = flashref.standard_attention(*exact, return_lse=True, **call.options)
        return list(zip(right, got.values(), strict=True))[: 2 if self.lse else 1]


GIVEN = ("block_q", "block_k")
CAUSAL = {"causal": True}
PUBLIC = (
    Checker("CS336 A2", (
        Call((4, 128, 64)), Call((4, 128, 64), options=CAUSAL),
    ), 1e-2, 1e-2, (16, 16), lse=True),
    Checker("GStar A1", (
        Call((1, 8, 512, 16)), Call((1, 8, 512, 16), options=CAUSAL),
        Call((1, 2, 1024, 16), options=CAUSAL), Call((1, 8, 512, 16), "normal", CAUSAL, 2),
        Call((1, 8, 512, 16), "normal", {"causal": True, "window": (127, 0)}, 2),
    ), 5e-2, 5e-2, (64, 64), lse=True),
    Checker("CS149 A4", (Call((1, 4, 1024, 32), "ramps", {"scale": 1.0}),), 1e-4, 1e-4, (256, 256)),
    Checker("Triton Puzzles 9", (
        Call((200, 1), "uniform, -0.5 to 0.5", {"scale": 1.0}),
    ), 1e-3, 1e-3, (64, 32)),
    Checker("llm-algo-leetcode 20", (Call((8, 4)), Call((5, 3)), Call((3, 2))), 0, 1e-5, (2, 2)),
    Checker("NumPy Lab 03", (
        Call((32, 16), dtype=np.float32), Call((50, 16), dtype=np.float32),
        Call((64, 32), options=CAUSAL, dtype=np.float32),
        Call((32, 16), "normal, q and k times 10", dtype=np.float32),
    ), 1e-4, 1e-4, (16, 8)),
    Checker("hkproj", (
        Call((2, 512, 64), "normal, std 0.5"),
        Call((2, 512, 64), "normal, std 0.5", CAUSAL),
    ), 0, 1e-2, (64, 32)),
    Checker("tspeterkim", (Call((2, 3, 64, 64)),), 0, 1e-2, (32, 32)),
)  # fmt: skip


GRADIENTS = (
    Checker("CS336 A2, PyTorch", (Call((4, 128, 64)),), 1e-2, 1e-2, (16, 16), do="normal"),
    Checker("hkproj, not causal", (
        Call((1, 1024, 64), "normal, std 0.5"),
    ), 0, 1e-2, (64, 32), do="normal"),
    Checker("tspeterkim", (Call((2, 3, 64, 64)),), 0, 1e-2, (32, 32), do="ones"),
)  # fmt: skip


def wrong(name):
    """Return {id: form} for the mistakes of a check."""
    known = mistakes.CATALOGUE
    return {mistake.id: mistake.forms[name][0] for mistake in known if name in mistake.forms}


def ours(name, form):
    """Return what our check says of a wrong answer."""

    def run(inputs, block_q, block_k, options):
        options = {name: value for name, value in options.items() if value is not None}
        case = Case("", inputs, options, (block_q, block_k))
        return tuple(form(case, {"block_q": block_q, "block_k": block_k}).values())

    def attention(q, k, v, block_q, block_k, causal=False, scale=None, window=None, mask=None):
        options = {"causal": causal, "scale": scale, "window": window, "mask": mask}
        return run({"q": q, "k": k, "v": v}, block_q, block_k, options)

    def attention_backward(do, q, k, v, block_q, block_k, causal=False, scale=None):
        inputs = {"do": do, "q": q, "k": k, "v": v}
        return run(inputs, block_q, block_k, {"causal": causal, "scale": scale})

    function = {"attention": attention, "attention_backward": attention_backward}[name]
    report = getattr(check, name)(function)
    return "accepts" if report.passed else f"rejects: `{report.mistake}`"


def table(name, checkers):
    """Return the lines of a table in Markdown: mistakes by checkers."""
    names = [checker.name for checker in checkers]
    lines = [
        f"| mistake | {' | '.join(names)} | `flashref.check` |",
        "|---" * (len(names) + 2) + "|",
    ]
    for id_, form in wrong(name).items():
        cells = [checker.verdict(form) for checker in checkers]
        lines.append(f"| `{id_}` | {' | '.join(cells)} | {ours(name, form)} |")
    return lines


def main():
    """Write the tables."""
    lines = [
        "# Wrong attention, and who notices",
        "",
        "Made by `python -m flashref.tests.check.public_checkers`; see there for what is",
        "simulated. *accepts*: the answer is wrong, but within tolerance. *blind*: it is accepted",
        "as well, since on the inputs of this checker the mistake makes no difference.",
        "`flashref.check` names the mistake.",
        "",
        "## Forward",
        "",
        *table("attention", PUBLIC),
        "",
        "## Gradients",
        "",
        *table("attention_backward", GRADIENTS),
        "",
    ]
    TABLE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()

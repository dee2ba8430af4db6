"""What each check is about: the arguments, the right answer, the cases, and the shape of a result.

The right answers are flashref's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import flashref
from flashref import io_model
from flashref.check import cases

FORWARD_OPTIONS = ("causal", "scale", "block_q", "block_k", "block", "return_lse", "window", "mask")


@dataclass(frozen=True)
class Exercise:
    """One kind of homework."""

    name: str
    main: tuple  #: the meanings of its arguments, in their usual order; "?": may be missing
    outputs: tuple  #: the names of what it returns; "?": may be missing
    right: Callable  #: case -> {name: array}
    cases: Callable  #: (seed, learner) -> list of Case
    options: tuple = ()
    axes: tuple = (0,)  #: how many axes more than the plain size to try, in this order
    counts: bool = False  #: the result is whole numbers
    beyond: tuple = ()  #: cases that are tried and spoken of, but that no answer fails by
    about_beyond: Callable | None = None  #: [(case, what came instead)] -> a sentence

    @property
    def returns(self):
        """What the function returns, in words."""
        wanted = [name for name in self.outputs if not name.endswith("?")]
        both = ", or both of " if len(wanted) < len(self.outputs) else ""
        names = ", ".join(name.rstrip("?") for name in self.outputs)
        return f"{', '.join(wanted)}{both}({names})" if both else names


def arguments(exercise, learner, case, first=False):
    """Return {meaning: value} for a call of the learner's function, in the usual order."""
    main = [role.rstrip("?") for role in exercise.main]
    given = {role: case[role] for role in main if role in case and _takes(learner, role)}
    for role in (*learner.parameters, *learner.by_position):
        if role in given:
            continue
        if role in case.options:
            given[role] = case.options[role]
        elif role in ("block_q", "block_k", "block"):
            if (size := block_size(learner, case, role)) is not None:
                given[role] = size
        elif role == "causal":
            given[role] = False
        elif role == "return_lse":
            given[role] = not (first or case.alone)
        elif learner.requires(role) or (role == "memory" and exercise.name == "traffic"):
            given[role] = DEFAULTS[role](case)
    order = {role: i for i, role in enumerate([*main, *exercise.options])}
    return dict(sorted(given.items(), key=lambda item: order.get(item[0], len(order))))


DEFAULTS = {
    "scale": lambda case: case["q"].shape[-1] ** -0.5,
    "window": lambda case: (case["k"].shape[-2] + case["q"].shape[-2],) * 2,
    "mask": lambda case: np.ones((case["q"].shape[-2], case["k"].shape[-2]), bool),
    "axis": lambda case: -1,
    "memory": lambda case: flashref.Memory(),
}


def block_size(learner, case, role):
    """Return the block size to give, or None to leave it out."""
    if case.blocks is None:
        return 32 if learner.requires(role) else None
    return case.blocks[0 if role == "block_q" else 1]


def suits(learner, case):
    """Whether the function has the options that a case needs, in the meaning that it needs."""
    if not all(learner.has(role) for role in case.options):
        return False
    if case.options.get("causal") and learner.square_causal and not case.square:
        return False
    if case.blocks is None and "q" in case:  # "blocks left out" is a question to their defaults
        sizes = [role for role in ("block_q", "block_k", "block") if learner.has(role)]
        return bool(sizes) and not any(learner.requires(role) for role in sizes)
    if "d_v" in case and case["d_v"] != case["d"] and not _takes(learner, "d_v"):
        return False
    if "n_q" in case and case["n_q"] != case["n_k"] and _takes(learner, "n"):
        return False
    if "block_mask" in case and learner.has("block") and not learner.has("block_k"):
        return case.blocks[0] == case.blocks[1]
    return True


def _takes(learner, role):
    return learner.has(role) or role in learner.by_position


# --- right answers ------------------------------------------------------------------------------


def _softmax(case):
    return {"p": flashref.safe_softmax(case["x"], axis=case.get("axis", -1))}


def _merge(case):
    o, lse = flashref.merge_attention(case["o_a"], case["lse_a"], case["o_b"], case["lse_b"])
    return {"o": o, "lse": lse}


def _options(case):
    names = ("scale", "causal", "window", "mask")
    return {name: case.options[name] for name in names if name in case.options}


def _attention(case):
    o, lse = flashref.standard_attention(
        case["q"], case["k"], case["v"], return_lse=True, **_options(case)
    )
    return {"o": o, "lse": lse}


def _backward(case):
    gradients = flashref.standard_attention_backward(
        case["do"], case["q"], case["k"], case["v"], **_options(case)
    )
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _block_sparse(case):
    block_q, block_k = case.blocks
    o, lse = flashref.block_sparse_attention(
        case["q"], case["k"], case["v"], case["block_mask"],
        block_q=block_q, block_k=block_k, return_lse=True, **_options(case),
    )  # fmt: skip
    return {"o": o, "lse": lse}


def _block_sizes(case):
    return {"sizes": flashref.block_sizes(case["sram_elements"], case["d"])}


def sizes_of(case):
    """Return {"n_q", "n_k", "d", "d_v"} of a case."""
    if "q" in case:
        (n_q, d), (n_k, d_v) = case["q"].shape[-2:], case["v"].shape[-2:]
        return {"n_q": n_q, "n_k": n_k, "d": d, "d_v": d_v}
    return {name: case[name] for name in ("n_q", "n_k", "d", "d_v")}


def traffic_of(case, closed_form):
    """Return the (loads, stores) of an algorithm on a case, by its closed form in `io_model`."""
    block_q, block_k = case.blocks
    return tuple(closed_form(*sizes_of(case).values(), block_q=block_q, block_k=block_k))


def _traffic(case):
    return {"traffic": traffic_of(case, io_model.fa2_traffic)}


def with_saved(case):
    """Return a case of the backward pass with the o and lse of its forward pass."""
    return replace(case, inputs={**case.inputs, **_attention(case)}) if "do" in case else case


def with_masked_rows(exercise):
    """Return an exercise that asks for rows with scores of -inf, and does not only try them."""

    def questions(seed, learner):
        asked = exercise.cases(seed, learner)
        plain = [case for case in asked if not case.larger]
        return [*plain, *exercise.beyond, *asked[len(plain) :], cases.masked_matrix()]

    return replace(exercise, cases=questions, beyond=())


def about_masked_rows(seen):
    """Return what is said of scores of -inf: a check without masks cannot ask for them."""
    if not seen:
        return (
            "Right too, though not asked: scores of -inf (masked keys), and a row of nothing else."
        )
    wrong = ", ".join(
        f"{case.title} {what}, not [{', '.join(f'{p:.4g}' for p in _softmax(case)['p'].flat)}]"
        for case, what in seen
    )
    return (
        f"Tried, though not asked: scores of -inf, which is what a mask puts in. {wrong}. Right as "
        f"it is where no score is masked; if your exercise speaks of -inf, a guard is missing."
    )


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "softmax", ("x",), ("p",), _softmax,
            lambda seed, learner: cases.softmax_cases(seed), ("axis",), axes=(0, 1),
            beyond=cases.masked_rows(), about_beyond=about_masked_rows,
        ),
        Exercise(
            "online_softmax", ("x",), ("p",), _softmax,
            lambda seed, learner: cases.softmax_cases(seed),
            ("block", "block_k", "axis"), axes=(0, 1),
            beyond=cases.masked_rows(), about_beyond=about_masked_rows,
        ),
        Exercise(
            "merge_attention", ("o_a", "lse_a", "o_b", "lse_b"), ("o", "lse"), _merge,
            lambda seed, learner: cases.merge_cases(seed), axes=(0, 2, 1),
        ),
        Exercise(
            "attention", ("q", "k", "v"), ("o", "lse?"), _attention,
            lambda seed, learner: cases.attention_cases(seed),
            (*FORWARD_OPTIONS, "memory"), axes=(0, 2, 1),
        ),
        Exercise(
            "attention_backward", ("do", "q", "k", "v", "o?", "lse?"), ("dq", "dk", "dv"),
            _backward, lambda seed, learner: cases.backward_cases(seed),
            ("causal", "scale", "block_q", "block_k", "block", "memory"), axes=(0, 2, 1),
        ),
        Exercise(
            "block_sparse_attention", ("q", "k", "v", "block_mask"), ("o", "lse?"), _block_sparse,
            lambda seed, learner: cases.block_sparse_cases(seed),
            ("block_q", "block_k", "block", "causal", "scale", "return_lse", "memory"),
            axes=(0, 2, 1),
        ),
        Exercise(
            "block_sizes", ("sram_elements", "d"), ("sizes",), _block_sizes,
            lambda seed, learner: cases.block_sizes_cases(seed), counts=True,
        ),
        Exercise(
            "traffic", ("q", "k", "v"), ("traffic",), _traffic,
            lambda seed, learner: cases.traffic_cases(seed, closed_form=False),
            ("block_q", "block_k", "block", "memory", "causal", "scale", "return_lse"),
        ),
    )
}  # fmt: skip

CLOSED_FORM = Exercise(
    "traffic", ("n_q", "n_k", "d", "d_v?", "block_q", "block_k"), ("traffic",), _traffic,
    lambda seed, learner: cases.traffic_cases(seed, closed_form=True), counts=True,
)  # fmt: skip
ONE_LENGTH = replace(CLOSED_FORM, main=("n", "d", "d_v?", "block_q", "block_k"))

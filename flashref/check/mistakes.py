"""The catalogue: what learners get wrong, as functions, and what a learner is told about it.

A mistake may have several forms: one idea, with answers that differ where they are not numbers (a
guard against 0/0 or none, a division or a logarithm). `matching.py` compares them with an answer.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from flashref.check.faulty import (
    STARTS,
    Attention,
    Backward,
    BlockSizes,
    ColumnAttention,
    FirstTraffic,
    MatrixAttention,
    Merge,
    OnlineSoftmax,
    Packed,
    Softmax,
    Traffic,
    TwoHeads,
)

LESSONS = {
    "00": "00_start_here",
    "01": "01_standard_attention",
    "02": "02_safe_softmax",
    "03": "03_online_softmax",
    "04": "04_flash1_forward",
    "05": "05_io_complexity",
    "06": "06_standard_backward",
    "07": "07_flash1_backward",
    "08": "08_flash2",
    "09": "09_masks_and_heads",
    "10": "10_block_sparse",
    "11": "11_flash3_ideas",
}


@dataclass(frozen=True)
class Mistake:
    """Something that goes wrong often, as code and in words."""

    id: str  #: "" for those of `DESCRIBED`, which have no name outside this file
    sentence: str  #: what the learner reads first
    hint: str  #: a question or an experiment; never the line of code
    lesson: str  #: where to read again: number of the lesson
    where: str  #: what to look for in that lesson
    forms: dict = field(repr=False)  #: check -> functions (case, given) -> answer
    #: check -> (lesson, what to look for), where a learner comes before `lesson`; "attention in
    #: full" is an attention that takes no block sizes
    nearer: dict = field(default_factory=dict, repr=False)

    @property
    def checks(self):
        """The checks in which it can be named."""
        return tuple(self.forms)

    def read_again(self, check, in_full=False):
        """Return the place in the lessons, in words, for those who did the exercise of a check."""
        place = self.nearer.get(check, (self.lesson, self.where))
        if in_full:
            place = self.nearer.get(f"{check} in full", place)
        lesson, where = place
        return f"lesson {lesson} (notebooks/{LESSONS[lesson]}.ipynb), {where}"


def _forward(*forms):
    """Return attention's forms; a block-sparse attention can go wrong in the same ways."""
    return {"attention": forms, "block_sparse_attention": forms}


COUNTS_ARE_IN = (
    "00",
    "“The first five minutes” (later lesson 05, the closed form, and lesson 08, which loads and "
    "stores move out of the inner loop)",
)


def _forward_place(lesson, where):
    """Return a nearer place to read again, for all checks of a forward pass."""
    checks = ("online_softmax", "attention", "block_sparse_attention")
    return dict.fromkeys(checks, (lesson, where))


FILLS = (-1e4, -1e5, -1e6, -1e9, -1e10, -1e30, *(float(np.finfo(t).min) for t in ("f4", "f8")))
FINITE = [
    Attention(fill=fill, fill_added=added, skip=skip)
    for fill in FILLS
    for added in (False, True)
    for skip in (False, True)
]
NO_STEP_GUARD = [
    Attention(step_guard=False, skip=skip, guard=guard)
    for guard in ("seen", "no", "l")
    for skip in (False, True)
]
EMPTY = [
    Attention(guard="no"), Attention(guard="nan"),
    Attention(guard="visited", skip=True),
]  # fmt: skip


def _online(**switches):
    return [OnlineSoftmax(**switches, guard=guard) for guard in ("no", "l", "zeros")]


def _of_p_and_saved(rule):
    """Return backward passes whose P follows a rule: with an lse of its own, or the right one."""
    return [
        Backward(sees=rule, saved=saved, guard=guard)
        for saved in (True, False) for guard in (True, False)
    ]  # fmt: skip


def _rows(*forms):
    """Return softmaxes that give 0 in a row whose sum is 0, and the same ones that give 0/0."""
    return [replace(form, guard=guard) for form in forms for guard in (True, False)]


COLUMNS = _rows(Softmax(over="column"), Softmax(over="first"), Softmax(sum_over="column"))


CATALOGUE = (
    Mistake(
        "no_max_subtraction",
        "Large scores overflow exp and very negative ones vanish; subtract the row's maximum "
        "first.",
        "What is exp(1000) on your machine, and what is exp(-1000)? Which number can you take away "
        "from every score of a row without changing its softmax?",
        "02", "the experiment that slides a constant over the scores",
        {
            "softmax": _rows(Softmax(shift="none"), Softmax(shift="none", by_log=True)),
            "online_softmax": _online(start=0.0, maximum="none"),
            **_forward(
                Attention(maximum="none"), Attention(maximum="none", guard="l"),
                Attention(maximum="none", by_log=True),
            ),
            "attention_backward": [
                Backward(weights="no maximum", d_from=d_from) for d_from in ("P", "right")
            ],
        },
    ),
    Mistake(
        "softmax_wrong_axis",
        "Your columns sum to 1; it is each query's row that must.",
        "Print the sums of your weights along both axes for a matrix with two rows.",
        "01", "the rows of P",
        {
            "softmax": COLUMNS,
            "online_softmax": COLUMNS,
            "attention": [
                ColumnAttention(axis, max_axis) for max_axis in (None, -1) for axis in (-2, 0)
            ],
            "attention_backward": [
                Backward(weights="columns", d_from=d_from, saved=saved)
                for d_from in ("P", "columns", "right") for saved in (False, True)
            ],
        },
    ),
    Mistake(
        "no_final_division",
        "Your weights do not sum to 1: what happened to the normaliser l at the end?",
        "Put all values of V to 1. What must come out in every row, and what does?",
        "03", "the columns o and Õ of the worked table",
        {
            "softmax": [Softmax(divide=False)],
            "online_softmax": [OnlineSoftmax(divide=False)],
            **_forward(Attention(divide=False), Attention(divide=False, old_l=True)),
        },
        nearer={
            "softmax": ("02", "“Scores become shares”"),
            "attention in full": ("01", "the rows of P"),
        },
    ),
    Mistake(
        "max_starts_at_zero",
        "Right until all scores are very negative. What is the maximum of nothing?",
        "Run your code by hand on the scores -1000 and -1001. What is m after the first block?",
        "03", "the experiment with scores around -200",
        {
            "softmax": _rows(Softmax(shift="max or 0")),
            "online_softmax": _online(start=0.0),
            **_forward(Attention(start=0.0), Attention(start=0.0, guard="l")),
        },
        nearer={"softmax": ("02", "“Rows that should be easy”")},
    ),
    Mistake(
        "no_rescale_l",
        "When a new maximum appears, the old sum l is still measured against the old one.",
        "Take the scores 1, 2 and then 3, 10 in two blocks. Against which maximum was l measured "
        "after the first block, and against which after the second? If you wrote a factor: is it "
        "always 1?",
        "03", "the factor on the old part",
        {
            "online_softmax": _online(rescale="no"),
            **_forward(Attention(rescale_l="no")),
        },
    ),
    Mistake(
        "no_rescale_o",
        "The output gathered so far must shrink by the same factor as l when the maximum grows.",
        "After the first block the output was a sum of exp(s - m) v with the old m. What has to "
        "happen to that sum when m changes?",
        "03", "the factor on the old part",
        _forward(Attention(rescale_o="no")),
    ),
    Mistake(
        "no_rescale_both",
        "Neither l nor the output is corrected when the running maximum changes.",
        "Swap the two blocks of keys. Why does your answer change, and when does it not? If you "
        "wrote a factor: is it always 1? A slice is a view: it shows what was written since.",
        "03", "the factor on the old part",
        _forward(Attention(rescale_l="no", rescale_o="no")),
    ),
    Mistake(
        "max_not_carried",
        "Each block is measured against its own maximum; sums of different scales cannot be added.",
        "exp(1 - 2) + exp(10 - 10): which common factor would turn this into a sum of exp(s)?",
        "03", "m_block and m in the worked table",
        {
            "online_softmax": _online(maximum="own"),
            **_forward(Attention(maximum="own")),
        },
    ),
    Mistake(
        "rescale_inverted",
        "The correction factor is upside down: old contributions must shrink, not grow.",
        "The maximum rises from 2 to 10. Is your factor larger or smaller than 1?",
        "08", "the factor printed upside down in the paper (line 10)",
        {
            "online_softmax": _online(rescale="inverted"),
            **_forward(Attention(rescale_l="inverted", rescale_o="inverted")),
        },
        nearer=_forward_place("03", "“Break it: the state”"),
    ),
    Mistake(
        "block_softmax_summed",
        "You normalise every block by itself and add the results; only one normalisation per row, "
        "over all keys.",
        "Put all values of V to 1 and use two blocks of keys. What comes out?",
        "03", "merging two parts",
        _forward(Attention(summed=True)),
    ),
    Mistake(
        "tail_keys_dropped",
        "The last, shorter block of keys is never visited.",
        "How many blocks does your loop visit for 5 keys in blocks of 2?",
        "04", "the experiment with B_c = 3",
        {
            "online_softmax": [*_online(tail="zero"), *_online(tail="unseen")],
            **_forward(Attention(tail_keys="dropped")),
        },
        nearer={"online_softmax": ("03", "“Any order, any blocks”")},
    ),
    Mistake(
        "tail_keys_zero_padded",
        "Padding keys take part in the softmax; they must score -inf.",
        "A padding key of zeros has the score 0. What is its weight, exp(0 - m), next to the real "
        "ones?",
        "04", "the experiment with a padded tail",
        {"online_softmax": _online(tail="padded"), **_forward(Attention(tail_keys="zeros"))},
        nearer={"online_softmax": ("03", "“Any order, any blocks”")},
    ),
    Mistake(
        "tail_queries_dropped",
        "The last, shorter block of queries is never computed.",
        "How many blocks does your loop visit for 5 queries in blocks of 2?",
        "04", "T_r and T_c, rounded up",
        _forward(Attention(tail_queries="dropped")),
    ),
    Mistake(
        "scale_missing",
        "Your scores are √d times too large: the scale is missing.",
        "Compute one score by hand, q_0 · k_0 with its factor, and compare it with yours.",
        "01", "the scale 1/√d",
        _forward(Attention(scale="missing"), Attention(scale="missing by default")),
    ),
    Mistake(
        "scale_one_over_d",
        "The scale is 1/√d, not 1/d.",
        "Compute one score by hand, q_0 · k_0 with its factor, and compare it with yours.",
        "01", "the scale 1/√d",
        {
            **_forward(Attention(scale="1/d")),
            "attention_backward": [Backward(scale="1/d"), Backward(scale="1/d", saved=True)],
        },
    ),
    Mistake(
        "head_zero_for_all",
        "Every head attends to the keys of head 0.",
        "Change the keys of head 1 only. Which rows of your output should move?",
        "09", "heads",
        _forward(Attention(heads="first")),
    ),
    Mistake(
        "gqa_heads_tiled",
        "Neighbouring query heads share a key head: 0,0,1,1, not 0,1,0,1.",
        "Write down, for 4 query heads and 2 key heads, which key head each one reads.",
        "09", "grouped heads (`repeat`, not `tile`)",
        _forward(Attention(heads="tiled")),
    ),
    Mistake(
        "causal_ignored",
        "Your queries still see the future.",
        "Change the last key. Which rows of a causal output may move?",
        "09", "which keys a query may see",
        _forward(Attention(sees="ignored")),
    ),
    Mistake(
        "causal_strict",
        "A query may see its own position too.",
        "What is the first row of a causal output? Which key does query 0 see?",
        "09", "which keys a query may see",
        {
            **_forward(Attention(sees="strict")),
            "attention_backward": _of_p_and_saved("strict"),
        },
    ),
    Mistake(
        "causal_off_by_one",
        "Each query sees one key too many.",
        "Which keys does query 0 see in your code? Print the mask for n = 3.",
        "09", "which keys a query may see",
        {
            **_forward(Attention(sees="one more")),
            "attention_backward": _of_p_and_saved("one more"),
        },
    ),
    Mistake(
        "causal_top_left",
        "With fewer queries than keys the *last* query lines up with the last key.",
        "One new query, eight cached keys: which of them may it see?",
        "09", "alignment for n_q ≠ n_k",
        {
            **_forward(Attention(sees="top-left")),
            "attention_backward": _of_p_and_saved("top-left"),
        },
    ),
    Mistake(
        "causal_future",
        "The mask is turned round: your queries see only the future.",
        "Print your mask for n = 3. Which triangle is it?",
        "09", "which keys a query may see",
        {
            **_forward(Attention(sees="future")),
            "attention_backward": _of_p_and_saved("future"),
        },
    ),
    Mistake(
        "diagonal_block_unmasked",
        "Blocks on the diagonal need the mask inside them.",
        "Draw a 4 × 4 causal mask in tiles of 2 × 2. Which tiles are neither full nor empty?",
        "09", "full, partial and empty tiles",
        _forward(
            Attention(whole_diagonal=True), Attention(whole_diagonal=True, skip=True),
        ),
    ),
    Mistake(
        "mask_fill_zero",
        "A masked score of 0 still has weight exp(0).",
        "Which score has a weight of exactly 0?",
        "10", "0 in place of -inf (erratum 26)",
        {"attention": [Attention(fill=0.0)]},
        nearer={"attention": ("09", "which keys a query may see")},
    ),
    Mistake(
        "empty_row_nan",
        "A query that sees no key must give 0, not 0/0.",
        "Which of your queries sees no key at all here? What are its m and l at the end?",
        "09", "a row with no key",
        {
            "attention": EMPTY,
            "block_sparse_attention": EMPTY,
            "attention_backward": [Backward(guard=False), Backward(guard=False, skip=True)],
        },
        nearer={"attention": ("02", "“The row that sees nothing”")},
    ),
    Mistake(
        "no_inf_guard",
        "-inf - (-inf) is NaN: a row may meet a fully masked block before its first key.",
        "Follow m for a row whose first block is all -inf. What is m - m_new there?",
        "04", "a first tile that is all -inf",
        {"attention": NO_STEP_GUARD, "block_sparse_attention": NO_STEP_GUARD},
    ),
    Mistake(
        "finite_mask_value",
        "A masked score must be -inf: any finite stand-in loses to a row that is lower still, or "
        "turns an empty row into an average.",
        "What do your masked scores hold? Find a row of real scores that lies below it, or a row "
        "in which everything is masked.",
        "09", "the experiment with -1e4",
        {"attention": FINITE, "block_sparse_attention": FINITE},
    ),
    Mistake(
        "window_one_too_wide",
        "The window is one key too wide on the left: `left` does not count the query's own "
        "position.",
        "window=(0, 0) means the own position only. What does yours see then?",
        "09", "windows",
        _forward(Attention(sees="one more left")),
    ),
    Mistake(
        "lse_without_max",
        "The saved log-sum-exp must contain the maximum you subtracted.",
        "log Σ exp(s): write it with m and l = Σ exp(s - m).",
        "03", "the column L of the worked table",
        {
            **_forward(Attention(lse="no maximum")),
        },
    ),
    Mistake(
        "lse_base2",
        "Your log-sum-exp is in base 2; it must be a natural logarithm.",
        "What is the lse of two equal scores 0? Is it log 2 or 1 in your code?",
        "03", "the base-2 experiment",
        _forward(Attention(lse="base 2")),
    ),
    Mistake(
        "merge_average",
        "The two parts do not weigh the same; weigh them by their exp(lse).",
        "One part has seen one key, the other a thousand. Which should count for more?",
        "03", "merging two parts",
        {"merge_attention": [Merge(average=True)]},
    ),
    Mistake(
        "merge_lse_added",
        "Add the sums, not their logarithms.",
        "lse is log Σ exp. What is the Σ exp of both parts together?",
        "03", "merging two parts",
        {"merge_attention": [
            Merge(lse_added=True), Merge(lse_added=True, weights="from lse"),
        ]},
    ),
    Mistake(
        "merge_base2",
        "Your merge works in base 2; lse is natural.",
        "Which number to the power of lse is the sum that lse stands for?",
        "03", "the base-2 experiment",
        {"merge_attention": [Merge(base=2.0)]},
    ),
    Mistake(
        "merge_empty_nan",
        "Two empty parts give an empty part, not NaN.",
        "Both lse are -inf. What is lse_a - max(lse_a, lse_b)?",
        "03", "exp(L_a - L) of two empty states",
        {
            "merge_attention": [
                Merge(guard=False, guard_lse=False), Merge(guard=False),
            ]
        },
    ),
    Mistake(
        "no_d_term",
        "Softmax couples the keys of a row: subtract D = rowsum(dO ∘ O).",
        "Add up one row of your dS. Softmax does not notice a constant added to a row of S; what "
        "does that say about the sum?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(d_term=False)]},
    ),
    Mistake(
        "p_unnormalised",
        "Recompute P with lse, so that its rows sum to 1.",
        "Add up one row of the P in your backward pass.",
        "07", "P = exp(S - L)",
        {"attention_backward": [
            Backward(weights="not divided", d_from=d_from) for d_from in ("right", "P")
        ]},
    ),
    Mistake(
        "dq_unscaled",
        "dQ misses the scale.",
        "S = τ Q Kᵀ. Where does τ appear when S is differentiated by Q?",
        "06", "the experiment without τ",
        {"attention_backward": [Backward(scale_dq=0)]},
    ),
    Mistake(
        "dk_unscaled",
        "dK misses the scale.",
        "S = τ Q Kᵀ. Where does τ appear when S is differentiated by K?",
        "06", "the experiment without τ",
        {"attention_backward": [Backward(scale_dk=0)]},
    ),
    Mistake(
        "dq_overwritten",
        "dQ collects a share from every key block; yours keeps only the last.",
        "How often does your loop write to the same rows of dQ? What happens to what was there?",
        "07", "what stays and what passes by in the backward loop",
        {"attention_backward": [Backward(dq_last="last"), Backward(dq_last="visited")]},
    ),
    Mistake(
        "backward_causal_ignored",
        "Your backward pass lets masked keys take part.",
        "Which entries of P are 0 in the forward pass? Print the same P in your backward pass.",
        "09", "which keys a query may see",
        {"attention_backward": _of_p_and_saved("ignored")},
    ),
    Mistake(
        "gqa_gradients_not_summed",
        "Several query heads share this key head; their gradients add up.",
        "Two query heads read one key. Move that key: through how many paths does the loss change?",
        "09", "grouped heads: dK, dV",
        {"attention_backward": [Backward(gather="last")]},
    ),
    Mistake(
        "sparse_mask_ignored",
        "The block mask has no effect.",
        "Turn a block off. Does your output change at all?",
        "10", "Algorithm 5, line 8",
        {"block_sparse_attention": [Attention(sparse="ignored")]},
    ),
    Mistake(
        "sparse_score_zero",
        "Skipped blocks must have weight 0, that is score -inf.",
        "What is exp(0), and what is exp(-inf)?",
        "10", "0 in place of -inf (erratum 26)",
        {"block_sparse_attention": [Attention(sparse="zero")]},
    ),
    Mistake(
        "block_sizes_swapped",
        "Rows and columns are swapped: only B_r is capped by d.",
        "Q and O are cut in rows, K and V in columns of S. Which of the two sizes has min(…, d)?",
        "05", "“What must fit”",
        {"block_sizes": [BlockSizes(swapped=True)]},
    ),
    Mistake(
        "block_sizes_floor",
        "The paper rounds M/4d up.",
        "M = 50, d = 4: M/4d is 3.125. Which whole number does the paper take?",
        "05", "“What must fit”",
        {"block_sizes": [BlockSizes(floor=True)]},
    ),
    Mistake(
        "traffic_keys_once",
        "In FlashAttention-2 every query block reads all of K and V again.",
        "Which loop is the outer one? How many times does a row of K pass by?",
        *COUNTS_ARE_IN,
        {"traffic": [Traffic(keys_once=True)]},
    ),
    Mistake(
        "traffic_blocks_floored",
        "The last, shorter block of queries reads the keys too: round up.",
        "How many query blocks are there for 5 queries in blocks of 2?",
        *COUNTS_ARE_IN,
        {"traffic": [Traffic(query_blocks="floor")]},
    ),
    Mistake(
        "traffic_query_reloaded",
        "Q_i can stay in fast memory during its whole row of tiles.",
        "Which of your loads stand in the inner loop, and which of them depend on j?",
        *COUNTS_ARE_IN,
        {"traffic": [Traffic(query_reloaded=True)]},
    ),
)  # fmt: skip

BY_ID = {mistake.id: mistake for mistake in CATALOGUE}


# --- mistakes without a name --------------------------------------------------------------------

SHIFTED = {
    "median": "the median of a row, not its maximum: a score far above it still overflows exp",
    "mean": "the mean of a row, not its maximum: a score far above the mean still overflows exp",
    "min": "the smallest score of a row, not the largest: the others still overflow exp",
    "first": "the first score of a row, not the largest: a later score may still overflow exp",
    "size": "the largest |s| of a row, not the largest s: very negative rows still vanish",
    "sum": "the sum of a row, not its maximum: rows still overflow, or vanish",
}


def _softmax(*forms):
    return {"softmax": _rows(*forms), "online_softmax": _rows(*forms)}


def _shifted(shift, text):
    forms = _softmax(Softmax(shift=shift), Softmax(shift=shift, by_log=True))
    return Mistake(
        "",
        f"Your numbers are those of a softmax that subtracts {text}.",
        "Which is the largest number that your exp is ever given? Try [0, 1000, 1001].",
        "02",
        "the experiment that slides a constant over the scores",
        {**forms, "attention": [MatrixAttention(shift=shift)]},
    )


ENDS = (
    "window=(1, 0) means a query's own position and one before it. Print which keys each query "
    "sees in your code, for n = 3 and the windows (1, 0), (0, 1) and (0, 0)."
)
OFFSET = (
    "One new query, eight cached keys: at which key position does it stand, and where in yours?"
)
TILE_CORNERS = (
    "Draw a causal mask for 7 queries and 7 keys in tiles of 2 × 3. Which two corners of a tile "
    "tell whether it is empty, partial or full?"
)


def _window(rule, text, hint):
    return Mistake("", f"Your window {text}.", hint, "09", "windows",
                   _forward(Attention(sees=rule)))  # fmt: skip


def _lse(lse, text):
    return Mistake(
        "",
        f"o is right. Your lse is {text}.",
        "Work out log Σ exp(s) for the scores 1 and 1 with m = 1 and l = 2, and compare.",
        "03",
        "the column L of the worked table",
        _forward(Attention(lse=lse), Attention(lse=lse, guard="l")),
    )


def _scaled(scale, text):
    return Mistake(
        "",
        f"Your numbers are those of scores with {text}.",
        "Compute one score by hand, q_0 · k_0 with its factor, and compare it with yours.",
        "01",
        "the scale 1/√d",
        {
            **_forward(Attention(scale=scale)),
            "attention_backward": [Backward(scale=scale), Backward(scale=scale, saved=True)],
        },
    )


def _sizes(text, **switches):
    return Mistake(
        "",
        text,
        "Work out ⌈M/4d⌉ for M = 50 and d = 4, and for M = 100 and d = 3. Which of the two sizes "
        "may not be larger than d?",
        "05",
        "“What must fit”",
        {"block_sizes": [BlockSizes(**switches)]},
    )


def _counted(text, hint, *forms):
    return Mistake("", text, hint, *COUNTS_ARE_IN,
                   {"traffic": list(forms)})  # fmt: skip


# what else is seen, described in words alone: `Report.mistake` stays None
DESCRIBED = (
    Mistake(
        "",
        "The sum is measured against the maximum, the scores above it are not: a share is "
        "exp(s - m) / l, or exp(s - lse) with m + log l for lse.",
        "Your l is Σ exp(s - m). For the scores 1 and 1, what is l, and your share of each?",
        "02", "“One number that remembers a row”",
        {check: _rows(Softmax(lse="no maximum")) for check in ("softmax", "online_softmax")},
    ),
    Mistake(
        "",
        "One maximum is subtracted from the whole matrix. A row that lies far below it vanishes: "
        "each row needs a maximum of its own.",
        "One row holds scores around 1000, another around -1000. What is left of the second one "
        "after your subtraction?",
        "02", "the maximum of each row",
        {
            **_softmax(Softmax(shift_over="all")),
            **_forward(MatrixAttention(shift_over=None), MatrixAttention(shift_over=(-1, -2))),
        },
    ),
    Mistake(
        "",
        "All weights of the matrix together sum to 1. Each row must sum to 1 by itself.",
        "Print the sum of each row of your weights.",
        "02", "the sum of each row",
        {
            **_softmax(Softmax(sum_over="all"), Softmax(shift_over="all", sum_over="all")),
            **_forward(*(
                MatrixAttention(sum_over=over, shift_over=shift)
                for over in (None, (-1, -2))
                for shift in (-1, over)
            )),
        },
    ),
    Mistake(
        "",
        "Rows use each other's numbers: column j is measured against the maximum, or divided by "
        "the sum, that belongs to row j.",
        "What is the shape of x.max(axis=-1) when x is 3 × 3? Along which axis does NumPy lay it "
        "when you subtract it from x?",
        "02", "a row's maximum, kept as a column",
        _softmax(*(
            Softmax(keepdims=kept) for kept in ((False, False), (True, False), (False, True))
        )),
    ),
    Mistake(
        "",
        "The sums run along axis 1. That is the last axis of a matrix, but not of an array with "
        "three axes; rows lie along the last one.",
        "Which number, counted from the end, has the last axis of any array?",
        "02", "“A row for each query”",
        _softmax(Softmax(over="second")),
    ),
    Mistake(
        "",
        "A row of nothing but -inf must give 0, not 0/0: it takes nothing from anybody.",
        "What are the maximum and the sum of the row [-inf, -inf]? What is -inf - (-inf), and what "
        "is 0/0?",
        "02", "“The row that sees nothing”",
        {"softmax": [Softmax(guard=False)], "online_softmax": [OnlineSoftmax(guard="no")]},
    ),
    Mistake(
        "",
        "A row of nothing but -inf came out as a mean: a finite number stands in for -inf "
        "somewhere.",
        "What does your code subtract from the scores of the row [-inf, -inf], and what is left of "
        "them?",
        "02", "“The row that sees nothing”",
        {"softmax": [Softmax(fill=-1e30)], "online_softmax": [Softmax(fill=-1e30)]},
    ),
    Mistake(
        "",
        "-inf - (-inf) is NaN: a score, or a whole block, may be masked before the first one that "
        "counts.",
        "Follow m through the scores -inf, 1, 2, 3, one by one. What is m - m_new after the first?",
        "03", "“The finished algorithm”",
        {"online_softmax": _online(step_guard=False)},
    ),
    *(_shifted(shift, text) for shift, text in SHIFTED.items()),
    Mistake(
        "",
        "The scores are multiplied by ln 2 = 0.6931. The factor that makes powers of 2 into powers "
        "of e is its inverse, log₂e = 1.4427.",
        "e = 2^y. Is y larger or smaller than 1?",
        "02", "exercise 5",
        _softmax(Softmax(base=2 ** math.log(2))),
    ),
    Mistake(
        "",
        "These are powers of 2, not of e: the scores lack the factor log₂e = 1.4427.",
        "Two scores differ by 1. By which factor do their weights differ, and by which do yours?",
        "02", "exercise 5",
        {
            **_softmax(Softmax(base=2.0)),
            **_forward(Attention(base=2.0), Attention(base=2.0, lse="no maximum")),
        },
    ),
    Mistake(
        "",
        "The scores are multiplied by log₂e, but what you subtract from them is not.",
        "Both terms of y - m must be measured in the same unit. For the score 10000 and its "
        "maximum 10000, what is your difference?",
        "02", "exercise 5",
        _softmax(Softmax(base=2.0, base_of="shift")),
    ),
    Mistake(
        "",
        "A share needs the final m and l, and they are known only after the last block. Yours are "
        "written earlier, with what m or l was then.",
        "Take the scores 1, 2 and then 3, 10 in two blocks. Which m and l are known when your "
        "share of the score 1 is written?",
        "03", "the second pass",
        {"online_softmax": [*_online(shares="so far"), *_online(shares="m so far")]},
    ),
    Mistake(
        "",
        "m and l have changed places somewhere: what is called m holds the sum.",
        "Print m and l after each step for the scores 1, 2, 3. Which one should never fall?",
        "03", "the worked table",
        {"online_softmax": [*_online(swapped="step"), *_online(swapped="end")]},
    ),
    Mistake(
        "",
        "Only the last block counts in the sum: what was gathered before it is lost.",
        "Print the factor on the old part, and what it multiplies, when the second block comes. "
        "Was m replaced by the new maximum after the first, and is the new part added?",
        "03", "the factor on the old part",
        {
            "online_softmax": _online(rescale="zero"),
            **_forward(
                Attention(rescale_l="zero", rescale_o="zero"),
                Attention(rescale_l="zero", rescale_o="zero", maximum="own"),
                Attention(rescale_l="zero", rescale_o="zero", maximum="own", lse="start"),
                Attention(rescale_l="zero"), Attention(rescale_o="zero"),
            ),
        },
    ),
    Mistake(
        "",
        "The factor for a new maximum is applied to the new block too. It belongs to what was "
        "gathered before alone.",
        "Against which maximum is the new block measured already, when you multiply?",
        "03", "the factor on the old part",
        {
            "online_softmax": _online(rescale="late"),
            **_forward(
                Attention(rescale_l="late", rescale_o="late"),
                Attention(rescale_l="late"), Attention(rescale_o="late"),
            ),
        },
    ),
    Mistake(
        "",
        "The new part is measured against the old maximum. It belongs on the new one, like "
        "everything that is gathered from now on.",
        "m is 1, and the score 3 comes. What does your exp get, and what is the share of a score "
        "that is the maximum?",
        "03", "“A running state”",
        {"online_softmax": _online(p_against="old")},
    ),
    Mistake(
        "",
        "Each block brings its own maximum as the new m, even where it is smaller than the old "
        "one. On paper that is right; but the factor exp(m - m_new) is then larger than 1, and "
        "overflows where the maximum falls by more than 709.",
        "Take the blocks [1000, 999] and [0]. What is your factor when the second one comes?",
        "03", "“Break it: the maximum”",
        {
            "online_softmax": _online(maximum="block"),
            **_forward(Attention(maximum="block")),
        },
    ),
    Mistake(
        "",
        "The old part is measured against the running maximum, the new block against its own.",
        "The first block holds 10, the second 3. Which maximum belongs into the exp of the second?",
        "03", "m_block and m in the worked table",
        {
            "online_softmax": _online(p_against="own"),
            **_forward(Attention(p_against="own")),
        },
    ),
    Mistake(
        "",
        "The sum of a tile, or its P̃V, is still measured against the tile's own maximum: bring "
        "both to the new one.",
        "The row has seen 10, the tile's own maximum is 3. What is the tile's P̃ measured against, "
        "and what do l and O expect?",
        "04", "“One tile”",
        _forward(Attention(p_against="own in o"), Attention(p_against="own in l")),
    ),
    Mistake(
        "",
        "The P̃V that comes late is measured against the m before: here the output shrinks before "
        "it is added.",
        "PV of a block comes after the softmax of the next one. Which m is its P̃ measured "
        "against, and which one is the output, when the two are added?",
        "11", "“The algorithm”",
        {"attention": [Attention(pipeline="late")]},
    ),
    Mistake(
        "",
        "The last PV is missing: when the loop ends, one P̃ has not yet met its V.",
        "How many products PV does your loop compute for 4 blocks, and which one is left?",
        "11", "“The algorithm”",
        {"attention": [Attention(pipeline="no last")]},
    ),
    Mistake(
        "",
        "P̃ of one block meets V of the next: the last block of keys has no P̃ of its own.",
        "Which blocks of K does your loop take for 4 blocks, and which blocks of V?",
        "11", "“Break it: one step too few”",
        {"attention": [Attention(pipeline="short")]},
    ),
    Mistake(
        "",
        "The correction factor is upside down for one of l and the output, and right for the "
        "other.",
        "The maximum rises from 2 to 10. Are both of your factors smaller than 1?",
        "03", "“Break it: the state” (and lesson 08, the factor printed upside down in the paper)",
        _forward(Attention(rescale_o="inverted"), Attention(rescale_l="inverted")),
    ),
    Mistake(
        "",
        "The output is divided by l after every block, but then it is no longer a sum: the next "
        "block cannot simply be added.",
        "After the first block your output is divided by l. By what is it multiplied before the "
        "second block is added?",
        "03", "the columns o and Õ of the worked table",
        _forward(Attention(divide_often=True)),
    ),
    Mistake(
        "",
        "The output so far is multiplied by the new l before the next share is added; it was "
        "divided by the old one.",
        "Print l before and after the line that writes it. Is what you call the old l still the "
        "old one? A slice is a view: it shows what was written since.",
        "03", "“The output joins in”",
        _forward(
            Attention(new_l=True), Attention(new_l=True, rescale_l="no", rescale_o="no"),
        ),
    ),
    Mistake(
        "",
        "m, l and the output are not started anew for each block of queries: its rows go on with "
        "the state of other rows.",
        "Print m at the start of the second block of queries. What has that block seen so far?",
        "08", "“One block of queries”",
        _forward(Attention(kept_state=True)),
    ),
    Mistake(
        "",
        "Neither the last, shorter block of keys nor that of queries is ever visited.",
        "How many blocks do 5 rows make in blocks of 2, and how many are there in your code?",
        "04", "“Cut into blocks”",
        _forward(Attention(tail_keys="dropped", tail_queries="dropped")),
    ),
    Mistake(
        "",
        "Each block lacks its last row: a slice ends before its second number.",
        "Print list(range(6))[0:3]. Which rows does your first block of 3 hold?",
        "04", "“Cut into blocks”",
        _forward(Attention(short="both"), Attention(short="keys")),
    ),
    Mistake(
        "",
        "The sizes are mixed up in the loop over the keys: it takes block_k of them at a time, but "
        "steps by block_q. Some are left out, or count twice.",
        "Print the start and the stop of each block of keys, for tiles of 3 × 2 and of 2 × 3.",
        "04", "“Cut into blocks”",
        _forward(Attention(mixed=True)),
    ),
    Mistake(
        "",
        "Neighbouring blocks overlap by one: what stands there counts twice.",
        "Print list(range(6))[0:3] and list(range(6))[3:6]. Which rows do your first two blocks of "
        "3 hold?",
        "04", "“Cut into blocks”",
        {"online_softmax": _online(shared=True), **_forward(Attention(shared=True))},
        nearer={"online_softmax": ("03", "“Any order, any blocks”")},
    ),
    Mistake(
        "",
        "Masked weights are set to 0 after the softmax, so the others no longer sum to 1.",
        "Print the sum of each row of your weights after the mask.",
        "09", "which keys a query may see",
        _forward(MatrixAttention(masked="late")),
    ),
    _scaled("√d", "√d where 1/√d belongs"),
    _scaled("1/√n_q", "1/√n_q, n_q the number of queries, where 1/√d belongs"),
    _scaled("1/√n", "1/√n, n the number of keys, where 1/√d belongs"),
    _scaled("1/√d_v", "1/√d_v, the width of v, where 1/√d belongs"),
    _scaled("1/√d_model", "1/√(heads · d) where 1/√d, the width of one head, belongs"),
    Mistake(
        "",
        "The default scale stands where 0, or a negative scale, was asked for.",
        "No scale given, and a scale of 0: does your code tell the two apart?",
        "01", "the scale 1/√d",
        {
            **_forward(Attention(scale="0 is none"), Attention(scale="negative too")),
            "attention_backward": [Backward(scale="0 is none"), Backward(scale="negative too")],
        },
    ),
    Mistake(
        "",
        "The maximum is that of q · k, and the scale comes after it: with a negative scale that is "
        "the smallest score of a row.",
        "The products are 1 and 2, the scale is -1. Which score is the largest, and which one do "
        "you subtract?",
        "02", "the experiment that slides a constant over the scores",
        _forward(MatrixAttention(shift="unscaled"), Attention(unscaled_max=True)),
    ),
    Mistake(
        "",
        "The maximum starts at a finite number: rows whose scores all lie far below it vanish, and "
        "0/0 is left.",
        "What is the maximum of nothing? Run your code by hand on the scores -20000 and -20001. "
        "What is m after the first block?",
        "03", "the experiment with scores around -200",
        {
            "softmax": [Softmax(shift=f"max or {start}", guard=False) for start in STARTS],
            "online_softmax": [
                form for start in STARTS for form in _online(start=float(start))
            ],
            **_forward(*(
                Attention(start=float(start), guard=guard)
                for start in STARTS for guard in ("seen", "l")
            )),
        },
        nearer={"softmax": ("02", "“Rows that should be easy”")},
    ),
    Mistake(
        "",
        "The number of a query head is divided by the number of key heads. It belongs divided by "
        "the number of query heads that share one.",
        "There are 6 query heads and 3 key heads: how many query heads share a key head? Write "
        "down which key head each one reads, and which one it reads in your code.",
        "09", "grouped heads (`repeat`, not `tile`)",
        {
            **_forward(Attention(heads="by key heads")),
            "attention_backward": [
                Backward(heads="by key heads"),
                Backward(heads="by key heads", gather="by key heads"),
            ],
        },
    ),
    Mistake(
        "",
        "Heads and rows are mixed up: a reshape alone keeps the order of the numbers, in which all "
        "heads of a row stand together.",
        "np.arange(12) in two rows, for three heads: which numbers are head 1's? And which does "
        "your cut give it?",
        "01", "“Heads, and how to cut them”",
        {"attention": [
            TwoHeads("rows", "rows"), TwoHeads("right", "rows"), TwoHeads("rows", "right"),
        ]},
    ),
    Mistake(
        "",
        "A head is made of columns that lie apart: head 0 of 2 holds the first half of them, not "
        "every second one.",
        "A row a, b, c, d for two heads: which letters are head 1's? And which does your code give "
        "it?",
        "01", "“Heads, and how to cut them”",
        {"attention": [
            TwoHeads("combs", "combs"), TwoHeads("right", "combs"), TwoHeads("combs", "right"),
        ]},
    ),
    Mistake(
        "",
        "cu_seqlens is read as lengths. It holds ends: each sequence starts where the one before "
        "stops.",
        "cu_seqlens is 0, 1, 4, 4, 7. How many sequences are there, and how long is each?",
        "09", "“Packed sequences”",
        {"attention": [Packed("lengths")]},
    ),
    Mistake(
        "",
        "Each packed sequence sees the first key of the next one too: an end is no part of it.",
        "cu_seqlens is 0, 1, 4, 4, 7. Which keys are those of the second sequence? Print yours.",
        "09", "“Packed sequences”",
        {"attention": [Packed("one key more")]},
    ),
    Mistake(
        "",
        "All packed sequences are taken for one: queries see the keys of other sequences.",
        "Change a key of the first sequence. Which rows of the output may move?",
        "09", "“Packed sequences”",
        {"attention": [Packed("ignored")]},
    ),
    Mistake(
        "",
        "Only the share of the last key is left in o: every share takes the place of the one "
        "before it.",
        "How often does your loop write to the same row of o? What happens to what was there?",
        "01", "three loops",
        _forward(MatrixAttention(share="last"), MatrixAttention(share="last seen")),
    ),
    *(_window(rule, text, hint) for rule, text, hint in (
        ("left end out", "is one key too narrow on the left", ENDS),
        ("right end out", "is one key too narrow on the right", ENDS),
        ("both ends out", "is one key too narrow on both sides", ENDS),
        ("left end alone", "does not end on the right", ENDS),
        ("right end alone", "does not end on the left", ENDS),
        ("no window", "has no effect", ENDS),
        ("window turned", "has left and right exchanged", ENDS),
        ("window alone", "takes the place of causal: where both are given, both hold",
         "Which pairs does causal=True alone let a query see? And with window=(1, 1) besides?"),
        ("window top-left", "is not shifted by n_k - n_q where n_q ≠ n_k", OFFSET),
    )),
    Mistake(
        "",
        "Neither causal nor the window is shifted by n_k - n_q: with fewer queries than keys the "
        "last query lines up with the last key.",
        OFFSET,
        "09", "alignment for n_q ≠ n_k",
        _forward(Attention(sees="all top-left")),
    ),
    Mistake(
        "",
        "The tiles of the causal mask are sorted out as if n_q were n_k: where they differ, query "
        "i stands at the key position i + n_k - n_q.",
        OFFSET,
        "09", "alignment for n_q ≠ n_k",
        _forward(Attention(tiles="top-left")),
    ),
    Mistake(
        "",
        "Tiles are skipped of which some query still sees a key: a tile is empty only if its "
        "last query does not see its first key.",
        TILE_CORNERS,
        "09", "full, partial and empty tiles",
        _forward(*(
            Attention(tiles=rule)
            for rule in ("by its first query", "one key early", "one key early, full")
        )),
    ),
    Mistake(
        "",
        "Some partial tiles are not masked inside: a tile is full only if its first query sees "
        "its last key.",
        TILE_CORNERS,
        "09", "full, partial and empty tiles",
        _forward(Attention(tiles="by its corner")),
    ),
    Mistake(
        "",
        "Partial tiles are left out: of them too, some pairs are seen.",
        TILE_CORNERS,
        "09", "full, partial and empty tiles",
        _forward(Attention(tiles="whole alone")),
    ),
    Mistake(
        "",
        "o is right. The lse of a query that sees no key must be -inf: the logarithm of a sum of "
        "nothing.",
        "What does a part with that lse weigh, exp(lse), when it is merged with another one?",
        "09", "a row with no key",
        {
            **_forward(Attention(empty_lse=0.0), Attention(empty_lse=math.inf)),
            "merge_attention": [Merge(empty_lse=0.0), Merge(empty_lse=math.inf)],
        },
        nearer={
            "attention": ("02", "“One number that remembers a row”"),
            "merge_attention": ("03", "“Two finished halves”"),
        },
    ),
    _lse("base 2 of l", "m + log₂ l: one part is natural, the other in base 2"),
    _lse("maximum", "m alone; the sum l is missing"),
    _lse("sum", "l alone, with neither its logarithm nor m"),
    _lse("no logarithm", "m + l; l needs its logarithm"),
    _lse("log of both", "log(m + l); only l is under the logarithm"),
    _lse("minus", "m - log l; a sign is wrong"),
    _lse("product", "m · log l; look at the operation between them"),
    _lse("exponential", "Σ exp(s) itself, without the logarithm"),
    Mistake(
        "",
        "exp(lse) is computed without subtracting anything: it overflows above 709 and vanishes "
        "below -745, and 0/0 is left.",
        "What is exp(1000)? Only the difference of the two lse matters; which number can you take "
        "away from both first?",
        "03", "merging two parts",
        {"merge_attention": [
            Merge(guard=guard, maximum=False, guard_lse=lse, weights=weights)
            for guard in (False, True) for lse in (False, True)
            for weights in ("right", "from lse")
        ]},
    ),
    Mistake(
        "",
        "The weights are exchanged: part a gets the weight of part b.",
        "One part is nearly empty (its lse is very small). Which o should come out?",
        "03", "merging two parts",
        {"merge_attention": [Merge(weights="swapped")]},
    ),
    Mistake(
        "",
        "The weights do not sum to 1.",
        "Put both o to 1. What must come out, and what does?",
        "03", "merging two parts",
        {"merge_attention": [Merge(weights="not divided")]},
    ),
    Mistake(
        "",
        "The parts are weighed by lse itself; lse is the logarithm of a weight.",
        "lse may be negative, or 0. What would a weight of 0 mean for a part that saw a key?",
        "03", "merging two parts",
        {"merge_attention": [
            *(Merge(weights="lse", lse=lse) for lse in ("right", "larger")),
            Merge(weights="share of lse"),
        ]},
    ),
    Mistake(
        "",
        "o is right; your lse is not the logarithm of the sum of both exp(lse), but a piece of it.",
        "Merge (lse 0) with (lse 0). Two equal sums of 1 make 2; what is its logarithm, and what "
        "is yours?",
        "03", "merging two parts",
        {"merge_attention": [Merge(lse=lse) for lse in ("sum", "no maximum", "larger")]},
    ),
    Mistake(
        "",
        "Neither dQ nor dK has the scale.",
        "S = τ Q Kᵀ. Where does τ appear when S is differentiated by Q?",
        "06", "the experiment without τ",
        {"attention_backward": [Backward(scale_dq=0, scale_dk=0)]},
    ),
    Mistake(
        "",
        "The scale is multiplied in twice, in dQ, in dK, or in both.",
        "S = τ Q Kᵀ. How often does τ appear when S is differentiated by Q? And in your code, "
        "between dS and dQ?",
        "06", "the experiment without τ",
        {"attention_backward": [
            Backward(scale_dq=dq, scale_dk=dk) for dq, dk in ((2, 2), (2, 1), (1, 2))
        ]},
    ),
    Mistake(
        "",
        "P is computed again from scores without the scale.",
        "Print a row of S in the forward pass and the same row in your backward pass.",
        "07", "P = exp(S - L)",
        {
            "attention_backward": [
                Backward(scale_p=scale_p, d_from=d_from)
                for scale_p in ("missing", "in both") for d_from in ("right", "P")
            ],
            "attention": [MatrixAttention(from_lse="without scale")],
        },
    ),
    Mistake(
        "",
        "The scale is missing everywhere: in the scores, in dQ and in dK.",
        "S = τ Q Kᵀ. Print a row of S in the forward pass and in your backward pass; and where "
        "does τ appear when S is differentiated by Q?",
        "06", "the experiment without τ",
        {"attention_backward": [
            Backward(scale_p=scale_p, d_from=d_from, scale_dq=0, scale_dk=0)
            for scale_p in ("missing", "in both") for d_from in ("right", "P")
        ]},
    ),
    Mistake(
        "",
        "lse is multiplied by the scale too. It was made of scores that have it already.",
        "lse = log Σ exp(s), and s has the scale in it. What does a row of exp(s - lse) sum to, "
        "and a row of yours?",
        "07", "“One number per row brings P back”",
        {
            "attention_backward": [
                Backward(scale_p="scaled", d_from=d_from) for d_from in ("right", "P")
            ],
            "attention": [MatrixAttention(from_lse="scaled")],
        },
    ),
    Mistake(
        "",
        "exp(S) is divided by lse itself; lse is the logarithm of the sum that belongs there.",
        "Two scores are 0 and 0. What is their lse, and by what must exp(0) be divided?",
        "07", "P = exp(S - L)",
        {
            "attention_backward": [
                Backward(weights="divided by lse", d_from=d_from) for d_from in ("right", "P")
            ],
            "attention": [MatrixAttention(from_lse="divided")],
        },
    ),
    Mistake(
        "",
        "D runs over the keys of one tile alone: it is a sum over all keys of the row.",
        "Which array holds a row's sum over all keys already, so that D can be made from it in "
        "any tile?",
        "07", "the experiment with D from an unfinished O",
        {"attention_backward": [Backward(d_from="tile")]},
    ),
    Mistake(
        "",
        "D is the plain mean of a row of dP. It is a mean in which each key counts with its "
        "weight P.",
        "Add up one row of your dS. What should the sum be?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(d_from="mean")]},
    ),
    Mistake(
        "",
        "D is the plain sum of a row of dP. Each key counts with its weight P in it.",
        "Add up one row of your dS. What should the sum be?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(d_from="sum")]},
    ),
    Mistake(
        "",
        "D is one number for all rows. Each query has a D of its own.",
        "What is the shape of D, and along which axis is P ∘ dP added up?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(d_from="all")]},
    ),
    Mistake(
        "",
        "D is summed over the queries: a number for each key. It is a number for each query.",
        "What is the shape of D, and along which axis is it subtracted from dP?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(d_from="columns")]},
    ),
    Mistake(
        "",
        "The last, shorter block of keys is never visited in the backward pass: it has no "
        "gradients, and gives dQ nothing.",
        "How many blocks does your loop visit for 5 keys in blocks of 2?",
        "07", "what stays and what passes by in the backward loop",
        {"attention_backward": [Backward(tail_keys="dropped")]},
    ),
    Mistake(
        "",
        "The last, shorter block of queries is never visited in the backward pass: its dQ stays "
        "0, and dK and dV miss its share.",
        "How many blocks does your loop visit for 5 queries in blocks of 2?",
        "07", "what stays and what passes by in the backward loop",
        {"attention_backward": [Backward(tail_queries="dropped")]},
    ),
    Mistake(
        "",
        "Neighbouring query heads share a key head: 0,0,1,1, not 0,1,0,1.",
        "Write down, for 4 query heads and 2 key heads, which key head each one reads, and then "
        "which query heads each gradient of a key head is gathered from.",
        "09", "grouped heads (`repeat`, not `tile`)",
        {"attention_backward": [
            Backward(heads="tiled"), Backward(heads="tiled", gather="tiled"),
        ]},
    ),
    Mistake(
        "",
        "dQ is right. dK and dV are added up over the wrong query heads: 0 and 1 share a key "
        "head, not 0 and 2.",
        "After your reshape, which query heads stand along the axis that you sum over?",
        "09", "grouped heads: dK, dV",
        {"attention_backward": [Backward(gather="tiled")]},
    ),
    Mistake(
        "",
        "dK and dV are the mean over the query heads that share a key head. Gradients add up.",
        "Two query heads read one key. Move that key: do the two changes of the loss add up, or "
        "is their mean taken?",
        "09", "grouped heads: dK, dV",
        {"attention_backward": [Backward(gather="mean")]},
    ),
    Mistake(
        "",
        "dK and dV hold the gradients of one query head alone. Several query heads share a key "
        "head; their gradients add up.",
        "Two query heads read one key. Move that key: through how many paths does the loss change?",
        "09", "grouped heads: dK, dV",
        {"attention_backward": [Backward(gather="first"), Backward(gather="first heads")]},
    ),
    Mistake(
        "",
        "dS is not P ∘ (dP - D): your factor P stands in the wrong place, or is missing.",
        "dS = P ∘ dP - P ∘ D. Which of the two terms has its P in your code?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(ds="without P"), Backward(ds="D outside")]},
    ),
    Mistake(
        "",
        "dQ and dK have a sign wrong: dS = P ∘ (dP - D).",
        "Add up one row of your dS. What should the sum be, and which sign do you see?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(ds="plus"), Backward(ds="turned")]},
    ),
    Mistake(
        "",
        "dS = P ∘ (1 - P) ∘ dP is only the diagonal of softmax's derivative: as if each weight "
        "hung on its own score alone.",
        "Raise one score a little. Which weights of the row move?",
        "06", "D, found in two ways",
        {"attention_backward": [Backward(ds="sigmoid")]},
    ),
    Mistake(
        "",
        "dK and dV collect a share from every block of queries; yours keep only the last.",
        "How often does your loop write to the same rows of dK? What happens to what was there?",
        "07", "what stays and what passes by in the backward loop",
        {"attention_backward": [Backward(rows_last="dk dv")]},
    ),
    *(
        Mistake(
            "",
            f"{right} is right. {name} collects a share from every query; yours keeps only the "
            "last.",
            f"How often does your loop write to the same rows of {name}? What happens to what was "
            "there?",
            "07", "“What stays, and what passes by”",
            {"attention_backward": [Backward(rows_last=name.lower())]},
        )
        for name, right in (("dK", "dV"), ("dV", "dK"))
    ),
    Mistake(
        "",
        "P stands where dS belongs in dK: V is reached through P, but K through the scores.",
        "dV = Pᵀ dO, since O = P V. In S = τ Q Kᵀ, the gradient of which matrix plays the part of "
        "dO?",
        "06", "“dQ and dK”",
        {"attention_backward": [Backward(dk_of="P")]},
    ),
    Mistake(
        "",
        "dS stands where P belongs in dV.",
        "O = P V. By which matrix are the rows of V added up, and which of its letters stands in "
        "your dV?",
        "06", "“One rule for matrix products”",
        {"attention_backward": [Backward(dv_of="dS")]},
    ),
    Mistake(
        "",
        "P is a softmax of each tile alone. A row of P sums to 1 over all keys, not over those of "
        "one tile.",
        "Which number, saved by the forward pass for each row, knows all of its keys?",
        "07", "“One number per row brings P back”",
        {"attention_backward": [
            Backward(weights="tile", d_from=d_from) for d_from in ("right", "P", "tile")
        ]},
    ),
    Mistake(
        "",
        "All three gradients are twice the right ones.",
        "If they come from nudges by h up and h down: how far apart are the two places?",
        "06", "“Do you trust it?”",
        {"attention_backward": [Backward(times=2)]},
    ),
    Mistake(
        "",
        "The block mask works the other way round: True means that a tile is computed.",
        "Which tiles does your loop skip?",
        "10", "Algorithm 5, line 8",
        {"block_sparse_attention": [
            Attention(sparse="turned"), Attention(sparse="turned", guard="no"),
        ]},
    ),
    Mistake(
        "",
        "After the first absent tile, those that follow it in its row or column are left out too.",
        "What does your loop do at an absent tile: end, or go on to the next one?",
        "10", "“Tiles that are not there”",
        {"block_sparse_attention": [Attention(sparse="row ends"), Attention(sparse="column ends")]},
    ),
    Mistake(
        "",
        "Rows and columns of the block mask are exchanged: its rows are blocks of queries, its "
        "columns blocks of keys.",
        "Which queries and which keys belong to block_mask[0, 1]? And in your code?",
        "10", "tiles that are not there",
        {"block_sparse_attention": [Attention(sparse="transposed")]},
    ),
    Mistake(
        "",
        "The whole block mask is written out again and again, side by side. Each of its entries "
        "belongs to one tile: to block_q neighbouring rows and block_k neighbouring columns.",
        "Write out [[1, 0]] by hand for tiles of 2 × 2. Is the first row 1, 1, 0, 0 or 1, 0, 1, 0?",
        "10", "tiles that are not there",
        {"block_sparse_attention": [Attention(sparse="copied")]},
    ),
    Mistake(
        "",
        "block_q and block_k are exchanged: a tile has block_q rows and block_k columns.",
        "Write out [[1, 0]] by hand for tiles of 2 × 3. How many rows and columns are there?",
        "10", "tiles that are not there",
        {"block_sparse_attention": [Attention(sparse="sizes exchanged")]},
    ),
    _sizes("Neither size is capped by d; B_r is.", capped="none"),
    _sizes("Both sizes are capped by d; only B_r is.", capped="both"),
    _sizes("B_r is the larger of ⌈M/4d⌉ and d, where the smaller belongs.", capped="up"),
    _sizes("The paper rounds M/4d up, not to the nearest whole number.", whole=round),
    _sizes("M/4d rounded down is 0 for a small M; the paper rounds it up.", whole=math.floor),
    _sizes("M/4d rounded up is one more only if there is a remainder.",
           whole=lambda share: math.floor(share) + 1),
    _sizes("M/4d is not rounded: sizes are whole numbers.", whole=lambda share: share),
    _sizes("M is divided by 4, then multiplied by d: Python reads M / 4 * d from left to right.",
           times_d=True),
    _sizes("M is divided by d, not by 4d: K, V, Q and O share the memory.", parts=1),
    _sizes("M is divided by 2d, not by 4d: K, V, Q and O share the memory.", parts=2),
    _sizes("M is divided by 3d, not by 4d: K, V, Q and O share the memory.", parts=3),
    _sizes("M is divided by 8d, not by 4d: K, V, Q and O share the memory.", parts=8),
    _sizes("M is divided by 16d: it counts elements, not bytes.", parts=16),
    _counted(
        "These are FlashAttention-2's counts without the lse, which is stored too.",
        "What does the backward pass need besides O, one number for each row?",
        Traffic(lse=0),
    ),
    _counted(
        "These are FlashAttention-2's counts with both m and l stored for each row; it stores "
        "one number, the lse.",
        "What does the backward pass need besides O, one number for each row?",
        Traffic(lse=2),
    ),
    _counted(
        "These are bytes; the check counts elements.",
        "How many numbers does a row of Q have, whatever their type?",
        *(Traffic(times=times) for times in (2, 4, 8)),
    ),
    _counted(
        "Loads and stores have changed places.",
        "Which of the two is larger in attention?",
        Traffic(swapped=True),
    ),
    _counted(
        "K and V are read once per block of keys in your count; it is once per block of queries.",
        "Which loop is the outer one? How many times does a row of K pass by?",
        Traffic(keys="columns"),
    ),
    _counted(
        "K and V are read once per query in your count; it is once per block of queries.",
        "How many queries share one reading of K and V?",
        Traffic(keys="row"),
    ),
    _counted(
        "The number of query blocks is not rounded: the last, shorter block reads all keys too.",
        "How many blocks are 5 queries in blocks of 2?",
        Traffic(query_blocks="divided"),
    ),
    _counted(
        "There is one block of queries more than needed where n_q is a multiple of block_q.",
        "How many blocks are 4 queries in blocks of 2, and how many 5?",
        Traffic(query_blocks="one more"),
    ),
    _counted(
        "The blocks of queries are counted with block_k; their rows are block_q.",
        "How many blocks are 8 queries with block_q = 2 and block_k = 4?",
        Traffic(query_blocks="by columns"),
    ),
    _counted(
        "These are FlashAttention-1's counts without its first stores: O, l and m are written once "
        "before the loops.",
        "What does the inner loop load in its very first turn, and who has put that there?",
        FirstTraffic(),
    ),
    _counted(
        "K is counted, V is not: it is read as often.",
        "Which arrays does the inner loop load?",
        Traffic(values=False),
    ),
    _counted(
        "O is written once, and never read: FlashAttention-2 gathers it in fast memory.",
        "Where does O_i live while the inner loop runs?",
        Traffic(output_read=True), Traffic(output_read=True, lse=0),
    ),
    _counted(
        "d stands where d_v belongs: a row of V, or of O, holds d_v numbers.",
        "Take d = 8 and d_v = 5. How many numbers does a row of V hold, and how many one of O?",
        *(Traffic(width=width) for width in ("both", "loads", "stores")),
    ),
    _counted(
        "The last, shorter block counts as if it were full: it moves only the rows that it has.",
        "How many rows of K are there in the blocks of 2 of 5 keys, all together?",
        *(Traffic(full=full) for full in ("keys", "queries", "both")),
    ),
    _counted(
        "The stores lack O.",
        "What does attention return?",
        Traffic(output=False),
    ),
)  # fmt: skip

"""A second oracle: PyTorch's autograd in float64, and its own attention where it has the option.

PyTorch differentiates a formula of a few lines, so no gradient formula is shared with anybody.
Torch tensors are handed in as they are, too. Needs `pip install torch`.
"""

import numpy as np
import pytest

import flashref
from flashref.tests.cases import CASES, SMALL_OPTIONS, small_problem
from flashref.tests.oracle import QUANTITIES, Gold, assert_close
from flashref.tests.rungs import rungs

torch = pytest.importorskip(
    "torch", reason="PyTorch, the second oracle, is not installed: pip install 'torch>=2.6'"
)

pytestmark = pytest.mark.filterwarnings("error")

RUNGS = rungs(blocks=[(2, 3)])
every_rung = pytest.mark.parametrize("rung", RUNGS, ids=str)
DENSE = [case for case in CASES if case.poison is None and case.n[0] * case.n[1] <= 5000]


def autograd(
    q, k, v, do, *, scale=None, causal=False, window=None, mask=None, bias=None,
    alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
):  # fmt: skip
    """Return o, lse and the gradients. k and v are repeated, so PyTorch sums over the groups."""
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v))
    k_each, v_each = k, v
    if q.ndim > 2:
        k_each, v_each = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ k_each.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    i = i if causal == "top-left" else i + s.shape[-1] - s.shape[-2]
    if alibi_slopes is not None:
        s = s - _double(alibi_slopes)[..., None, None] * (i - j).abs()
    left, right = window or (None, None)
    seen = torch.ones(s.shape, dtype=torch.bool)
    seen &= torch.tensor(True) if not causal else j <= i
    seen &= torch.tensor(True) if left is None else i - left <= j
    seen &= torch.tensor(True) if right is None else j <= i + right
    seen &= torch.tensor(True if mask is None else mask)
    if bias is not None:
        seen &= _double(bias) > -torch.inf
        s = s + torch.where(seen, _double(bias), 0)
    some = seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen & some, -torch.inf)  # a row that sees nothing may hold anything finite
    P = torch.softmax(s, -1) * some
    Z = _double(flashref.dropout_keep(seed, tuple(s.shape), dropout_p)) / (1 - dropout_p)
    o = (P * Z) @ v_each
    lse = torch.logsumexp(s, -1).masked_fill(~some[..., 0], -torch.inf)
    grads = torch.autograd.grad((o * _double(do)).sum(), (q, k, v))
    return [x.detach().numpy() for x in (o, lse, *grads)]


def _double(x):
    return torch.tensor(np.asarray(x, np.float64))


@every_rung
@pytest.mark.parametrize("name", SMALL_OPTIONS)
def test_each_option_in_turn_and_all_together(rung, name):
    q, k, v, do = small_problem(10)
    options = SMALL_OPTIONS[name]
    got = rung.run(q, k, v, do, **options)
    want = autograd(q, k, v, do, **options)
    for quantity, x, y in zip(QUANTITIES, got, want, strict=True):
        assert_close(x, y, 1e-12 * np.maximum(1, np.abs(y)), what=quantity)


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_the_oracle_agrees_with_autograd(case):
    """On the grid without poison: 0 * NaN would be NaN in PyTorch's matrix products."""
    given = case.inputs("standard_attention")
    keep = {}
    if case.dropout_p:
        shape = (*case.lead, *case.n)
        keep["keep"] = flashref.dropout_keep(given.seed, shape, case.dropout_p)
    arrays = [x.astype(np.float64) for x in (given.q, given.k, given.v, given.do)]
    gold = Gold(*arrays[:3], **given.oracle, **keep)
    want = autograd(*arrays, **given.options)
    gold.expect(np.float64, given.do).check(**dict(zip(QUANTITIES, want, strict=True)))


@every_rung
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"}, {"attn_mask": "float"}],
    ids=str,
)
def test_scaled_dot_product_attention(rung, options):
    """PyTorch's own, by the names of its options; is_causal is top-left, True in a mask is seen."""
    rng = np.random.default_rng(12)
    shapes = (2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), (2, 6, 5, 4)
    q, k, v, do = (rng.standard_normal(shape) for shape in shapes)
    mask = {"bool": rng.random((2, 6, 5, 7)) < 0.6, "float": rng.standard_normal((5, 7))}
    given = mask.get(options.get("attn_mask"))
    ours = {"causal": "top-left" if options.get("is_causal") else False}
    ours |= {"scale": options.get("scale")}
    if given is not None:
        options = {**options, "attn_mask": torch.tensor(given)}
        ours["mask" if given.dtype == bool else "bias"] = given
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    o = attend(*tensors, enable_gqa=True, **options)
    grads = torch.autograd.grad((o * torch.tensor(do)).sum(), tensors)
    got = rung.run(q, k, v, do, **ours)
    wants = [x.detach().numpy() for x in (o, *grads)]
    for name, want in zip(("o", "dq", "dk", "dv"), wants, strict=True):
        assert_close(getattr(got, name), want, 1e-12 * np.maximum(1, np.abs(want)), what=name)


@every_rung
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("layout", ["plain", "transposed", "every second", "expanded"])
def test_tensors_are_arrays(rung, dtype, layout):
    """Tensors in any layout give the bits that arrays give, as new NumPy arrays."""
    arrays = [x.astype(dtype) for x in small_problem(13)]
    tensors = [torch.tensor(x) for x in arrays]
    if layout == "transposed":
        tensors = [x.mT.contiguous().mT for x in tensors]
    elif layout == "every second":
        tensors = [torch.stack([x, x + torch.nan], -1)[..., 0] for x in tensors]
    elif layout == "expanded":  # a stride of 0: all heads alike
        tensors = [x[:1].expand(x.shape) for x in tensors]
        arrays = [np.repeat(x[:1], len(x), axis=0) for x in arrays]
    before = [x.clone() for x in tensors]
    o, lse = rung.forward(*tensors[:3], causal=True)
    saved = torch.tensor(o), torch.tensor(lse)
    got = o, lse, *rung.backward(tensors[3], *tensors[:3], *saved, causal=True)
    for x, want in zip(got, rung.run(*arrays, causal=True), strict=True):
        assert type(x) is np.ndarray
        assert x.dtype == want.dtype
        np.testing.assert_array_equal(x, want)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)


def test_masks_and_biases_may_be_tensors():
    q, k, v, _ = small_problem(14)
    mask, bias = SMALL_OPTIONS["mask"]["mask"], SMALL_OPTIONS["bias"]["bias"]
    slopes = SMALL_OPTIONS["alibi"]["alibi_slopes"]
    given = dict(mask=mask, bias=bias, alibi_slopes=slopes)
    as_tensors = {name: torch.tensor(x) for name, x in given.items()}
    want = flashref.flash_attention_2(q, k, v, **given)
    np.testing.assert_array_equal(flashref.flash_attention_2(q, k, v, **as_tensors), want)

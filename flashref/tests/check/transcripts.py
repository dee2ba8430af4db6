"""What a learner reads: the reports on `solutions/first_try.py`, kept as text to be read aloud.

`python -m flashref.tests.check.transcripts` writes them again.
"""

from pathlib import Path

from flashref import check
from flashref.tests.check.solutions import first_try

FOLDER = Path(__file__).parent / "transcripts"
HOMEWORK = {
    "softmax": "softmax",
    "online_softmax": "online_softmax",
    "flash_attention": "attention",
    "causal_attention": "attention",
    "multi_head_attention": "attention",
    "attention_backward": "attention_backward",
    "flash_traffic": "traffic",
}


def transcript(name):
    """Return the report on one function of the homework, as text."""
    return f"{getattr(check, HOMEWORK[name])(getattr(first_try, name))}\n"


def main():
    """Write all transcripts."""
    FOLDER.mkdir(exist_ok=True)
    for name in HOMEWORK:
        (FOLDER / f"{name}.txt").write_text(transcript(name), encoding="utf-8")


if __name__ == "__main__":
    main()

"""`python -m flashref`: commands, exit codes, and an `info` that tells nothing personal."""

import argparse
import getpass
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import flashref
from flashref import cli, info


def run(*arguments):
    command = [sys.executable, "-m", "flashref", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_a_command_it_says_which_there_are():
    got = run()
    assert got.returncode == 2
    assert got.stdout == run("--help").stdout


def test_help_lists_every_command_with_its_exit_codes():
    got = run("--help")
    assert got.returncode == 0
    for name, (_, what) in cli.commands().items():
        assert re.search(rf"^  {name} +{what}$", got.stdout, re.M)
    assert cli.EXIT_CODES in got.stdout


def test_the_exit_codes_are_those_of_the_commands():
    """Every code that a command's own help lists is listed here."""
    listed = set(re.findall(r"^  (\d+)  ", cli.EXIT_CODES, re.M))
    assert listed == {"0", "1", "2", "3", "130"}
    for name in cli.commands():
        assert set(re.findall(r"^  (\d+)  ", run(name, "--help").stdout, re.M)) <= listed


def test_an_unknown_command_is_refused():
    got = run("nonsense")
    assert got.returncode == 2
    assert "nonsense" in got.stderr and "info" in got.stderr


def test_the_version():
    assert run("--version").stdout == f"flashref {flashref.__version__}\n"


def test_help_after_a_command_is_the_commands():
    for name in cli.commands():
        got = run(name, "--help")
        assert got.returncode == 0, got.stderr
        assert got.stdout.startswith(f"usage: python -m flashref {name}")


def test_the_promised_commands_are_there():
    assert set(cli.commands()) == set(cli.COMMANDS) == {"info", "check", "bench", "figures"}


def test_a_command_that_is_not_there_is_not_listed(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "dance", ("flashref.dance", "no such module"))
    monkeypatch.setitem(cli.COMMANDS, "sing", ("flashref.choir.sing", "no such package"))
    assert not {"dance", "sing"} & set(cli.commands())


@pytest.fixture
def stub(monkeypatch):
    """Return a function that makes `python -m flashref stub` call the given main."""

    def install(main):
        module = types.ModuleType("flashref.stub")
        module.__spec__ = types.SimpleNamespace(name="flashref.stub")
        module.main = main
        monkeypatch.setitem(sys.modules, "flashref.stub", module)
        monkeypatch.setitem(cli.COMMANDS, "stub", ("flashref.stub", "a stand-in"))

    return install


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_arguments_go_in_and_the_exit_code_comes_out(stub, returned, code):
    seen = []
    stub(lambda argv: seen.append(argv) or returned)
    assert cli.main(["stub", "file.py", "--only", "softmax", "--help"]) == code
    assert seen == [["file.py", "--only", "softmax", "--help"]]


def test_an_interrupt_ends_quietly(stub):
    def interrupted(argv):
        raise KeyboardInterrupt

    stub(interrupted)
    assert cli.main(["stub"]) == 130


def test_a_missing_package_is_named_and_our_own_mistakes_are_not_hidden(stub, capsys):
    def needs(name):
        def main(argv):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        stub(main)
        return cli.main(["stub"])

    with pytest.raises(SystemExit, match="2"):
        needs("matplotlib.figure")
    assert "needs the package matplotlib" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        needs("flashref.nowhere")


def without_matplotlib(*arguments):
    source = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        f"from flashref import cli\nsys.exit(cli.main({[*map(str, arguments)]}))"
    )
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


def test_figures_without_matplotlib_exit_with_2(tmp_path):
    got = without_matplotlib("figures", "--folder", tmp_path / "nowhere")
    assert got.returncode == 2
    assert "needs the package matplotlib" in got.stderr and "Traceback" not in got.stderr
    assert not (tmp_path / "nowhere").exists()


def test_every_help_is_there_without_matplotlib():
    for name in cli.commands():
        got = without_matplotlib(name, "--help")
        assert got.returncode == 0, got.stderr
        assert got.stdout.startswith(f"usage: python -m flashref {name}")


def test_figures_draws_into_a_new_folder(tmp_path, monkeypatch, capsys):
    figures = pytest.importorskip("flashref.figures")
    pytest.importorskip("matplotlib", reason="pictures need it")
    one = {"one.png": figures.flash1_beside_flash2}
    monkeypatch.setattr(figures, "pictures", lambda: one)
    assert figures.main(["--folder", str(tmp_path / "new" / "folder")]) == 0
    assert (tmp_path / "new" / "folder" / "one.png").read_bytes().startswith(b"\x89PNG")
    assert re.match(r"\S+one\.png: \w", capsys.readouterr().out)


@pytest.mark.parametrize("inside", ["", "folder"])
def test_figures_in_a_folder_that_cannot_be_made(tmp_path, inside, capsys):
    pytest.importorskip("matplotlib", reason="pictures need it")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["figures", "--folder", str(tmp_path / "file" / inside)])
    assert re.search(r"error: --folder \S+file\S*: [A-Z]", capsys.readouterr().err)


def test_a_new_file_is_in_a_folder_that_is_there_and_open(tmp_path, monkeypatch):
    assert cli.new_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    (tmp_path / "old.json").write_text("kept until there is something to write")
    assert cli.new_file(str(tmp_path / "old.json")).read_text().startswith("kept")
    for path in (tmp_path, tmp_path / "nowhere" / "new.json", tmp_path / "old.json" / "new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a file in an existing folder"):
            cli.new_file(str(path))
    with pytest.raises(argparse.ArgumentTypeError, match=r"aaa: [A-Z]\w+ name too long"):
        cli.new_file(str(tmp_path / ("a" * 300)))
    asked = []
    monkeypatch.setattr(cli.os, "access", lambda path, how: asked.append((path, how)))
    for name in ("old.json", "new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{name} may not be written"):
            cli.new_file(str(tmp_path / name))
    assert asked == [(tmp_path / "old.json", os.W_OK), (tmp_path, os.W_OK)]


def test_info_is_a_block_to_paste_with_the_true_versions():
    got = run("info")
    assert got.returncode == 0 and not got.stderr
    lines = got.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    told = dict(line.split(maxsplit=1) for line in lines[1:-1])
    assert told["flashref"] == flashref.__version__
    assert told["numpy"] == np.__version__
    assert told["python"].startswith(sys.version.split()[0])
    assert told["cores"].startswith(str(os.cpu_count()))


def test_info_tells_nothing_personal():
    got = run("info").stdout
    assert not re.search(r"/[a-z]+/|[A-Z]:\\", got), "a path"
    assert str(Path.home()) not in got
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", got)


def test_info_names_what_is_missing_and_what_is_set(monkeypatch):
    monkeypatch.setattr(info, "PACKAGES", ("no-such-package",))
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "many")
    told = info.facts()
    assert told["no-such-package"] == "not installed"
    assert "threadpoolctl is not installed" in told["BLAS"]
    assert "OPENBLAS_CORETYPE=Haswell" in told["settings"]
    assert "FLASHREF_NUM_THREADS='many'" in told["threads"]

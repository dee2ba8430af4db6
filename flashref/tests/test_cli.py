"""`python -m flashref`: commands, exit codes, and an `info` that tells nothing personal."""

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


def test_figures_without_matplotlib_exit_with_2():
    source = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from flashref import cli\ncli.main(['figures', '--folder', 'nowhere'])"
    )
    got = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert got.returncode == 2
    assert "needs the package matplotlib" in got.stderr and "Traceback" not in got.stderr


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

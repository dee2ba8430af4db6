"""`python -m flashref`: which command is which module.

Each command is the `main(argv)` of a module and is imported when called; its `--help` is its
documentation.
"""

import argparse
import importlib
import importlib.util
import os
from pathlib import Path

import flashref

COMMANDS = {
    "info": ("flashref.info", "versions, threads and GPU state, to paste into a bug report"),
    "check": ("flashref.check.command", "check a homework file, each exercise in its own process"),
    "bench": ("flashref.bench", "time the algorithms and their peers side by side"),
    "figures": ("flashref.figures", "draw figures/ again"),
}
EXIT_CODES = """\
exit codes:
  0    all is well
  1    the command ran and says no: a check failed
  2    the command could not be understood, or lacks a package that it names
  3    check: there was nothing to check
  130  interrupted
"""


def commands():
    """Return the commands that this copy of flashref has: name to (module, what it does)."""
    return {name: entry for name, entry in COMMANDS.items() if _exists(entry[0])}


def _exists(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def new_file(text):
    """Return the path of a file to write, for `type=` of argparse: better refused than lost."""
    path = Path(text)
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is not a file in an existing folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text} may not be written")
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return path


def main(argv=None):
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : list of str, optional
        The command and its arguments; those of the process if left out.

    Returns
    -------
    code : int
        0 all is well; 1 the command says no; 2 it was not understood or lacks a package; 3 there
        was nothing to check; 130 interrupted.
    """
    known = commands()
    parser = argparse.ArgumentParser(
        prog="python -m flashref",
        description=flashref.__doc__,
        epilog="\n".join(
            ["commands (each has its own --help):"]
            + [f"  {name:10}{what}" for name, (_, what) in known.items()]
            + ["", EXIT_CODES]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flashref {flashref.__version__}")
    parser.add_argument("command", nargs="?", choices=known, metavar="command", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed on to the command")
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2

    module, _ = known[args.command]
    try:
        return importlib.import_module(module).main(args.arguments) or 0
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "flashref":
            raise  # a mistake in here, not something to install
        parser.exit(2, f"{parser.prog} {args.command} needs the package {error.name}\n")

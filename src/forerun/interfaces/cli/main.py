"""The console command: names of the subcommands, and errors as one line.

Only the module of the requested subcommand is imported, so that help is printed at once.
Exit codes are in `exit_codes.py`; bad input is one line `error: ...` on stderr.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from forerun.common.errors import ForerunError, ImpossibleResult, bounded
from forerun.common.version import __version__
from forerun.interfaces.cli.exit_codes import BAD_INPUT, BUG, INTERRUPTED
from forerun.interfaces.cli.process import Stopped, prepare_process
from forerun.interfaces.report.working import working

COMMANDS = {
    "plan": "Find the fastest parallelism plan that fits.",
    "serve": "Open the planner in the browser, on this machine and offline.",
    "predict": "Predict time, memory and cost of one plan.",
    "simulate": "List kernels, streams and modules of a saved program by time.",
    "diff": "Show what a change of a script costs: time, memory, and why.",
    "trace": "Record a real PyTorch training step without a GPU.",
    "profile": "Analyze PyTorch profiles: where the time of a step goes.",
    "run": "Predict a whole run of weeks: failures, checkpoints, goodput.",
    "stragglers": "Show what slow ranks cost a job, from a trace of operations.",
    "cluster": "Simulate many jobs on one cluster under scheduling policies.",
    "experiment": "Study a run that one file describes: scaling, what-if, cost.",
    "validate": "Compare predictions with published measurements.",
    "measure": "Measure the kernels and collectives of this machine.",
    "calibrate": "Fit a device's cost profile to measurements.",
    "fit": "Fit the constants of stacks to published step times.",
    "models": "List the model presets.",
    "clusters": "List the cluster presets.",
    "stacks": "List the software stacks.",
    "astra": "Replay Chakra traces on a network, as ASTRA-sim does.",
    "chakra": "Check, describe and convert Chakra traces.",
    "collective": "Simulate a collective on a network, by size and algorithm.",
    "stage": "Generate Chakra traces of a transformer from STAGE's flags.",
    "traffic": "Simulate patterns of messages on a network.",
    "dse": "Explore a design space of workloads, systems and strategies.",
    "init": "Write a first YAML file from four answers.",
    "doctor": "Show what this installation has and lacks.",
    "version": "Print the version, as forerun --version does.",
}
_WITHOUT_LIMITS = frozenset({"trace", "serve", "models", "clusters", "stacks", "init", "doctor", "version"})
"""commands that answer at once, run until the user stops them, or have limits of their own"""
TRACEBACK = "FORERUN_TRACEBACK"
"""name of the environment variable that shows Python's traceback of an unexpected error"""
COMPLETES = "_FORERUN_COMPLETE"
"""name of the environment variable that a shell sets when it requests completions"""
_LONGEST_REPORT = 300
# Typer brings its own copy of click from some version on; its errors are reached through their common descendant.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> None:
    """Runs the command line and exits."""
    prepare_process()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _forget_output()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs the command line `arguments` and returns its exit code."""
    try:
        arguments = _rewritten(arguments)
        with working(*arguments[:1]):
            code = app_of(arguments)(arguments or ["--help"], prog_name="forerun", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
        if code == INTERRUPTED:  # some versions of Typer answer Ctrl-C by this code, others raise Abort
            return _fail("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except ImpossibleResult as error:
        return _fail(str(error), BUG)
    except ForerunError as error:
        return _fail(str(error))
    except _UsageError as error:
        words = import_module("forerun.interfaces.cli.usage")
        return _fail(words.usage_line(error))
    except Stopped as stopped:
        return _fail(str(stopped), stopped.code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader has what it wanted
        _forget_output()
        return 0
    except OSError as error:
        if error.filename is None:
            _forget_output()
        place = "standard output" if error.filename is None else error.filename
        return _fail(f"{place}: {error.strerror or error}")
    except MemoryError:
        return _fail("the command needs more memory than this machine has; reduce the number of plans, ranks or runs")
    except Exception as error:
        if TRACEBACK in os.environ:
            raise
        return _fail(_report(error), BUG)


def _report(error: Exception) -> str:
    """Returns the line that asks a user to report an error that Forerun should not have met."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}, line {last.lineno}"
    what = bounded(f"{type(error).__name__}: {error}", _LONGEST_REPORT)
    return f"a bug of Forerun {__version__}: {what} ({where}); please report it with what {TRACEBACK}=1 prints"


def _fail(message: str, code: int = BAD_INPUT) -> int:
    with suppress(OSError):
        print("error:", bounded(" ".join(message.split())), file=sys.stderr)
    return code


def _forget_output() -> None:
    """Discards the remaining output, so that Python doesn't fail again when it exits."""
    with suppress(OSError, ValueError):  # a stream of a test has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def app_of(arguments: list[str]) -> typer.Typer:
    """Returns the command line. Only the command at the start of `arguments` is loaded."""
    if COMPLETES in os.environ:
        completion = import_module("forerun.interfaces.cli.completion")
        arguments = completion.asked() or arguments
        if completion.known_at_once():
            app = typer.Typer()
            app.callback()(_forerun)
            app.command(arguments[0])(completion.of_presets)
            return app
    app = typer.Typer(pretty_exceptions_enable=False, help=_HELP, rich_markup_mode=None)
    app.callback()(_forerun)
    for name, summary in COMMANDS.items():
        command = _load(name) if arguments[:1] == [name] else _not_asked_for
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=summary)
            continue
        app.command(name, short_help=summary, help=None if arguments[:1] == [name] else summary)(command)
    return app


def _rewritten(arguments: list[str]) -> list[str]:
    """Returns the arguments in the form that the command reads; `plan` reads flags with values, such as `--compile
    true`."""
    if arguments[:1] == ["--version"]:
        return ["version", *arguments[1:]]
    if arguments[:1] != ["plan"]:
        return arguments
    rewrite: Callable[[list[str]], list[str]] = import_module("forerun.interfaces.cli.plan_options").flags_with_values
    return rewrite(arguments)


_HELP = "Predict step time, memory and cost of a distributed PyTorch training run, and find its best parallelism."


def _forerun() -> None:
    pass


def _not_asked_for() -> None:
    """Fills the list of commands for every command that is not loaded."""


@cache
def _load(name: str) -> Callable[..., None] | typer.Typer:
    command: Callable[..., None] | typer.Typer = getattr(import_module(f"forerun.interfaces.cli.{name}"), name)
    if name in _WITHOUT_LIMITS:
        return command
    limited: Callable[[Callable[..., None], str], Callable[..., None]]
    limited = import_module("forerun.interfaces.cli.process_limits").limited
    if not isinstance(command, typer.Typer):
        return limited(command, name)
    own = copy(command)  # the module's own stays as it is, so that loading it again does the same

    def with_limits(part: Any) -> Any:
        made = copy(part)
        made.callback = limited(part.callback, name)
        return made

    own.registered_commands = [with_limits(part) for part in command.registered_commands]
    if command.registered_callback is not None:
        own.registered_callback = with_limits(command.registered_callback)
    return own

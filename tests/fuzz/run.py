"""Runs one mutated input after the other in this process, with a watchdog, and says what broke."""

from __future__ import annotations

import hashlib
import io
import re
import resource
import shlex
import signal
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mutate import mutated_bytes, mutated_data, mutated_program, written
from seeds import FORMATS, PROGRAM_COMMANDS, program

from forerun.astrasim.chakra.jsonize import convert
from forerun.interfaces.cli.exit_codes import BAD_INPUT, NOTHING_FITS
from forerun.interfaces.cli.main import run

LONGEST_S = 20
MOST_BYTES = 2 << 30
_NUMBERS = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')
_NEGATIVE = re.compile(r'"\w*(?:_s|_gib|_bytes|_ns)": -[1-9]')


@dataclass(frozen=True)
class Broken:
    """An input that broke something."""

    command: str
    name: str
    content: bytes
    kind: str
    what: str


class TooSlow(BaseException):
    """The watchdog's: nothing of Forerun catches it."""


@contextmanager
def watched(limit_s: float):
    """Ends the block after `limit_s` seconds."""

    def end(number, frame):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Fuzzer:
    """Mutated inputs in `folder`, as a seed of random numbers makes them."""

    def __init__(self, folder: Path, seed: int, only: str = "") -> None:
        self.folder, self.random = folder, Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.program = program(folder).read_bytes()
        for form in FORMATS.values():
            (folder / form.name).write_bytes(written(form.name, form.seed))
        for rank in range(4):
            convert(folder / FORMATS["CHAKRA"].name, folder / f"traces.{rank}.et")
        self.choices = [only] if only else [*FORMATS, "PROGRAM"]

    def one(self) -> Broken | None:
        """Tries one input; returns it if it broke something."""
        chosen = self.random.choice(self.choices)
        if chosen == "PROGRAM":
            name, commands = "mutated.program", PROGRAM_COMMANDS
            content = mutated_program(self.program, self.random)
        else:
            form = FORMATS[chosen]
            name, commands = f"mutated-{form.name}", form.commands
            content = written(form.name, mutated_data(form.seed, self.random))
            if self.random.random() < 0.2:
                content = mutated_bytes(content, self.random)
        return self.tried(self.random.choice(commands), name, content)

    def tried(self, command: str, name: str, content: bytes) -> Broken | None:
        """Runs `command` on the file `name` of `content`; returns it if it broke something."""
        path = self.folder / name
        path.write_bytes(content)
        files = {"FILE": str(path), "TRACES": str(self.folder / "traces"), "OUT": str(self.folder / "out.jsonl")} | {
            key: str(self.folder / form.name) for key, form in FORMATS.items()
        }
        words = [files.get(word, word) for word in shlex.split(command)]
        out, err = io.StringIO(), io.StringIO()
        try:
            with watched(LONGEST_S), redirect_stdout(out), redirect_stderr(err):
                code = run(words)
        except TooSlow:
            return Broken(command, name, content, f"slow {command.split()[0]} {name}", f"more than {LONGEST_S} s")
        except BaseException as error:
            return Broken(
                command, name, content, f"raised {type(error).__name__}", f"{type(error).__name__}: {error}"[:300]
            )
        self.outcomes[f"exit {code}"] += 1
        what = _wrong(code, out.getvalue(), err.getvalue())
        return None if what is None else Broken(command, name, content, *what)


def _wrong(code: int, out: str, err: str) -> tuple[str, str] | None:
    """What is wrong with the end of a command: its kind, and in words."""
    if code not in (0, BAD_INPUT, NOTHING_FITS):
        where = re.search(r"\((\w+\.py, line \d+)\)", err)
        return f"code {code} {where.group(1) if where else err[:60]}", err.strip()[:400]
    errors = [line for line in err.splitlines() if line.startswith(("error:", "Traceback"))]
    if code == BAD_INPUT and (len(errors) != 1 or len(err) > 6000):
        return f"message {err[:40]}", f"{len(errors)} errors in {len(err)} characters: {err[:200]!r}"
    if (
        code == 0
        and out.lstrip()[:1] in ("{", "[")
        and (found := _NUMBERS.search(_TEXTS.sub("", out)) or _NEGATIVE.search(out))
    ):
        return (
            f"nonsense {found.group(0)}",
            f"the output has {found.string[max(0, found.start() - 60) : found.end() + 20]!r}",
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ("memory", f"{peak:,} bytes") if peak > MOST_BYTES else None


def corpus_entry(folder: Path, broken: Broken) -> None:
    """Keeps an input that broke something: its file, and beside it the command."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(broken.command.encode() + broken.content).hexdigest()[:12]
    (folder / f"{digest}-{broken.name}").write_bytes(broken.content)
    (folder / f"{digest}-{broken.name}.command").write_text(broken.command + "\n", encoding="utf-8")

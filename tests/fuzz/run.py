"""Runs one mutated input after the other in this process, with a watchdog, and says what broke."""

from __future__ import annotations

import hashlib
import io
import re
import resource
import shlex
import signal
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from formats import Format
from mutate import mutated_bytes, mutated_data, mutated_program, written
from seeds import COMMANDS, FORMATS, program

from forerun.astrasim.chakra.jsonize import convert
from forerun.interfaces.cli.exit_codes import BAD_INPUT, NOTHING_FITS
from forerun.interfaces.cli.main import run

LONGEST_S = 20
MOST_BYTES = 2 << 30
_NUMBERS = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')
_NEGATIVE = re.compile(r'"(?!lost_s|saved_s)\w*(?:_s|_gib|_bytes|_ns)": -[1-9]')
"""a figure that can't be negative; what was lost or saved can"""


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
    """Ends the block after `limit_s` seconds of processor time, and after three times as many by the clock."""

    def end(number, frame):
        raise TooSlow

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, limit_s), (signal.SIGALRM, signal.ITIMER_REAL, 3 * limit_s))
    before = [signal.signal(number, end) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


class Fuzzer:
    """Mutated inputs in `folder`, as a seed of random numbers makes them."""

    def __init__(self, folder: Path, seed: int, only: str = "") -> None:
        self.folder, self.random = folder, Random(seed)
        self.outcomes: Counter[str] = Counter()
        for form in FORMATS.values():
            (folder / form.name).write_bytes(written(form.name, form.seed))
        for rank in range(4):
            convert(folder / FORMATS["CHAKRA"].name, folder / f"traces.{rank}.et")
        self.choices = [only] if only else [*FORMATS, *COMMANDS]
        self.files = {
            "PROGRAM": ("a.program", program(folder).read_bytes(), mutated_program),
            "TRACE": ("a.et", (folder / "traces.0.et").read_bytes(), mutated_bytes),
            "STORE": ("a.store", self._store(), mutated_bytes),
        }

    def one(self) -> Broken | None:
        """Tries one input; returns it if it broke something."""
        chosen = self.random.choice(self.choices)
        if chosen in COMMANDS:
            name, sound, mutate = self.files[chosen]
            name, commands, content = f"mutated-{name}", COMMANDS[chosen], mutate(sound, self.random)
        else:
            form = FORMATS[chosen]
            name, commands = f"mutated-{form.name}", form.commands
            content = self._mutated(form)
        return self.tried(self.random.choice(commands), name, content)

    def _store(self) -> bytes:
        """The store of a small search."""
        path = self.folder / "a.store"
        with redirect_stdout(io.StringIO()):
            code = run(
                [str(path) if word == "FILE" else self._path(word) for word in shlex.split(COMMANDS["STORE"][0])]
            )
        if code != 0:
            raise RuntimeError(f"the search of the store ended with {code}")
        return path.read_bytes()

    def _path(self, word: str) -> str:
        """The path that a word in capitals stands for; other words as they are."""
        beside = {
            "TRACES": "traces",
            "OUT": "out.jsonl",
            "PROFILED": "profiled.program",
            "LINKED": "linked.json",
            "FOLDER": "explored",
        }
        name = FORMATS[word].name if word in FORMATS else beside.get(word)
        return word if name is None else str(self.folder / name)

    def _mutated(self, form: Format) -> bytes:
        if isinstance(form.seed, str | bytes):
            return mutated_bytes(written(form.name, form.seed), self.random)
        content = written(form.name, mutated_data(form.seed, self.random))
        return mutated_bytes(content, self.random) if self.random.random() < 0.2 else content

    def tried(self, command: str, name: str, content: bytes) -> Broken | None:
        """Runs `command` on the file `name` of `content`; returns it if it broke something."""
        path = self.folder / name
        path.write_bytes(content)
        words = [str(path) if word == "FILE" else self._path(word) for word in shlex.split(command)]
        out, err = io.StringIO(), io.StringIO()
        forget_peak()
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
    return ("memory", f"{peak_bytes():,} bytes") if peak_bytes() > MOST_BYTES else None


def forget_peak() -> None:
    """Lets the peak memory of this process begin anew, where the system (Linux) can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The peak memory of this process, on Linux since `forget_peak`."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def corpus_entry(folder: Path, broken: Broken) -> None:
    """Keeps an input that broke something: its file, and beside it the command."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(broken.command.encode() + broken.content).hexdigest()[:12]
    (folder / f"{digest}-{broken.name}").write_bytes(broken.content)
    (folder / f"{digest}-{broken.name}.command").write_text(broken.command + "\n", encoding="utf-8")

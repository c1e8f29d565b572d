"""How many small mistakes in a package its own tests find.

Run `python benchmarks/mutants core/engine core/cost --number 30`. Each mutant is one small mistake in one place of the
package: `*` for `/`, `+` for `-`, a constant that is one too large, `<` for `<=`, `==` for `!=`, `and` for `or`, a lost
`not` or sign, or a statement that does nothing. A mutant is *killed* when a test of the package fails or the tests run
out of time, and *survives* when all pass. Some survivors behave as the original does, so not every one of them shows
that a test is missing.

The tests run once to record which statements each of them runs, in its own process and in those that it starts. A
mutant then meets only the tests that run its statement, the quickest first; one that stands where Python can't be
watched (compiled code, or what runs when a module is imported) meets all tests of the package. A number for `--seed`
picks other places; the same number picks the same ones.

A run copies the package when it begins and reads the tests as it goes, so leave the tests alone while it runs. What
numba compiles stays in build/mutants for the next run.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from places import Mutant, mutants_of
from plugins import Recorded
from workshop import Workshop, free_folder

ROOT = Path(__file__).parents[2]
PACKAGES = Path("src/forerun")


def main() -> None:
    arguments = parsed()
    lines = []
    with free_folder(ROOT / "build/mutants") as folder:
        workshop = Workshop(ROOT, folder)
        for name in arguments.packages:
            tests = [Path(one).absolute() for one in arguments.tests or [ROOT / "tests" / folder_of(name)]]
            lines.append(tried(workshop, name, tests, arguments.number, arguments.seed))
            print(lines[-1], flush=True)
    if len(lines) > 1:
        print("", *lines, sep="\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="+", help="folders or files under src/forerun, as core/engine")
    parser.add_argument("--number", type=int, default=20, help="mutants to try in each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (%(default)s)")
    parser.add_argument("--tests", action="append", help="folder or file of tests; that of the package unless given")
    arguments = parser.parse_args()
    for name in arguments.packages:
        if not (ROOT / PACKAGES / name).exists():
            parser.error(f"{PACKAGES / name} does not exist: name a folder or file under {PACKAGES}")
    return arguments


def folder_of(name: str) -> Path:
    """The folder under `tests` that belongs to a folder or file of the package: its own, or the nearest around it."""
    return next(one for one in (Path(name), *Path(name).parents) if (ROOT / "tests" / one).is_dir())


def tried(workshop: Workshop, name: str, tests: list[Path], number: int, seed: int) -> str:
    """Tries `number` mutants of a package and says how many of them the tests kill."""
    whole = ROOT / PACKAGES / name
    files = sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
    mutants = [mutant for path in files for mutant in mutants_of(ROOT, path.relative_to(ROOT))]
    picked = random.Random(seed).sample(mutants, min(number, len(mutants)))
    begin = time.monotonic()
    recorded = workshop.record(tests, PACKAGES / name)
    print(f"{name}: {len(recorded)} tests recorded in {time.monotonic() - begin:.0f} s", flush=True)
    killed = sum(is_killed(workshop, one, recorded) for one in sorted(picked, key=lambda one: (one.path, one.start)))
    share = killed / max(1, len(picked))
    return f"{name}, seed {seed}: {killed} of {len(picked)} killed ({share:.0%}); {len(mutants)} places in all"


def is_killed(workshop: Workshop, mutant: Mutant, recorded: list[Recorded]) -> bool:
    begin = time.monotonic()
    tests = tests_for(mutant, str(workshop.folder / mutant.path), recorded)
    killer = workshop.killer(mutant, tests) if tests else ""
    reason = killer or (f"{len(tests)} tests pass" if tests else "no test runs it")
    word = "killed  " if killer else "SURVIVED"
    print(f"{word} {mutant}  ({reason}, {time.monotonic() - begin:.1f} s)", flush=True)
    return bool(killer)


def tests_for(mutant: Mutant, file: str, recorded: list[Recorded]) -> list[Recorded]:
    """The tests that may tell `mutant` in `file` from the original, in the order in which to run them."""
    line = (file, mutant.place.line)

    def order(test: Recorded) -> tuple[bool, bool, float]:
        return line not in test.lines, all(name != file for name, _ in test.lines), test.seconds + test.fixtures_s

    may = [test for test in recorded if not mutant.place.watched or line in test.lines]
    return sorted(may, key=order)


if __name__ == "__main__":
    main()

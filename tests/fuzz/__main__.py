"""Runs commands on mutated inputs: python tests/fuzz NUMBER [--seed SEED]. Prints what broke, and keeps it."""

import argparse
import sys
import tempfile
from pathlib import Path

from run import Fuzzer, corpus_entry

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("number", type=int)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--only", default="", help="a format, such as PLAN")
parser.add_argument("--keep", type=Path, default=None, help="the folder for inputs that break something")
options = parser.parse_args()
with tempfile.TemporaryDirectory(prefix="forerun-fuzz-") as folder:
    fuzzer = Fuzzer(Path(folder), options.seed, options.only)
    kinds: dict[str, int] = {}
    for number in range(options.number):
        found = fuzzer.one()
        if found is not None:
            kinds[found.kind] = kinds.get(found.kind, 0) + 1
            if kinds[found.kind] == 1:
                print(f"{number}: {found.command}: {found.what}", flush=True)
                if options.keep is not None:
                    corpus_entry(options.keep, found)
        if number % 5000 == 4999:
            print(f"{number + 1} inputs, {sum(kinds.values())} broke something of {len(kinds)} kinds", flush=True)
print(f"{options.number} inputs: {fuzzer.outcomes}; {sum(kinds.values())} broke something of {len(kinds)} kinds")
sys.exit(1 if kinds else 0)

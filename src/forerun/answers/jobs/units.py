"""What runs in a round, a job alone or two jobs on the same GPUs, and how far each is behind its share of time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.answers.jobs.interior_point import Vector
from forerun.core.program.types import I64

ROUND_S = 360.0
_DIGITS = 6
"""of a share behind the point, to which solutions of the policies' linear programs are right: equal jobs tie"""
_LEAST = 1e-30
_FIRST = 1e9
"""priority by share of a unit on a kind of GPU that no job has used"""


Unit = tuple[int, ...]
"""the number of a job, or of two jobs on the same GPUs, the smaller one first"""


class Units:
    """Jobs alone, and pairs that have a share, with the seconds that each got on each kind of GPU.

    Arrays are of [unit, kind], in the order in which Gavel holds units: a job, then its pairs with the jobs before it.
    Shares hold until the next `share`; a job that came since then has none. As in Gavel, a unit counts as if it had
    run for half a round when shares were given, and a new pair as if it was as far behind.
    """

    def __init__(self, kinds: int) -> None:
        self.jobs: dict[int, None] = {}
        self.units: list[Unit] = []
        self.shares, self.behind_s, self.received_s = (np.zeros((0, kinds)) for _ in range(3))
        self.given_s: Vector = np.zeros(kinds)
        self._new: set[int] = set()
        """jobs that came since shares were given"""
        self._row: dict[Unit, int] = {}
        self._of: dict[int, list[int]] = {}
        """the rows of each job's units"""
        self._gone: set[int] = set()
        """jobs that ended since shares were given, whose rows are still there"""
        self._behind: dict[Unit, Vector] = {}
        """`behind_s` of all units that have or had a share"""

    def add(self, job: int) -> None:
        """Adds a job, which has no share yet."""
        self.jobs[job] = None
        self._new.add(job)

    def remove(self, job: int) -> None:
        """Removes a job and the pairs that it is in."""
        del self.jobs[job]
        self._new.discard(job)
        self._gone.add(job)
        self.shares[self._of.get(job, [])] = 0.0

    def ran(self, unit: Unit, kind: int, seconds: float) -> None:
        """Counts the time of a unit on a kind of GPU."""
        self.given_s[kind] += seconds
        if unit in self._row:
            self.received_s[self._row[unit], kind] += seconds

    def share(self, shares: Vector, pairs: I64) -> None:
        """Gives shares of [unit, kind] to all jobs, in the order in which they came, and to pairs of them.

        Args:
            pairs: of [pair, member], the places of the two jobs in that order.
        """
        jobs = list(self.jobs)
        units: list[Unit] = [(job,) for job in jobs]
        units += [(jobs[one], jobs[other]) for one, other in pairs.tolist()]
        used = np.flatnonzero(shares.sum(axis=1) > 0.0).tolist()
        rows = [*range(len(jobs)), *(row for row in used if row >= len(jobs))]
        rows.sort(key=lambda row: _age(units[row]))
        self.units, self.shares = [units[row] for row in rows], shares[rows]
        self.received_s = np.full(self.shares.shape, ROUND_S / 2.0)
        self.given_s[:] = len(rows) * ROUND_S / 2.0
        self._behind = {unit: behind for unit, behind in self._behind.items() if self._gone.isdisjoint(unit)}
        self._new.clear()
        self._gone.clear()
        self._row, self._of = {}, {}
        self.behind_s = np.zeros_like(self.shares)
        for row, unit in enumerate(self.units):
            self._row[unit] = row
            for job in unit:
                self._of.setdefault(job, []).append(row)
            if unit not in self._behind:
                first_s = 0.0 if len(unit) == 1 else ROUND_S / 2.0
                self._behind[unit] = np.full(len(self.given_s), first_s)
            self.behind_s[row] = self._behind[unit]

    def settle(self, passed_s: float) -> None:
        """Notes how far each unit is behind its share of the time since shares were given."""
        self.behind_s += self.shares * passed_s - (self.received_s - ROUND_S / 2.0)
        self._behind.update(zip(self.units, self.behind_s, strict=True))

    def in_order(self, kind: int) -> list[Unit]:
        """Returns the units that have a share of a kind, in the order in which they run."""
        share, received_s = self.shares[:, kind], self.received_s[:, kind]
        part = received_s / self.given_s[kind] if self.given_s[kind] else np.zeros(len(share))
        priority = np.divide(share, part, out=share * _FIRST, where=part > 0.0)
        order = np.lexsort((-share, -self.behind_s[:, kind], -priority))
        return [self.units[row] for row in order[priority[order] > 0.0].tolist()]

    def idle(self, kind: int, units: Sequence[Unit]) -> list[Unit]:
        """Returns units that have no share of a kind, in the order in which they may run on GPUs that are left."""
        return sorted(units, key=lambda unit: (-self._behind_on(unit, kind), _age(unit)))

    def _behind_on(self, unit: Unit, kind: int) -> float:
        if unit in self._behind:
            return float(self._behind[unit][kind])
        return ROUND_S / 2.0 if len(unit) > 1 and self.has_share(unit) else 0.0

    def has_share(self, unit: Unit) -> bool:
        """Returns whether all jobs of a unit were there when shares were given."""
        return self._new.isdisjoint(unit)


def _age(unit: Unit) -> tuple[int, int, int]:
    return max(unit), len(unit), min(unit)


def rounded(shares: Vector) -> Vector:
    """Returns shares to so many digits that equal jobs tie.

    A share that is 0 ends the nearer to 0 the more the policy would lose by it. Such shares keep two digits, so that
    GPUs that are left over go to the jobs for which the policy would give them next.
    """
    unit = 10.0 ** np.floor(np.log10(np.maximum(shares, _LEAST)) - 1.0)
    least = 0.5 * 10.0**-_DIGITS
    return np.asarray(np.where(shares >= least, shares.round(_DIGITS), np.round(shares / unit) * unit), np.float64)

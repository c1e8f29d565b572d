"""node_events: the starts and ends of everything that runs in one iteration, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forerun.answers.experiment.conditions import Conditions
from forerun.answers.experiment.handlers import NodeEvent
from forerun.answers.experiment.pace import Pace
from forerun.common.units import PS_PER_S
from forerun.core.program.types import Stream


def node_events(pace: Pace, conditions: Conditions, iteration: int, begins_ps: int) -> Iterator[NodeEvent]:
    """Two events for each node of every rank class, the iteration starting `begins_ps` after the run.

    At one time nodes end first, then others start, in the order of rank classes and of issue; one that takes no time
    ends right after it starts.
    """
    flat, program = pace.stepper.simulation.flat, pace.stepper.simulation.program
    timeline = pace.stepper.timeline(pace.class_factors(conditions), conditions.network, conditions.host)
    start, end = timeline.start_ps, timeline.end_ps
    n = len(flat)
    time = np.concatenate((start, end))
    is_end = np.arange(2 * n) >= n
    late = np.concatenate((np.ones(n, bool), end == start))
    owner = np.repeat(np.arange(len(program.rank_classes)), np.diff(flat.class_ptr))
    for event in np.lexsort((is_end, np.tile(np.arange(n), 2), late, time)).tolist():
        node = event % n
        yield NodeEvent(
            time_s=(begins_ps + int(time[event])) / PS_PER_S,
            starts=event < n,
            iteration=iteration,
            rank_class=program.rank_classes[owner[node]].name,
            name=program.ops.name[flat.op[node]],
            stream=Stream(flat.stream[node]).name.lower(),
        )

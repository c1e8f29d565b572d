"""Says in one line why ranks wait for each other for ever: who waits for whom, from one rank to the next."""

from __future__ import annotations

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.lower import LoweredProgram
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.messages.slots import COLLECTIVE, IN_CLOSED_FORM, RECV, SEND, Result

_LINKS = 4
_LISTED = 4


def deadlock_text(program: LoweredProgram, tables: CollectiveTables, result: Result) -> str:
    """Names the first rank that waits and whom it waits for, what these wait for, and so on, and counts the others."""
    waiting = np.flatnonzero((result.start_ns >= 0) & (result.end_ns < 0)).tolist()
    never = int((result.start_ns < 0).sum())
    if not waiting:
        return f"deadlock: {never} nodes never run; the nodes before them end at once, so no rank looks for them"
    chain = _Chain(program, tables, result)
    texts = chain.of(waiting[0]) if program.traces else [f"rank {waiting[0]} waits for messages that are never sent"]
    more = len(waiting) - len(chain.seen | {waiting[0]})
    return f"deadlock: {'; '.join(texts)}{f'; {more} more nodes wait' if more else ''}; {never} nodes never start"


class _Chain:
    """Follows waiting ranks."""

    def __init__(self, program: LoweredProgram, tables: CollectiveTables, result: Result) -> None:
        self._program, self._tables, self._result = program, tables, result
        self._n_ranks = len(program.nodes.first) - 1
        self.seen = set[int]()

    def of(self, node: int) -> list[str]:
        """Returns what a node waits for, then what the rank waits for that it waits for, and so on."""
        texts = []
        for _ in range(_LINKS):
            self.seen.add(node)
            text, rank = self._node(node)
            texts.append(text)
            if rank < 0:
                break
            if rank >= self._n_ranks:
                texts.append(f"the network has no rank {rank}")
                break
            following = self._waits(rank)
            if following < 0:
                is_done = self._result.finish_ns[rank] >= 0
                texts.append(f"rank {rank} {'has ended' if is_done else 'runs nothing'}")
                break
            if following in self.seen:
                texts.append(f"rank {rank} waits as said")
                break
            node = following
        return texts

    def _node(self, node: int) -> tuple[str, int]:
        """Returns what a node waits for, and the first rank that it waits for, -1 for none."""
        nodes = self._program.nodes
        actor = self._actor(node)
        lowered = self._program.traces[actor]
        row = lowered.row[node - nodes.first[actor]]
        place = f"rank {actor} node {lowered.trace.node_id[row]}"
        if nodes.action[node] in (SEND, RECV):
            verb = "send" if nodes.action[node] == SEND else "receive"
            match = self._program.match_text[nodes.target[node]]
            return f"{place}: {verb}, {match}, is not matched", int(lowered.trace.peer[row])
        absent, unlike = self._missing(actor, node)
        text = f"{place}: {self._collective(node)} "
        if absent:
            listed = ", ".join(map(str, absent[:_LISTED]))
            more = f" and {len(absent) - _LISTED} more" if len(absent) > _LISTED else ""
            return f"{text}waits for rank{'s' if len(absent) > 1 else ''} {listed}{more}", absent[0]
        if not unlike:
            return f"{text}waits for messages that are never sent", -1
        other = unlike[0]
        rank = self._actor(other)
        lowered = self._program.traces[rank]
        node_id = lowered.trace.node_id[lowered.row[other - nodes.first[rank]]]
        meets = f"meets node {node_id} of rank {rank}, {self._collective(other)}"
        return f"{text}{meets}: members of a group start their collectives in unlike orders", -1

    def _missing(self, actor: int, node: int) -> tuple[list[int], list[int]]:
        """Returns the members that have not begun the collective of a node, and what others began in its place."""
        call = int(self._program.nodes.target[node])
        communicator = self._tables.communicator_of(call)
        turn = len(self._begun(actor, communicator))
        absent, unlike = [], []
        for rank in self._tables.members_of(call):
            begun = self._begun(rank, communicator)
            if len(begun) < turn:
                absent.append(rank)
            elif self._program.nodes.target[begun[turn - 1]] != call:
                unlike.append(begun[turn - 1])
        return absent, unlike

    def _begun(self, rank: int, communicator: int) -> list[int]:
        """Returns the collectives that a rank has begun in a communicator, in their order."""
        if rank >= self._n_ranks:
            return []
        nodes, start_ns = self._program.nodes, self._result.start_ns
        of_rank = np.arange(nodes.first[rank], nodes.first[rank + 1])
        is_begun = np.isin(nodes.action[of_rank], (COLLECTIVE, IN_CLOSED_FORM)) & (start_ns[of_rank] >= 0)
        begun = of_rank[is_begun]
        begun = begun[np.argsort(start_ns[begun], kind="stable")]
        return [one for one in begun.tolist() if self._tables.communicator_of(int(nodes.target[one])) == communicator]

    def _collective(self, node: int) -> str:
        actor = self._actor(node)
        lowered = self._program.traces[actor]
        row = lowered.row[node - self._program.nodes.first[actor]]
        group = lowered.trace.group[row]
        name = f"group {lowered.trace.group_names[group]}" if group >= 0 else "all ranks"
        kind = CommType(int(lowered.trace.comm_type[row])).name.lower()
        return f"{kind} of {lowered.trace.comm_size[row]} bytes in {name}"

    def _actor(self, node: int) -> int:
        return int(np.searchsorted(self._program.nodes.first, node, side="right")) - 1

    def _waits(self, rank: int) -> int:
        """Returns the first node that a rank has started and never ends, -1 for none."""
        first, last = self._program.nodes.first[rank], self._program.nodes.first[rank + 1]
        waits = (self._result.start_ns[first:last] >= 0) & (self._result.end_ns[first:last] < 0)
        return int(first + waits.argmax()) if waits.any() else -1

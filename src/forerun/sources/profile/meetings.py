"""Matches the collectives of several profiled ranks, and finds the time of the transfer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.program.types import Channel, Collective
from forerun.sources.profile.collectives import Call
from forerun.sources.profile.step import Step

Key = tuple[object, ...]


@dataclass(frozen=True)
class Meetings:
    """The channels of a set of ranks."""

    channels: tuple[Channel, ...]
    channel: tuple[dict[int, int], ...]
    """for each rank the channel of each collective that meets, by its place"""
    transfer_ns: tuple[dict[int, int], ...]
    """for each rank the time of each such collective without waiting: the shortest of all ranks, because the last one
    to arrive does not wait"""
    notes: tuple[str, ...]


def meetings_of(steps: Sequence[Step], calls: Sequence[dict[int, Call]]) -> Meetings:
    """Joins the k-th collective of a group on each rank with the k-th on the others, where all do equally many."""
    channel: list[dict[int, int]] = [{} for _ in steps]
    transfer: list[dict[int, int]] = [{} for _ in steps]
    channels: list[Channel] = []
    notes = []
    for key, places in _by_group(steps, calls).items():
        members = tuple(rank for rank, mine in enumerate(places) if mine)
        if len(members) < 2:
            continue
        kinds = {tuple(calls[rank][place].kind for place in places[rank]) for rank in members}
        if len(kinds) > 1:
            counts = ", ".join(f"rank {steps[rank].profile.rank}: {len(places[rank])}" for rank in members)
            kind = "transfers" if key[2] else "collectives"
            notes.append(f"{kind} of group {key[0]} differ between ranks ({counts}), so they don't wait there")
            continue
        for together in zip(*(places[rank] for rank in members), strict=True):
            lasting = [
                int(steps[rank].finish_ns[place] - steps[rank].start_ns[place])
                for rank, place in zip(members, together, strict=True)
            ]
            for rank, place in zip(members, together, strict=True):
                channel[rank][place] = len(channels)
                transfer[rank][place] = min(lasting)
        channels.append(Channel(f"group {key[0]}", members))
    return Meetings(tuple(channels), tuple(channel), tuple(transfer), tuple(notes))


def _by_group(steps: Sequence[Step], calls: Sequence[dict[int, Call]]) -> dict[Key, list[list[int]]]:
    """Returns the places of the collectives of each group on each rank; a stream is a group where no file says more.

    Sends and receives are apart, as the ranks of a group do different numbers of them.
    """
    found: dict[Key, list[list[int]]] = {}
    for rank, (step, mine) in enumerate(zip(steps, calls, strict=True)):
        for place, call in mine.items():
            group = call.ranks or call.group_name or f"of stream {step.stream[place]}"
            key: Key = (group, call.group_size, call.kind == Collective.SEND_RECV)
            found.setdefault(key, [[] for _ in steps])[rank].append(place)
    return found

"""The parts of the slot policy against plain models: calendar, mailbox, ready nodes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forerun.astrasim.messages import calendar as calendars
from forerun.astrasim.messages import ready as readies
from forerun.astrasim.messages.mailbox import arrive, new_mailbox, post


class Buckets:
    """An unordered set of C++'s standard library: a list in which a new element goes before the first of its bucket."""

    def __init__(self):
        self.order, self.level = [], -1

    def insert(self, key):
        if self.level < 0 or len(self.order) + 1 > readies.BUCKETS[self.level]:
            self.level += 1
            old, self.order = self.order, []
            for element in old:
                self._link(element)
        self._link(key)

    def _link(self, key):
        n = int(readies.BUCKETS[self.level])
        same = [i for i, other in enumerate(self.order) if other % n == key % n]
        self.order.insert(same[0] if same else 0, key)


@given(keys=st.lists(st.integers(0, 400), unique=True, max_size=80), data=st.data())
def test_the_hashed_set_iterates_as_a_list_of_buckets(keys, data):
    table = np.array(keys, np.int64)
    ready = readies.new_ready(np.array([0, len(keys)], np.int64), np.zeros(len(keys), np.int8), table)
    model, out = Buckets(), np.zeros(len(keys), np.int64)
    for node, key in enumerate(keys):
        readies.add(ready, 0, node)
        model.insert(key)
        if len(model.order) > 1 and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(model.order))
            model.order.remove(gone)
            readies.erase(ready, 0, keys.index(gone))
        n = readies.snapshot(ready, 0, out)
        assert table[out[:n]].tolist() == model.order
    assert readies.any_ready(ready, 0) == bool(model.order)


def in_buckets(keys):
    model = Buckets()
    for key in keys:
        model.insert(key)
    return model.order


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=1, max_size=150))
def test_an_order_of_a_set_is_that_of_inserting_one_by_one(keys):
    assert [keys[i] for i in readies.set_order(np.array(keys, np.int64))] == in_buckets(keys)


@given(st.lists(st.lists(st.integers(0, 19), unique=True, max_size=19), min_size=1, max_size=20), st.randoms())
def test_children_and_roots_come_in_the_order_of_sets(lists, random):
    """Node i has the parents of lists[i]: data dependencies first, then the others, of which some are there twice."""
    n = len(lists)
    keys = random.sample(range(1000), n)
    rank = sorted(range(n), key=keys.__getitem__)
    position = np.argsort(rank).astype(np.int64)
    parents = [[p for p in row if p < n and p != i] for i, row in enumerate(lists)]
    halves = [random.randint(0, len(row)) for row in parents]
    data = [row[:half] for row, half in zip(parents, halves, strict=True)]
    ctrl = [row[half:] + row[:1] for row, half in zip(parents, halves, strict=True)]

    def pointers(rows):
        return np.cumsum([0, *map(len, rows)]).astype(np.int64), np.array([x for row in rows for x in row], np.int32)

    by_id = np.array(sorted(keys), np.int64)
    roots = readies.hashed_roots(by_id, np.array(rank, np.int64), position, *pointers(data), *pointers(ctrl))
    seen = list(
        dict.fromkeys(key for i, row in enumerate(parents) for key in (keys[i], *in_buckets([keys[p] for p in row])))
    )
    assert [int(by_id[i]) for i in roots] == [key for key in in_buckets(seen) if not parents[keys.index(key)]]
    sets = [[int(position[p]) for p in row] for row in parents]
    children = readies.hashed_children(by_id, *pointers(sets))
    expected = [in_buckets([int(by_id[k]) for k in row]) for row in sets]
    assert by_id[children].tolist() == [key for row in expected for key in row]


wide = st.integers(-(10**9), 10**9)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=80),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 10**9), wide, st.integers(1, 3)),
        min_size=7,
        max_size=7,
        unique=True,
    ),
)
def test_a_mailbox_that_is_nearly_full_finds_every_key(steps, keys):
    """Seven keys in sixteen places; what is taken out lets others move up."""
    mailbox, clock, waiting = new_mailbox(1), np.zeros(6, np.int64), {}
    for is_message, number in steps:
        by = 1 if is_message else -1
        met = (arrive if is_message else post)(mailbox, clock, *keys[number])
        assert met == (waiting.get(number, 0) * by < 0)
        waiting[number] = waiting.get(number, 0) + by
    assert mailbox.used[0] == sum(count != 0 for count in waiting.values())
    assert len(mailbox.waiting) == 16
    assert clock[calendars.OVERFLOW] == 0


def test_a_mailbox_that_is_half_full_says_so():
    mailbox, clock = new_mailbox(16), np.zeros(6, np.int64)
    for stream in range(9):
        assert clock[calendars.OVERFLOW] == (stream > 8)
        arrive(mailbox, clock, 0, stream, 0, 1)
    assert clock[calendars.OVERFLOW] == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_each_slot_gives_its_lowest_ready_node(steps):
    slot = np.array([s for s, _ in steps], np.int8)
    ready = readies.new_ready(np.array([0, len(steps)], np.int64), slot, np.zeros(0, np.int64))
    waiting = [[], [], [], []]
    for node in np.random.default_rng(len(steps)).permutation(len(steps)).tolist():
        readies.add(ready, 0, node)
        waiting[slot[node]].append(node)
        for s in range(4):
            assert readies.lowest(ready, 0, s) == min(waiting[s], default=-1)
        if steps[node][1]:
            readies.pop(ready, 0, int(slot[node]))
            waiting[slot[node]].remove(min(waiting[slot[node]]))


@given(st.lists(st.tuples(st.booleans(), *[st.integers(0, most) for most in (1, 2, 2, 1)]), max_size=200))
def test_messages_meet_receives_of_their_key_in_order(steps):
    mailbox, clock, waiting = new_mailbox(128), np.zeros(6, np.int64), {}
    for is_message, *of_message in steps:
        key, by = tuple(of_message), 1 if is_message else -1
        met = (arrive if is_message else post)(mailbox, clock, *key)
        assert met == (waiting.get(key, 0) * by < 0)
        waiting[key] = waiting.get(key, 0) + by
        assert mailbox.used[0] == sum(count != 0 for count in waiting.values())
    assert clock[calendars.OVERFLOW] == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=100))
def test_events_come_by_time_and_then_by_the_order_of_scheduling(events):
    calendar = calendars.new_calendar(1, 128)
    for number, (time, kind) in enumerate(events):
        calendars.schedule(calendar, time, kind + 1, number)
    expected = sorted(range(len(events)), key=lambda number: (events[number][0], number))
    for number in expected:
        assert calendars.next_event(calendar) == (events[number][1] + 1, number)
        assert calendar.clock[calendars.NOW] == events[number][0]
    assert calendars.next_event(calendar) == (-1, -1)


def test_callbacks_of_a_tick_run_at_the_place_of_the_first():
    calendar = calendars.new_calendar(2, 16)
    calendars.register(calendar, 0, 5, 7, 100, 0)
    calendars.schedule(calendar, 5, 9, 1)
    calendars.register(calendar, 1, 5, 7, 200, 0)
    calendars.register(calendar, 0, 5, 8, 101, 0)
    kind, wake = calendars.next_event(calendar)
    assert kind == calendars.WAKE
    first = calendars.take_callback(calendar, wake)
    calendars.register(calendar, 0, 0, 6, 102, 0)  # joins the wake that runs
    rest = [calendars.take_callback(calendar, wake) for _ in range(3)]
    assert [subject for _, subject, _, _ in (first, *rest)] == [100, 101, 102, -1]
    assert calendars.next_event(calendar) == (9, 1)
    kind, wake = calendars.next_event(calendar)
    assert calendars.take_callback(calendar, wake)[1] == 200


def test_a_full_calendar_says_so():
    calendar = calendars.new_calendar(1, 2)
    for number in range(3):
        calendars.schedule(calendar, number, 1, number)
    assert calendar.clock[calendars.OVERFLOW] == 1

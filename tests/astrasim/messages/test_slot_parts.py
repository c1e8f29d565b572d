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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)), max_size=200))
def test_messages_meet_receives_of_their_key_in_order(steps):
    mailbox, clock, waiting = new_mailbox(64), np.zeros(6, np.int64), {}
    for is_message, communicator, stream, lane in steps:
        key, by = (communicator, stream, lane), 1 if is_message else -1
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

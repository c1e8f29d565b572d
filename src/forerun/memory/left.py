"""Which tensors a block frees that earlier blocks left.

A block names what it takes over by bytes and category alone. It is the newest tensor of that size of its own layer and
micro batch, or else of any; or else tensors that were left one after the other and have the size together, the newest
such; or else the oldest ones, of which the last may go in part: it is two tensors from the start then.
"""

from __future__ import annotations

Tag = tuple[int, int]
"""(micro batch, layer)"""


class Left:
    """What is left, and what has gone of it. A piece of a tensor is a tensor of a number below 0."""

    def __init__(self) -> None:
        self.died: dict[int, int] = {}
        """row at which each tensor was freed"""
        self.size: dict[int, int] = {}
        """bytes of each tensor that was ever left; less than at first where a piece was cut off"""
        self.source: list[int] = []
        """the tensor that piece -1 - i was cut off from"""
        self._of_size: dict[tuple[int, int], list[int]] = {}
        self._own: dict[tuple[int, int, Tag], list[int]] = {}
        self._in_order: dict[int, list[int]] = {}
        """of each category, the oldest first; with tensors that have gone"""
        self._tag: dict[int, Tag] = {}

    def add(self, tensor: int, size: int, category: int, tag: Tag) -> None:
        """A block of `tag` leaves `tensor`."""
        self._enter(tensor, size, category, tag)
        self._in_order.setdefault(category, []).append(tensor)

    def free(self, size: int, category: int, tag: Tag, row: int) -> None:
        """A block of `tag` frees so many bytes at `row`, as far as they are there."""
        for stack in (self._own.get((category, size, tag)), self._of_size.get((category, size))):
            while stack:
                tensor = stack.pop()
                if tensor not in self.died and self.size[tensor] == size:
                    self.died[tensor] = row
                    return
        live = self._live(category)
        for tensor in _run(live, self.size, size):
            self.died[tensor] = row
            size -= self.size[tensor]
        for tensor in live:
            if size <= 0:
                break
            if tensor in self.died:
                continue
            if self.size[tensor] > size:
                self._cut(tensor, size, category)
            self.died[tensor] = row
            size -= self.size[tensor]

    def free_all(self, row: int) -> None:
        """Everything that is left goes at `row`."""
        for tensor in self.size:
            self.died.setdefault(tensor, row)

    def _enter(self, tensor: int, size: int, category: int, tag: Tag) -> None:
        self.size[tensor], self._tag[tensor] = size, tag
        self._of_size.setdefault((category, size), []).append(tensor)
        self._own.setdefault((category, size, tag), []).append(tensor)

    def _live(self, category: int) -> list[int]:
        live = [tensor for tensor in self._in_order.get(category, ()) if tensor not in self.died]
        self._in_order[category] = live
        return live

    def _cut(self, tensor: int, size: int, category: int) -> None:
        """Keep `size` bytes of a tensor as itself, and the rest as a piece in its place."""
        self.source.append(tensor)
        piece = -len(self.source)
        self._enter(piece, self.size[tensor] - size, category, self._tag[tensor])
        self.size[tensor] = size
        order = self._in_order[category]
        order.insert(order.index(tensor) + 1, piece)


def _run(live: list[int], sizes: dict[int, int], wanted: int) -> list[int]:
    """The newest tensors next to each other that have `wanted` bytes together; none where there are no such."""
    first, total = len(live), 0
    for end in range(len(live), 0, -1):
        while total < wanted and first > 0:
            first -= 1
            total += sizes[live[first]]
        if total == wanted:
            return live[first:end]
        total -= sizes[live[end - 1]]
    return []

"""llama.cpp's ngram-cache by the letter: a linked-list hash table, counting one by one, scans over whole parts."""

from __future__ import annotations

from collections.abc import Sequence

from specdec import LookupCache

SIZES = (13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273)
LAX = ((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = ((4, 3, 2, 2), (75, 66, 66, 66))


class Node:
    def __init__(self, key: int | None, value: int = 0):
        self.key, self.value, self.next = key, value, None


class Table:
    """GNU libstdc++'s unordered_map<int, int>: one linked list; a bucket points to the node before its first node."""

    def __init__(self) -> None:
        self.size, self.count, self.head = 1, 0, Node(None)
        self.before: dict[int, Node] = {}

    def nodes(self) -> list[Node]:
        found, node = [], self.head.next
        while node is not None:
            found.append(node)
            node = node.next
        return found

    def items(self) -> list[tuple[int, int]]:
        return [(node.key, node.value) for node in self.nodes()]

    def add(self, key: int, value: int) -> None:
        for node in self.nodes():
            if node.key == key:
                node.value += value
                return
        if self.count + 1 > (self.size if self.size > 1 else 0):
            self._grow()
        self._link(Node(key, value))
        self.count += 1

    def _grow(self) -> None:
        old = self.nodes()
        self.size = next(size for size in SIZES if size > self.size)
        self.before, self.head.next = {}, None
        for node in old:
            self._link(node)

    def _link(self, node: Node) -> None:
        bucket = node.key % self.size
        if bucket in self.before:
            node.next, self.before[bucket].next = self.before[bucket].next, node
            return
        node.next, self.head.next = self.head.next, node
        self.before[bucket] = self.head
        if node.next is not None:
            self.before[node.next.key % self.size] = node

    def copy(self) -> Table:
        """The same order and the same buckets."""
        made = Table()
        made.size, made.count = self.size, self.count
        last = made.head
        for node in self.nodes():
            last.next = Node(node.key, node.value)
            made.before.setdefault(node.key % made.size, last)
            last = last.next
        return made


Cache = dict[tuple[int, ...], Table]


def update(cache: Cache, ids: Sequence[int], n_new: int) -> None:
    for size in range(1, 5):
        for i in range(max(len(ids) - n_new, size), len(ids)):
            cache.setdefault(tuple(ids[i - size : i]), Table()).add(ids[i], 1)


def merge(cache: Cache, other: Cache) -> None:
    for key, part in other.items():
        if key not in cache:
            cache[key] = part.copy()
        else:
            for token, count in part.items():
                cache[key].add(token, count)


def draft(ids: Sequence[int], n_draft: int, context: Cache, dynamic: Cache, static: Cache) -> list[int]:
    text = list(ids)
    if len(text) < 2:
        return []
    while len(text) < len(ids) + n_draft:
        known = static.get(tuple(text[-2:]))
        weights = dict(known.items()) if known is not None else {}
        token = _attempt(context, text, weights, LAX)
        if token is None:
            token = _attempt(dynamic, text, weights, STRICT)
        if token is None and known is not None:
            token = _static_only(known)
        if token is None:
            break
        text.append(token)
    return text[len(ids) :]


def _attempt(cache: Cache, text: list[int], weights: dict[int, int], limits: tuple[tuple[int, ...], ...]) -> int | None:
    for size in (4, 3, 2, 1):
        part = cache.get(tuple(text[-size:])) if size <= len(text) else None
        if part is None:
            continue
        best, best_count, best_weight, total = -1, 0, 0, 0
        for token, count in part.items():
            weight = 100 * weights[token] if token in weights else 1
            total += count
            if count * weight > best_count * best_weight:
                best, best_count, best_weight = token, count, weight
        if total >= limits[0][size - 1] and 100 * best_count >= limits[1][size - 1] * total:
            return best
    return None


def _static_only(part: Table) -> int | None:
    best, most, total = -1, 0, 0
    for token, count in part.items():
        total += count
        if count > most:
            best, most = token, count
    return best if total >= 2 and 100 * most >= 50 * total else None


class Drafter:
    """The strategy's state for one row: text is counted in the pieces that arrive, and never forgotten."""

    def __init__(self, n_draft: int, dynamic: Cache, static: Cache):
        self.n_draft, self.dynamic, self.static = n_draft, dynamic, static
        self.context: Cache = {}
        self.size = 0

    def draft(self, tokens: Sequence[int], last: int) -> list[int]:
        if self.size < len(tokens) + 1:
            new = [*tokens[self.size :], last]
            update(self.context, new, len(new))
            self.size = len(tokens) + 1
        return draft([*tokens, last], self.n_draft, self.context, self.dynamic, self.static)


def filled(text: list[int]) -> tuple[LookupCache, Cache]:
    """The same counts here and in the"""
    mine, theirs = LookupCache(), {}
    mine.update(text)
    update(theirs, text, len(text))
    return mine, theirs


def contents(cache: LookupCache | Cache) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Parts in the order in which the original walks them, n-grams in order of insertion."""
    if isinstance(cache, LookupCache):
        return {key: cache.successors(key) for key in cache.parts}
    return {key: part.items() for key, part in cache.items()}

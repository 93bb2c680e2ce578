"""A pattern's tree -> the smallest automaton of the strings in which the pattern is found.

The usual construction: a state is the set of positions in the pattern that the characters so far may have led to. A
position also carries the look-aheads that were passed on the way and are still undecided, each as a state of its own
automaton. It leads to a match only if all of them come to accept, so negation is an automaton whose states accept the
opposite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from service.api.chat.patterns.characters import ANY, Characters, classes, holds
from service.api.chat.patterns.syntax import Chars, Choice, Edge, Look, Node, PatternError, Repeat, Sequence

MAX_STATES = 256
MAX_POSITIONS = 4096
MAX_STEPS = 20_000
"""Elementary steps of all that is done with one pattern, of some microseconds each."""

_MATCHED = 0
"""The place behind the pattern: whatever follows, it was found."""
_ENDED = -1
"""In a thread: no character may follow."""

Thread = frozenset["int | tuple[int, int]"]
"""At most one position, _ENDED, and (automaton, state) of each look-ahead. An empty one is a match."""


@dataclass
class Steps:
    """Steps that are left. PatternError when they are used up."""

    left: int = MAX_STEPS

    def spend(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise PatternError("too complex: its look-ahead takes more steps than allowed")


@dataclass(frozen=True)
class Automaton:
    """Deterministic and complete. classes: sets of characters that are not told apart. following: by state, the next
    state for each class. starts: by whether the string begins here."""

    classes: list[Characters]
    following: list[list[int]]
    accepts: list[bool]
    starts: tuple[int, int]

    @cached_property
    def decided(self) -> list[bool]:
        """By state: whether no character changes any more what it says."""
        return [set(ways) == {state} for state, ways in enumerate(self.following)]


def automaton(tree: Node, steps: Steps) -> Automaton:
    """The automaton of a pattern, which may be found anywhere in a string. PatternError for one that takes too much."""
    sets = [ANY, *_sets(tree)]
    steps.spend(len(sets) * sum(map(len, sets)))
    places = _Places(classes(sets), steps)
    entry = places.tree(tree, _MATCHED)
    anywhere = places.new()
    places.choices[anywhere] = (entry, places.chars(ANY, anywhere))
    return places.deterministic(anywhere)


def _sets(tree: Node) -> Iterator[Characters]:
    match tree:
        case Chars(of):
            yield of
        case Sequence(inner) | Choice(inner):
            for part in inner:
                yield from _sets(part)
        case Repeat(item) | Look(item):
            yield from _sets(item)


@dataclass
class _Places:
    """The places of a pattern; each is one of: a set of characters, several ways to go on, an edge, a look-ahead."""

    classes: list[Characters]
    steps: Steps
    count: int = 1
    positions: dict[int, tuple[frozenset[int], int]] = field(default_factory=dict)
    """(classes, the place behind it)"""
    choices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    edges: dict[int, tuple[bool, int]] = field(default_factory=dict)
    looks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(index of the automaton, the place behind it)"""
    automata: list[Automaton] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    """By the id of a look-ahead, which may be repeated: the index of its automaton."""
    inside: dict[Characters, frozenset[int]] = field(default_factory=dict)
    reached: dict[int, frozenset[Thread]] = field(default_factory=dict)

    def tree(self, tree: Node, behind: int) -> int:
        """The place at which a part of the pattern begins. behind: the place after it."""
        match tree:
            case Chars(of):
                return self.chars(of, behind)
            case Sequence(items):
                for item in reversed(items):
                    behind = self.tree(item, behind)
                return behind
            case Choice(options):
                return self._choice(*(self.tree(option, behind) for option in options))
            case Repeat(item, least, most):
                return self._repeat(item, least, most, behind)
            case Look():
                self.looks[place := self.new()] = (self._look(tree), behind)
                return place
            case Edge(end):
                self.edges[place := self.new()] = (end, behind)
                return place

    def chars(self, of: Characters, behind: int) -> int:
        if of not in self.inside:
            self.inside[of] = frozenset(index for index, part in enumerate(self.classes) if holds(of, part[0][0]))
        self.positions[place := self.new()] = (self.inside[of], behind)
        return place

    def _choice(self, *ways: int) -> int:
        self.choices[place := self.new()] = ways
        return place

    def new(self) -> int:
        """The number of a place."""
        if self.count > MAX_POSITIONS:
            raise PatternError(f"too complex: more than {MAX_POSITIONS} positions with look-ahead")
        self.steps.spend()
        self.count += 1
        return self.count - 1

    def _repeat(self, item: Node, least: int, most: int | None, behind: int) -> int:
        begin = behind
        if most is None:
            begin = self.new()
            self.choices[begin] = (self.tree(item, begin), behind)
        for _ in range(0 if most is None else most - least):
            begin = self._choice(self.tree(item, begin), behind)
        for _ in range(least):
            begin = self.tree(item, begin)
        return begin

    def _look(self, look: Look) -> int:
        if id(look) not in self.known:
            found = self.deterministic(self.tree(look.item, _MATCHED), look.negative)
            self.automata.append(found)
            self.known[id(look)] = len(self.automata) - 1
        return self.known[id(look)]

    def deterministic(self, entry: int, opposite: bool = False) -> Automaton:
        """The automaton of the strings that lead from a place to a match; or, if `opposite`, of all others."""
        numbers: dict[frozenset[Thread], int] = {}
        queue: list[frozenset[Thread]] = []

        def number(state: frozenset[Thread]) -> int:
            if state not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise PatternError(f"too complex: more than {MAX_STATES} states with look-ahead")
                numbers[state] = len(numbers)
                queue.append(state)
            return numbers[state]

        starts = (number(self._threads(entry, False)), number(self._threads(entry, True)))
        following = [[number(self._after(state, index)) for index in range(len(self.classes))] for state in queue]
        accepts = [self._accepts(state) != opposite for state in queue]
        return _smallest(Automaton(self.classes, following, accepts, starts), self.steps)

    def _threads(self, entry: int, at_start: bool) -> frozenset[Thread]:
        """The threads that a place stands for before the next character."""
        found: set[Thread] = set()
        seen: set[tuple[int, Thread]] = set()
        waiting: list[tuple[int, Thread]] = [(entry, frozenset())]
        while waiting:
            here = waiting.pop()
            if here in seen:
                continue
            seen.add(here)
            self.steps.spend()
            place, thread = here
            if place == _MATCHED:
                found.add(thread)
            elif place in self.positions:
                if _ENDED not in thread:
                    found.add(thread | {place})
            elif place in self.choices:
                waiting += [(way, thread) for way in self.choices[place]]
            elif place in self.edges:
                end, behind = self.edges[place]
                if end or at_start:
                    waiting.append((behind, thread | {_ENDED} if end else thread))
            else:
                index, behind = self.looks[place]
                ahead = self._ahead(index, self.automata[index].starts[at_start])
                if ahead is not None:
                    waiting.append((behind, thread | ahead))
        return self._needed(found)

    def _ahead(self, index: int, state: int) -> Thread | None:
        """What a thread carries of a look-ahead: nothing once it has succeeded. None: it has failed."""
        look = self.automata[index]
        if look.decided[state]:
            return frozenset() if look.accepts[state] else None
        return frozenset({(index, state)})

    def _after(self, state: frozenset[Thread], char: int) -> frozenset[Thread]:
        """The state after a character of a class."""
        found: set[Thread] = set()
        for thread in state:
            self.steps.spend()
            if _ENDED in thread:
                continue
            aheads = [
                self._ahead(part[0], self.automata[part[0]].following[part[1]][char])
                for part in thread
                if isinstance(part, tuple)
            ]
            going = [ahead for ahead in aheads if ahead is not None]
            if len(going) < len(aheads):
                continue
            ahead = frozenset[int | tuple[int, int]]().union(*going)
            place = next((part for part in thread if isinstance(part, int)), None)
            if place is None:
                found.add(ahead)
            elif char in self.positions[place][0]:
                found |= {ahead | more for more in self._reached(self.positions[place][1])}
        return self._needed(found)

    def _reached(self, place: int) -> frozenset[Thread]:
        if place not in self.reached:
            self.reached[place] = self._threads(place, False)
        self.steps.spend(1 + len(self.reached[place]) // 8)
        return self.reached[place]

    def _needed(self, threads: set[Thread]) -> frozenset[Thread]:
        """Without the threads that need all that another one needs, and more: equal states look equal."""
        if frozenset() in threads:
            return frozenset({frozenset()})
        if any(len(thread) > 1 for thread in threads):
            self.steps.spend(len(threads) ** 2 // 8)
            return frozenset(thread for thread in threads if not any(other < thread for other in threads))
        return frozenset(threads)

    def _accepts(self, state: frozenset[Thread]) -> bool:
        """Whether a string may end here."""

        def holds(part: int | tuple[int, int]) -> bool:
            return self.automata[part[0]].accepts[part[1]] if isinstance(part, tuple) else part == _ENDED

        return any(all(map(holds, thread)) for thread in state)


def _smallest(given: Automaton, steps: Steps) -> Automaton:
    """With states united that no string tells apart (Moore's algorithm)."""
    groups = [int(accepts) for accepts in given.accepts]
    count = len(set(groups))
    while True:
        steps.spend(len(groups) * len(given.classes) // 8)
        numbers: dict[tuple[int, ...], int] = {}
        signs = [(group, *(groups[to] for to in ways)) for group, ways in zip(groups, given.following, strict=True)]
        groups = [numbers.setdefault(sign, len(numbers)) for sign in signs]
        if len(numbers) == count:
            break
        count = len(numbers)
    firsts = [groups.index(group) for group in range(count)]
    following = [[groups[to] for to in given.following[state]] for state in firsts]
    starts = (groups[given.starts[0]], groups[given.starts[1]])
    return Automaton(given.classes, following, [given.accepts[state] for state in firsts], starts)

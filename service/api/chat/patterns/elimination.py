"""An automaton -> a regular expression of the strings that it accepts, by elimination of its states."""

from __future__ import annotations

import re

from service.api.chat.patterns.automaton import Automaton, Steps
from service.api.chat.patterns.characters import expression, quotable, united
from service.api.chat.patterns.syntax import PatternError

_ONE = re.compile(r"\\?.|\\x\{[0-9A-F]+\}|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
"""What a sign of repetition may follow without brackets."""

Ways = dict[int, dict[int, list[str]]]
"""From a state, to a state: alternatives, each a sequence; "" is the empty one."""


def regular_expression(given: Automaton, longest: int, steps: Steps) -> str:
    """For the syntax of Rust's regex, without anchors. PatternError if it would be longer than `longest`, or if no
    string is accepted."""
    ways = _ways(given)
    begin, end = -1, -2
    if given.starts[1] not in ways and not given.accepts[given.starts[1]]:
        raise PatternError("nothing matches it")
    ways[begin] = {given.starts[1]: [""]}
    for state in range(len(given.accepts)):
        if given.accepts[state]:
            ways.setdefault(state, {})[end] = [""]
    while inner := [state for state in ways if state != begin]:
        _eliminate(min(inner, key=lambda state: _cost(ways, state, steps)), ways, longest, steps)
    return _joined(ways[begin][end])


def _ways(given: Automaton) -> Ways:
    """Between the states from which a match can be reached."""
    alive = {state for state, accepts in enumerate(given.accepts) if accepts}
    while more := {state for state, ways in enumerate(given.following) if state not in alive and alive & set(ways)}:
        alive |= more
    found: Ways = {}
    for state in alive:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for part, to in zip(given.classes, given.following[state], strict=True):
            if to in alive:
                ranges.setdefault(to, []).extend(part)
        found[state] = {to: [expression(quotable(united(parts)))] for to, parts in ranges.items()}
    return found


def _cost(ways: Ways, state: int, steps: Steps) -> int:
    """About how many characters the elimination of a state adds."""
    steps.spend(1 + len(ways) // 8)
    into = [_length(to[state]) for other, to in ways.items() if other != state and state in to]
    out = [_length(options) for to, options in ways[state].items() if to != state]
    loop = _length(ways[state].get(state, []))
    return sum(into) * (len(out) - 1) + sum(out) * (len(into) - 1) + loop * (len(into) * len(out) - 1)


def _length(options: list[str]) -> int:
    return sum(map(len, options)) + len(options)


def _eliminate(state: int, ways: Ways, longest: int, steps: Steps) -> None:
    out = ways.pop(state)
    loop = _repeated(out.pop(state, []))
    for to in ways.values():
        before = to.pop(state, None)
        for target, after in out.items() if before else ():
            made = _joined(before or []) + loop + _joined(after)
            steps.spend(1 + len(made) // 64)
            if len(made) > longest:
                raise PatternError(f"without its look-ahead, it is longer than {longest} characters")
            if made not in (options := to.setdefault(target, [])):
                options.append(made)


def _joined(options: list[str]) -> str:
    """One sequence that stands for all alternatives."""
    said = [option for option in options if option]
    if len(said) == 1 and (len(options) == 1 or _ONE.fullmatch(said[0])):
        return said[0] + "?" * (len(options) - 1)
    return f"(?:{'|'.join(said)}){'?' * (len(said) < len(options))}" if said else ""


def _repeated(options: list[str]) -> str:
    said = "|".join(option for option in options if option)
    return said and (f"{said}*" if _ONE.fullmatch(said) else f"(?:{said})*")

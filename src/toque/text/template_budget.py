"""What one rendering of a chat template may use. Templates come from strangers; a hostile one must end in an error.

jinja2's sandbox stops a template from reaching the interpreter, not from running for ever or filling the memory. So
every iteration, macro call and filter call spends time here, every text that is built or printed spends characters,
and the few operations that could do a lot at once (``'a' * 10**9``, ``2 ** 10**9``, ``x|center(10**9)``) are checked
before they run. What is left between two checks is bounded work on bounded data.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from toque.errors import TemplateError

MAX_NUMBER = 100_000  # integers that become widths, counts and repetitions
MAX_BITS = 4_096  # of integers that arithmetic gives
MAX_NODES = 300_000  # values inside one list or dictionary, counted as often as they would print
_WIDTH = re.compile(r"[0-9]{6}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


CONTAINERS = (list, tuple, dict)
Container = list[Any] | tuple[Any, ...] | dict[Any, Any]


@dataclass(slots=True)
class Budget:
    """``seconds`` of this thread's CPU time, ``characters`` that may be built in all. Not shared between threads."""

    seconds: float
    characters: int
    _steps: int = 0
    _deadline: float = 0.0
    # Containers that are inside others, by id, with their size. They cannot change, and holding them keeps ids valid.
    _nodes: dict[int, tuple[object, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # CPU time, not wall time: on a busy machine an innocent template must not fail because it waited its turn.
        self._deadline = time.thread_time() + self.seconds

    def step(self, characters: int = 0) -> None:
        self._steps += 1
        if self._steps & 63 == 0:
            self.check_time()
        if characters:
            self.spend(characters)

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise _limit(f"the chat template ran longer than {self.seconds:g} s")

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise _limit("the chat template builds too much text")

    def nodes(self, value: Container) -> int:
        """How many values are inside; a list that is there twice counts twice. Inner containers are walked once."""
        self.step(len(value))
        total = 1
        for child in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            if isinstance(child, CONTAINERS):
                known = self._nodes.get(id(child))
                if known is None:
                    known = self._nodes[id(child)] = (child, self.nodes(child))
                total += known[1]
            else:
                total += 1
        if total > MAX_NODES:
            raise _limit("a list in the chat template is too large")
        return total


_NO_BUDGET = Budget(1.0, 1_000_000)
current: ContextVar[Budget] = ContextVar("chat template budget", default=_NO_BUDGET)


def check_arguments(arguments: Iterable[object]) -> None:
    """Refuse huge integers given to a method or filter, where they are widths and counts."""
    for argument in arguments:
        if isinstance(argument, int) and not -MAX_NUMBER <= argument <= MAX_NUMBER:
            raise _limit(f"a number in the chat template is too large (at most {MAX_NUMBER})")


def check_format(pattern: str) -> None:
    """Refuse field widths of six digits and more, and widths taken from arguments."""
    if _WIDTH.search(pattern):
        raise _limit("a format width in the chat template is too large")


def check_replace(text: str, old: object, new: object) -> None:
    """Refuse a replacement whose result would be over the budget."""
    count = text.count(str(old)) if str(old) else len(text) + 1
    current.get().spend(len(text) + count * len(str(new)))


def check_power(base: object, exponent: object) -> None:
    bits = base.bit_length() if isinstance(base, int) else 64
    if isinstance(exponent, int | float) and bits * max(exponent, 1) > MAX_BITS:
        raise _limit("a power in the chat template is too large")


def check_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise _limit("a product in the chat template is too large")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and times > 0:
            if isinstance(sequence, str | bytes):
                current.get().spend(len(sequence) * times)
            elif isinstance(sequence, list | tuple) and current.get().nodes(sequence) * times > MAX_NODES:
                raise _limit("a list in the chat template is too large")


def checked(value: Any) -> Any:
    """The value itself, unless it is too large: also lists that hold the same list twice, that hold the same …"""
    if isinstance(value, str):
        current.get().step(len(value))
    elif isinstance(value, CONTAINERS):
        current.get().nodes(value)
    return value


def printed_size(value: object) -> int:
    """About how many characters a value prints as: text and the number of values inside."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, CONTAINERS):
        return 1
    budget = current.get()
    total = budget.nodes(value)
    pending: list[Any] = [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            total += len(entry)
        elif isinstance(entry, dict):
            budget.step()
            pending.extend(entry.keys())
            pending.extend(entry.values())
        elif isinstance(entry, list | tuple):
            budget.step()
            pending.extend(entry)
    return total


def _limit(message: str) -> TemplateError:
    return TemplateError(message, param="messages", code="chat_template_limit")

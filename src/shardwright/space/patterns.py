"""Choices by block as few patterns of names: what a plan file says of 126 blocks in a line or two.

The choice that most blocks make is said of all (``model.layers.*``), the others before it, of ranges of numbers, since
the first pattern in file order that matches wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

Choice = TypeVar("Choice", bound=Hashable)


def patterns(prefix: str, suffix: str, choices: Sequence[Choice]) -> dict[str, Choice]:
    """Pattern → choice, in file order, for the names ``prefix.0suffix``, ``prefix.1suffix``, …"""
    if not choices:
        return {}
    usual = Counter(choices).most_common(1)[0][0]
    found: dict[str, Choice] = {}
    start = 0
    while start < len(choices):
        stop = start
        while stop < len(choices) and choices[stop] == choices[start]:
            stop += 1
        if choices[start] != usual:
            found |= {f"{prefix}.{numbers}{suffix}": choices[start] for numbers in ranges(start, stop)}
        start = stop
    return found | {f"{prefix}.*{suffix}": usual}


def ranges(start: int, stop: int) -> Iterator[str]:
    """Shell patterns that match the numbers from start up to stop, without leading zeros, and no other number.

    ``ranges(8, 23)`` → ``[8-9]``, ``1[0-9]``, ``2[0-2]``.
    """
    while start < stop:
        step = 1
        while start % (step * 10) == 0 and start + step * 10 <= stop and start >= step * 10:
            step *= 10
        digit = start // step % 10
        count = min(10 - digit, (stop - start) // step)
        if start < 10 and step == 1:
            count = min(10, stop) - start
        head = str(start // step // 10) if start // step >= 10 else ""
        last = str(digit) if count == 1 else f"[{digit}-{digit + count - 1}]"
        yield head + last + "[0-9]" * (len(str(step)) - 1)
        start += count * step

"""The launches of one backward: which gradients are reduced together, in an order that every rank keeps to.

Ranks may finish their gradients in different orders, or miss some: a rank that used another expert, dropped an output,
or takes another branch. A collective must be issued by all of them at the same place. So the order is settled when
backward begins, and a launch waits for its turn; a gradient that is missing when its turn comes is a gradient of zero,
and one that comes later is reduced at the end of backward. Sums are linear, so both are exact.

| a launch is due when                                                            | it reduces                   |
|---------------------------------------------------------------------------------|------------------------------|
| it is not its group's last, and all of its gradients are there                  | a fair share of the group    |
| its group's backward is over                                                    | what is left of the group    |
| another rank has issued it already (heard before the next gather), or at the end | what is there, zeros for the rest |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.params.parameter_group import ParameterGroup
from shardwright.params.shard import Shard
from shardwright.spec.sharding import FAIR_SHARE


@dataclass(frozen=True)
class Launch:
    """Members of one parameter group whose gradients are reduced together. last: of that group in this backward."""

    param_group: ParameterGroup
    members: tuple[Shard, ...]
    last: bool


class Launches:
    """``order``: the parameters whose gradients are expected, each with its group, in the order that all ranks agreed
    on.
    """

    def __init__(self, order: Sequence[tuple[ParameterGroup, Shard]]):
        self._waiting = deque(_in_launches(order))
        self._over: set[ParameterGroup] = set()
        self.arrived: dict[Shard, None] = {}
        self.issued = 0

    def arrive(self, stored: Shard) -> None:
        """The gradient of ``stored`` is whole, as far as is known."""
        self.arrived.setdefault(stored)

    def close(self, param_group: ParameterGroup) -> None:
        """The backward of ``param_group`` is over."""
        self._over.add(param_group)

    def close_all(self) -> None:
        """Backward is over: nothing more is waited for."""
        self._over.update(launch.param_group for launch in self._waiting)

    def expects(self, stored: Shard) -> bool:
        """Whether a launch that is still to come reduces its gradient."""
        return any(stored in launch.members for launch in self._waiting)

    def pop_due(self, least: int = 0) -> Launch | None:
        """The next launch, if its turn has come. least: so many are due, whatever has arrived."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        there = not first.last and all(stored in self.arrived for stored in first.members)
        if not (there or first.param_group in self._over or self.issued < least):
            return None
        self.issued += 1
        return self._waiting.popleft()


def _in_launches(order: Sequence[tuple[ParameterGroup, Shard]]) -> list[Launch]:
    """A group's gradients go in up to three launches: as soon as a fair share is ready and as much is still to come."""
    left: dict[ParameterGroup, int] = {}
    numbers: dict[ParameterGroup, int] = {}
    for param_group, stored in order:
        left[param_group] = left.get(param_group, 0) + stored.whole_bytes
        numbers[param_group] = numbers.get(param_group, 0) + 1
    ready: dict[ParameterGroup, list[Shard]] = {param_group: [] for param_group in left}
    found: list[Launch] = []
    for param_group, stored in order:
        ready[param_group].append(stored)
        left[param_group] -= stored.whole_bytes
        numbers[param_group] -= 1
        share = FAIR_SHARE * sum(other.whole_bytes for other in ready[param_group])
        fair = share >= param_group.trained_bytes and FAIR_SHARE * left[param_group] >= param_group.trained_bytes
        if not numbers[param_group]:  # all are there when it is issued: in the order of the group's members
            members = tuple(sorted(ready[param_group], key=param_group.members.index))
            found.append(Launch(param_group, members, last=True))
        elif fair:
            found.append(Launch(param_group, tuple(ready[param_group]), last=False))
            ready[param_group] = []
    return found

"""In which order parameter groups are asked for: learnt from the last pass, or as stated."""

from __future__ import annotations

from shardwright.params.parameter_group import ParameterGroup


class Order:
    """The parameter groups that one kind of pass asks for, as the last whole pass had it.

    stated: parameter group → those to gather ahead when it is asked for, where somebody has said so.
    """

    def __init__(self) -> None:
        self.stated: dict[ParameterGroup, list[ParameterGroup]] = {}
        self.known: list[ParameterGroup] = []
        self.now: list[ParameterGroup] = []
        self._promised: list[ParameterGroup] = []
        self._alike = True

    def begin(self) -> None:
        """A new pass of this kind."""
        self._promised = []
        if self.now:
            self.known, self.now, self._alike = self.now, [], True

    def arrive(self, param_group: ParameterGroup, count: int) -> list[ParameterGroup]:
        """``param_group`` is asked for; the ``count`` that come after it, as long as this pass goes like the known one.

        Where lists are stated, they alone count: what they name comes next until it is asked for.
        """
        place = len(self.now)
        self.now.append(param_group)
        self._alike = self._alike and place < len(self.known) and self.known[place] is param_group
        if self.stated:
            ahead = [*self._promised, *self.stated.get(param_group, [])]
            self._promised = [other for other in dict.fromkeys(ahead) if other is not param_group]
            return self._promised[:count]
        return self.known[place + 1 :][:count] if self._alike else []

"""A parameter group: parameters that are gathered, released and reduced together.

| when                                  | what, at level `parameters`                                               |
|---------------------------------------|---------------------------------------------------------------------------|
| a product asks for W                  | gather every W of the group (one logical all-gather a group)               |
| another group is asked for, in forward | release every W (unless kept, or its module is still at work)             |
| a member's last use in backward is over | release its W; its dW may travel                                        |
| dWs that may travel are a fair share  | they do, and the rest will: one logical reduce-scatter a group            |
| the group's last use in backward is over | release the rest; the last dWs travel                                   |
| backward ends                         | the same for groups with uses that never came                              |

So beside the next parameter group's W about one parameter group's worth of W and dW together is alive, and what
travels.

Parts are rows of dimension 0 in rank order, so W is gathered straight into the tensor that products read, and dW is
reduced from its own storage: nothing is packed or copied to travel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch

from shardwright.comm.coalesced import (
    CoalescedAllGatherHandle,
    CoalescedAllReduceHandle,
    CoalescedReduceScatterHandle,
    Logged,
)
from shardwright.comm.groups import AxisGroup
from shardwright.params.shard import Shard, Version
from shardwright.runtime.packed import PackedAllGatherHandle
from shardwright.spec.sharding import FAIR_SHARE, Sharding


class Use:
    """One use of a parameter by a forward pass whose backward is still to come. The graph that needs it holds it.

    stored: what is used; None stands for the parameter group's inputs. version: of the stored tensor when the forward
    read it. number: uses of one schedule are numbered as they are announced.
    """

    __slots__ = ("__weakref__", "number", "stored", "version")

    def __init__(self, stored: Shard | None, version: Version, number: int):
        self.stored, self.version, self.number = stored, version, number


SMALL_BYTES, SMALL_SHARE = 2**16, 16
"""W of at most so many bytes, and such a share of its parameter group, is gathered packed with others: a message costs
more than to copy it.
"""


class ParameterGroup:
    """``members`` that are gathered, released and reduced as one.

    open, busy: how many forwards, and backwards, of the parameter group's module are at work, where modules tell
    (unshard_hooks.py). W is not released meanwhile. vacated: members whose W backward has released already.
    trained_bytes: of the members whose gradients this backward may bring. expired: what is gathered is out of date, the
    next request gathers again. held: it was unsharded by name, and nobody has asked for it since; it is not counted.
    """

    def __init__(self, name: str, sharding: Sharding):
        self.name, self.sharding = name, sharding
        self.members: list[Shard] = []
        self.open = self.busy = self.trained_bytes = 0
        self.uses: weakref.WeakSet[Use] = weakref.WeakSet()
        self.gathered = False
        self.vacated: list[Shard] = []
        self._arrivals: list[CoalescedAllGatherHandle | PackedAllGatherHandle] = []
        self._seen: list[Version] = []
        self.expired = self.held = False
        self._operations: dict[tuple[str, AxisGroup], Logged] = {}  # of this backward: launches of one kind are one

    @property
    def gathers(self) -> list[Shard]:
        """The members of which products read another tensor than the stored one."""
        return [stored for stored in self.members if stored.gathers]

    @property
    def communicates(self) -> bool:
        """Whether its gathers involve other ranks."""
        return any(stored.gather_group.size > 1 for stored in self.members)

    @property
    def travels_as_one(self) -> bool:
        """Whether one member is nearly all of the parameter group, so that none of its gradients travels before the
        end.
        """
        sizes = [stored.whole_bytes for stored in self.members]
        return FAIR_SHARE * (sum(sizes) - max(sizes)) <= sum(sizes)

    @property
    def idle(self) -> bool:
        """Whether W may be released before its backward is over."""
        if self.open or self.busy or self.held or self.sharding.resident:
            return False
        return not (self.sharding.keep and self.uses)

    def announce(self, number: int, stored: Shard | None = None) -> Use:
        """A backward to come: a use of a member, or of none of them for itself. number: of the use."""
        use = Use(stored, (0, 0, 0) if stored is None else stored.version, number)
        self.uses.add(use)
        return use

    # -- gather and release

    @property
    def current(self) -> bool:
        """Whether what is gathered (or under way) is what is stored now."""
        return self.gathered and not self.expired and self._seen == self._versions()

    @property
    def has_fresh(self) -> bool:
        """Whether a member has deposits that are not reduced yet."""
        return any(stored.has_fresh for stored in self.members)

    def _versions(self) -> list[Version]:
        return [stored.version for stored in self.gathers]

    def was_written(self) -> list[torch.Tensor]:
        """Whether a stored shard differs from what was gathered of it, by whatever means it was written.

        Bools [] on the device, of which any decides; none where that is out of date anyway.
        """
        if not self.gathered or self.expired:
            return []
        self.wait()
        if self._seen != self._versions():
            self.expired = True
            return []
        return [stored.was_written() for stored in self.gathers if stored not in self.vacated]

    def start(self, mode: str) -> None:
        """Begins to gather every W."""
        self.wait()  # a module that this rank did not use: nobody has waited for the gather before this one
        self.gathered, self.expired, self._seen, self.vacated = True, False, self._versions(), []
        by_group: dict[AxisGroup, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for stored in self.gathers:
                pair = stored.part(), stored.room().data  # aliases that a graph holds must not see a write
                by_group.setdefault(stored.gather_group, []).append(pair)
            for group, pairs in by_group.items():
                if group.size == 1:
                    for part, whole in pairs:
                        whole.copy_(part)
                    continue
                logged = Logged()
                large, packs = _sorted_by_size(pairs)
                arena = self.members[0].runtime.arena
                for pack in packs:
                    self._arrivals.append(PackedAllGatherHandle(pack, group, self.name, mode, arena, logged))
                if large:
                    self._arrivals.append(CoalescedAllGatherHandle(large, group, self.name, mode, logged))

    def wait(self) -> None:
        """Until every W is there."""
        arrivals, self._arrivals = self._arrivals, []
        with torch.inference_mode(False), torch.no_grad():
            for arrival in arrivals:
                arrival.finish()

    def release(self) -> None:
        """Gives the memory of every W back."""
        self.wait()
        self.gathered, self.vacated = False, []
        for stored in self.gathers:
            stored.vacate()

    # -- backward

    def over(self, stored: Shard, use: Use, read: bool = False) -> bool:
        """``use`` is over; if it was the member's last one, its W is released. Returns whether it was.

        read: something else may still read W, until the parameter group's backward is over.
        """
        self.uses.discard(use)
        if any(other.stored is stored for other in self.uses):
            return False
        if self.gathered and stored.gathers and not (read or self.open or self.sharding.resident):
            self.wait()
            stored.vacate()
            self.vacated.append(stored)
        return True

    def begin_backward(self) -> None:
        """A backward begins: launches of one kind will be one logical operation of the trace."""
        self._operations = {}
        self.trained_bytes = sum(stored.whole_bytes for stored in self.members if stored.trains)

    def drop(self) -> None:
        """Forgets what an aborted backward left."""
        self.busy = 0
        for stored in self.members:
            stored.drop()

    def reduction(self, fresh: Sequence[tuple[Shard, torch.Tensor]]) -> Iterator[Handles]:
        """Reduces and lands ``fresh``, a stage at a time: yields the handles that travel after each stage."""
        results, operations = dict(fresh), self._operations
        scatters: list[CoalescedReduceScatterHandle | CoalescedAllReduceHandle] = []
        for group, members in _by_group((stored.gather_group, stored) for stored, _ in fresh).items():
            pairs = [(results[stored], stored.new_gradient(results[stored])) for stored in members]
            wide = any(stored.wide(results[stored]) for stored in members)
            logged = operations.setdefault(("reduce_scatter", group), Logged())
            scatters.append(CoalescedReduceScatterHandle(pairs, group, self.name, "async", wide, logged))
            results |= {stored: part for stored, (_, part) in zip(members, pairs, strict=True)}
            del pairs
        del fresh
        if scatters:
            yield scatters
            _finish(scatters)
        for stored, gradient in results.items():
            results[stored] = stored.widened(gradient)
        reductions: list[CoalescedReduceScatterHandle | CoalescedAllReduceHandle] = []
        for group, members in _by_group((stored.rest_group, stored) for stored in results).items():
            wide = any(stored.wide(results[stored]) for stored in members)
            tensors = [results[stored] for stored in members]
            logged = operations.setdefault(("all_reduce", group), Logged())
            reductions.append(CoalescedAllReduceHandle(tensors, group, self.name, "async", wide, logged))
        if reductions:
            yield reductions
            _finish(reductions)
        for stored, gradient in results.items():
            stored.land(gradient)


def _sorted_by_size(pairs: Sequence[Pair]) -> tuple[list[Pair], list[list[Pair]]]:
    """(part, whole) pairs that travel each for itself, and packs, one an element type, of those that are too small."""
    every = sum(whole.nbytes for _, whole in pairs)
    packs: dict[torch.dtype, list[Pair]] = {}
    for pair in pairs:
        if pair[1].nbytes <= min(SMALL_BYTES, every // SMALL_SHARE):
            packs.setdefault(pair[1].dtype, []).append(pair)
    kept = [pack for pack in packs.values() if len(pack) > 1]
    packed = {id(whole) for pack in kept for _, whole in pack}
    return [pair for pair in pairs if id(pair[1]) not in packed], kept


Pair = tuple[torch.Tensor, torch.Tensor]
Handles = Sequence[CoalescedReduceScatterHandle | CoalescedAllReduceHandle]


def _by_group(pairs: Iterator[tuple[AxisGroup, Shard]]) -> dict[AxisGroup, list[Shard]]:
    found: dict[AxisGroup, list[Shard]] = {}
    for group, stored in pairs:
        if group.size > 1:
            found.setdefault(group, []).append(stored)
    return found


def _finish(handles: list[CoalescedReduceScatterHandle | CoalescedAllReduceHandle]) -> None:
    while handles:
        handles.pop(0).finish()

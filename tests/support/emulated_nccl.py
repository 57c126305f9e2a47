"""NCCL's rules, held by gloo on CPU: a program that breaks one of them fails here, or computes NaN.

NCCL's collectives run beside the program, and a program must be right whenever they run. Two extremes, and chance:

| timing     | inputs are read                                  | outputs are written              |
|------------|--------------------------------------------------|----------------------------------|
| `earliest` | at launch                                        | at launch, which waits for peers |
| `latest`   | when waited for, or before this rank waits at all| when waited for; NaN before      |
| `random`   | at either moment, drawn from a seed, alike on all members of a group                |

When a launch is waited for, what it read must be as it was, what it writes must not have been touched, and no storage
may have been resized. Members must issue the same operations (kind, sizes, element type) in the same order, on tensors
without gaps. Tags are ignored: messages between two ranks match in their order. Launches are never known to be complete
before they are waited for, and a wait says nothing of what peers have waited for. Operations that are coalesced are one
launch. A broken rule raises ``BrokenRule`` with both members' operations, or with the tensor.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.runtime.runtime import Runtime
from support.operations import BrokenRule, Operation, raw

BACKEND = "emulated_nccl"
HEADER = 1024  # bytes that tell what a member issues


@dataclass
class Timing:
    """When launches read and write, in this process, and those that have not read yet."""

    word: str = "earliest"
    seed: int = 0
    unread: list[Launch] = field(default_factory=list)
    open: list[Launch] = field(default_factory=list)

    def draw(self, label: str) -> tuple[bool, bool]:
        """(reads at launch, writes at launch), equal on all members; what is not read cannot be written."""
        if self.word == "random":
            return random.Random(f"{self.seed} {label}").choice([(True, True), (True, False), (False, False)])
        return (self.word == "earliest",) * 2

    def read_all(self) -> None:
        """Before this rank waits for others, they get what it has launched."""
        while self.unread:
            self.unread.pop(0).read()

    def unfinished(self) -> list[str]:
        """Launches that nobody has waited for."""
        return [str(launch) for launch in self.open]


TIMING = Timing()


class Launch:
    """Operations that a member issues as one. to, sources: whom it sends to and hears of; label: which launch it is."""

    def __init__(
        self, group: EmulatedNccl, operations: list[Operation], to: list[int], sources: list[int], tag: int, label: str
    ):
        self.group, self.operations, self.to, self.sources, self.tag = group, operations, to, sources, tag
        self.label = label
        self.text = "; ".join(operation.text for operation in operations)
        for operation in operations:
            operation.check(self)
        self._inputs = [tensor for operation in operations for tensor in operation.inputs]
        self._outputs = [tensor for operation in operations for tensor in operation.outputs]
        self._read = [tensor.detach().clone() for tensor in self._inputs]
        self._done = False
        TIMING.open.append(self)
        at_launch, self._written = TIMING.draw(label)
        if at_launch:
            self.read()
        else:
            TIMING.unread.append(self)
        if self._written:
            self._receive()
        else:
            for tensor in self._outputs:
                tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
        self._expected = [tensor.detach().clone() for tensor in (*self._inputs, *self._outputs)]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in (*self._inputs, *self._outputs)]

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"

    def read(self) -> None:
        """Sends what peers are to get."""
        if self in TIMING.unread:
            TIMING.unread.remove(self)
        whole = self.text.encode()
        for peer in self.to:
            body = raw([each for operation in self.operations for each in operation.outgoing(self._copies(), peer)])
            header = {"text": whole[:600].decode(errors="ignore"), "hash": hashlib.sha1(whole).hexdigest()}
            line = json.dumps(header | {"bytes": len(body)}).encode().ljust(HEADER)
            self.group.post(torch.frombuffer(bytearray(line), dtype=torch.uint8), peer, self.tag)
            if len(body):
                self.group.post(body, peer, self.tag + 1)

    def _copies(self) -> dict[int, torch.Tensor]:
        """Inputs as they were at launch, by identity: a later change of one is found when it is waited for."""
        return {id(tensor): copy for tensor, copy in zip(self._inputs, self._read, strict=True)}

    def _receive(self) -> None:
        TIMING.read_all()
        bodies = {peer: self._from(peer) for peer in self.sources}
        for operation in self.operations:
            arrived = {}
            for peer in self.sources:
                count = operation.expects(peer) * operation.dtype.itemsize
                arrived[peer], bodies[peer] = bodies[peer][:count].view(operation.dtype), bodies[peer][count:]
            operation.land(self._copies(), arrived)

    def _from(self, peer: int) -> torch.Tensor:
        line = self.group.take(HEADER, peer, self.tag, self)
        header = json.loads(bytes(line.tolist()))
        if header["hash"] != hashlib.sha1(self.text.encode()).hexdigest():
            ranks = self.group.ranks
            raise BrokenRule(
                f"{self.label}: rank {ranks[self.group.me]} issues {self.text}, rank {ranks[peer]} issues "
                f"{header['text']}"
            )
        if not header["bytes"]:
            return torch.empty(0, dtype=torch.uint8)
        return self.group.take(header["bytes"], peer, self.tag + 1, self)

    def complete(self) -> None:
        """What a wait does."""
        if self._done:
            return
        with _disable_current_modes(), torch.no_grad():
            self._done = True
            TIMING.open.remove(self)
            if self in TIMING.unread:
                self.read()
            self._verify()
            if not self._written:
                self._receive()

    def _verify(self) -> None:
        tensors = (*self._inputs, *self._outputs)
        for number, (tensor, size, before) in enumerate(zip(tensors, self._sizes, self._expected, strict=True)):
            what = "input" if number < len(self._inputs) else "output"
            if tensor.untyped_storage().nbytes() != size:
                raise BrokenRule(f"{self}: the storage of an {what} was resized before the wait")
            if not torch.equal(raw([tensor]), raw([before])):
                raise BrokenRule(f"{self}: an {what} was written to before the wait")


class Handle(dist.Work):
    """What a program waits for."""

    def __init__(self, launches: list[Launch]):
        super().__init__()
        self._launches = launches

    def wait(self, timeout: timedelta | None = None) -> bool:
        for launch in self._launches:
            launch.complete()
        return True

    def is_completed(self) -> bool:
        return False


class EmulatedNccl(dist.ProcessGroup):
    """A process group whose messages go over a gloo group of its own."""

    def __init__(self, options: c10d._DistributedBackendOptions, _: object = None):
        super().__init__(options.group_rank, options.group_size)
        self._name, self._timeout = options.group_id, options.timeout
        self.me, self.n = options.group_rank, options.group_size
        self.ranks = list(options.global_ranks_in_group) or list(range(self.n))
        store = dist.PrefixStore("messages", options.store)
        self._gloo = c10d.ProcessGroupGloo(store, self.me, self.n, options.timeout)
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._launched, self._messages = 0, {(kind, peer): 0 for kind in ("to", "from") for peer in range(self.n)}
        self._coalescing: list[tuple[Operation, int]] | None = None

    # -- messages ------------------------------------------------------------------------------------------------------

    def post(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._sent.append((self._gloo.send([message], peer, tag), message))
        if len(self._sent) > 2000:  # its handle must live until it has gone
            self._sent.popleft()[0].wait()

    def take(self, size: int, peer: int, tag: int, launch: Launch) -> torch.Tensor:
        message = torch.empty(size, dtype=torch.uint8)
        try:
            self._gloo.recv([message], peer, tag).wait()
        except RuntimeError as error:
            raise RuntimeError(f"{launch}: nothing came from rank {self.ranks[peer]} ({error})") from error
        return message

    # -- launches ------------------------------------------------------------------------------------------------------

    def _collective(self, *operations: Operation) -> Handle:
        with _disable_current_modes(), torch.no_grad():
            peers = [peer for peer in range(self.n) if peer != self.me]
            label = f"collective {self._launched} of ranks {self.ranks}"
            tag, self._launched = 4 * self._launched, self._launched + 1
            return Handle([Launch(self, list(operations), peers, peers, tag, label)])

    def _message(self, operation: Operation, peer: int) -> Handle:
        if self._coalescing is not None:
            self._coalescing.append((operation, peer))
            return Handle([])
        return self._messages_of([(operation, peer)])

    def _messages_of(self, pairs: list[tuple[Operation, int]]) -> Handle:
        """Receives of a launch end after its sends have left: as one, they wait for no one's turn."""
        with _disable_current_modes(), torch.no_grad():
            launches = []
            for operation, peer in sorted(pairs, key=lambda pair: not pair[0].inputs):
                side = "to" if operation.inputs else "from"
                number = self._messages[side, peer]
                self._messages[side, peer] += 1
                ends = (self.me, peer) if operation.inputs else (peer, self.me)
                label = f"message {number} from rank {self.ranks[ends[0]]} to rank {self.ranks[ends[1]]}"
                to, sources = ([peer], []) if operation.inputs else ([], [peer])
                launches.append(Launch(self, [operation], to, sources, 4 * number + 2, label))
            return Handle(launches)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Handle:
        pairs, self._coalescing = self._coalescing or [], None
        return self._messages_of(pairs)

    # -- what c10d calls -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None):
        return self._collective(*(Operation.all_reduce(self, tensor, opts) for tensor in tensors))

    allreduce_coalesced = allreduce

    def allgather(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return self._collective(*(Operation.all_gather(self, part, places) for places, part in pairs))

    def all_gather_single(self, output, part, opts=None):
        return self.all_gather_single_coalesced([output], [part], opts)

    def all_gather_single_coalesced(self, outputs, parts, opts=None):
        pairs = zip(outputs, parts, strict=True)
        return self._collective(*(Operation.all_gather_single(self, part, whole) for whole, part in pairs))

    def reduce_scatter(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return self._collective(*(Operation.reduce_scatter(self, wholes, part, opts) for part, wholes in pairs))

    def reduce_scatter_single(self, part, whole, opts=None):
        return self.reduce_scatter_single_coalesced([part], [whole], opts)

    def reduce_scatter_single_coalesced(self, parts, wholes, opts=None):
        pairs = zip(parts, wholes, strict=True)
        return self._collective(*(Operation.reduce_scatter_single(self, whole, part, opts) for part, whole in pairs))

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def broadcast(self, tensors, opts):
        return self._collective(*(Operation.broadcast(self, tensor, opts.rootRank) for tensor in tensors))

    def all_to_all_single(self, output, whole, output_sizes, input_sizes, opts=None):
        return self._collective(Operation.all_to_all(self, whole, output, input_sizes, output_sizes))

    alltoall_base = all_to_all_single

    def barrier(self, opts=None):
        return self._collective(Operation.barrier(self))

    def send(self, tensors, peer, tag=0):
        return self._message(Operation.send(tensors[0], peer), peer)

    def recv(self, tensors, peer, tag=0):
        return self._message(Operation.receive(tensors[0], peer), peer)

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND


def emulated_mesh(timing: str, seed: int = 0, order: tuple[int, ...] | None = None, **axes: int) -> DeviceMesh:
    """The mesh of these axes over all ranks of the pool, declared to run on NCCL; made once, timed anew by each call.

    order: the ranks, in mesh order, where they do not ascend.
    """
    assert not TIMING.open, f"never waited for: {TIMING.unfinished()}"
    TIMING.word, TIMING.seed = timing, seed
    return _mesh(tuple(axes.items()), order)


@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...], order: tuple[int, ...] | None) -> DeviceMesh:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, EmulatedNccl, extended_api=True, devices=["cpu"])
        dist.batch_isend_irecv = _batch  # c10d's own launches groups of its own type only as one
    names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    ranks = torch.tensor(order or range(dist.get_world_size())).view(shape)
    override = tuple((BACKEND, None) for _ in axes)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, backend_override=override)
    Runtime.of(mesh, "nccl")
    return mesh


def _batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    group = operations[0].group
    if not isinstance(group, EmulatedNccl):
        return c10d.batch_isend_irecv(operations)
    group._start_coalescing(operations[0].tensor.device)
    for each in operations:
        peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
        each.op(each.tensor, group=group, tag=each.tag, **peer)
    return [group._end_coalescing(operations[0].tensor.device)]

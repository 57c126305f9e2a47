"""What the planner searches: mesh shapes, what splits storage, micro-batches; and for each block its layouts.

A *structure* is what all blocks share: the mesh, the residual stream, the sharding level, the micro-batches. A *mode*
is what a block (or its attention, or its MLP) may choose by itself.

| of a structure | candidates                                                                                          |
|----------------|-----------------------------------------------------------------------------------------------------|
| mesh           | replica × data × (tensor, or j × l): every way to write the number of devices so; features fastest  |
| order          | replica before data, j before l, or the other way round                                             |
| grids          | on j × l, for attention and MLP each: the grid, or flat: both axes as one                           |
| stream         | tokens split over tensor (gather and scatter), or whole there (all-reduce)                          |
| level          | replicate, optimizer, gradients, parameters, and parameters kept from forward to backward           |
| in flight      | 2 gathered units at once, or 1, or 3, where weights are gathered                                    |
| bucket         | none, or one whose bins the norms and biases of 2 blocks fill, or (where they are few) of all       |
| micro-batches  | the batch in 1, 2, 4, … equal parts                                                                 |

| of a mode      | candidates                                                                                          |
|----------------|-----------------------------------------------------------------------------------------------------|
| overlap        | blocking, async, ring                                                                               |
| chunks         | the least that the overlap needs; async in 2 or 4, ring in 2                                        |
| save_x         | the shard, or the gathered input                                                                    |
| recompute      | none, or the whole block                                                                            |

A structure is *plain* where its order is the first, its grids are grids, 2 units are in flight, and nothing shares a
bucket.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import InputError
from shardwright.families.family import Family
from shardwright.models.build import of_blocks
from shardwright.spec.edge import edges
from shardwright.spec.layout import GridLayout
from shardwright.spec.site import Site, check_divides, check_heads

WIDEST_TENSOR = 32
"""Most ranks that split one product's features."""

WIDEST_STORAGE = 128
"""Most ranks that split one parameter's storage; beyond, shards are a few rows, and replicas cost less."""

LEVELS = (("replicate", False), ("optimizer", False), ("gradients", False), ("parameters", False), ("parameters", True))
"""(level, keep)."""


IN_FLIGHT = (2, 1, 3)
"""How many units may be gathered at once, the usual number first."""

BINS = (0, 2)
"""How many blocks fill a bin of the bucket (half of its cap) with their vectors; 0: there is none."""

FEW_BLOCKS = 8
"""So many blocks at most may fill one bin all together."""

GRIDS = (("grid", "grid"), ("flat", "grid"), ("grid", "flat"))
"""(attention's, the MLP's) grid on j × l; both flat is one tensor axis."""


@dataclass(frozen=True)
class Mode:
    """How a site overlaps, in how many chunks (0: as few as can be), and what its backward keeps of X."""

    overlap: str = "blocking"
    save_x: str = "shard"
    chunks: int = 0

    @property
    def name(self) -> str:
        """``async, shard``, ``ring in 2 chunks, shard``."""
        chunks = f" in {self.chunks} chunks" if self.chunks else ""
        return f"{self.overlap}{chunks}, {self.save_x}"


MODES = tuple(Mode(overlap, save_x) for save_x in ("gathered", "shard") for overlap in ("blocking", "async", "ring"))
"""The modes that are priced first."""

CHUNKED = tuple(
    Mode(overlap, save_x, chunks)
    for save_x in ("gathered", "shard")
    for overlap, chunks in (("async", 2), ("async", 4), ("ring", 2))
)
"""Those in more chunks."""

WHOLE_STREAM = (Mode("blocking"), Mode("async"))
"""Those of a site whose X is whole: it is not kept, and no piece of it goes around; in more chunks, too."""


@dataclass(frozen=True)
class Structure:
    """What all blocks of a plan share.

    replica, data: ranks that split tokens; storage is split over ``data`` only. j, l: ranks that split features; l = 1
    is one tensor axis. stream: ``split`` or ``whole`` over it. accumulation: micro-batches of a step. grids: what
    attention and the MLP do on j × l (GRIDS). in_flight: units gathered at once. data_first, l_first: the order of the
    mesh's axes where it is not the usual one. bins: blocks that fill a bin of the bucket (BINS).
    """

    replica: int
    data: int
    j: int
    l: int  # noqa: E741 (the axis's name in docs/layouts.md)
    stream: str
    level: str
    keep: bool
    accumulation: int
    grids: tuple[str, str] = GRIDS[0]
    in_flight: int = IN_FLIGHT[0]
    data_first: bool = False
    l_first: bool = False
    bins: int = BINS[0]

    @property
    def mesh(self) -> dict[str, int]:
        """Axes in mesh order, the last fastest."""
        sizes = {"replica": self.replica, "data": self.data, "tensor": self.j, "j": self.j, "l": self.l}
        return {axis: sizes[axis] for axis in self.token_axes + self.feature_axes}

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that split tokens everywhere, in mesh order."""
        if self.replica == 1:
            return ("data",)
        return ("data", "replica") if self.data_first else ("replica", "data")

    @property
    def feature_axes(self) -> tuple[str, ...]:
        """Axes that split features, in mesh order."""
        if self.l == 1:
            return ("tensor",)
        return ("l", "j") if self.l_first else ("j", "l")

    @property
    def plain(self) -> bool:
        """Whether it is what is looked at before its variants."""
        return self == self.usual

    @property
    def usual(self) -> Structure:
        """The plain structure that this one is a variant of."""
        return replace(self, grids=GRIDS[0], in_flight=IN_FLIGHT[0], data_first=False, l_first=False, bins=BINS[0])

    def differs(self, other: Structure) -> int:
        """In how many things beside the usual ones."""
        names = ("grids", "in_flight", "data_first", "l_first", "bins")
        return sum(getattr(self, name) != getattr(other, name) for name in names)

    def variants(self, blocks: int) -> Iterator[Structure]:
        """The other structures of the same ``usual`` one, for a model of so many blocks."""
        shares = self.replica * self.data > 1 or (self.tensor > 1 and self.stream == "split")
        choices = itertools.product(
            (False, True) if self.replica > 1 else (False,),
            (False, True) if self.l > 1 else (False,),
            GRIDS if self.l > 1 else GRIDS[:1],
            IN_FLIGHT if self.level == "parameters" else IN_FLIGHT[:1],
            _bins(blocks) if shares else BINS[:1],
        )
        for data_first, l_first, grids, in_flight, bins in choices:
            other = replace(self, grids=grids, in_flight=in_flight, data_first=data_first, l_first=l_first, bins=bins)
            if other != self:
                yield other

    @property
    def tensor(self) -> int:
        """Ranks that split features."""
        return self.j * self.l

    @property
    def split(self) -> tuple[int, int, str, tuple[str, str]]:
        """How features are split: j, l, what the residual stream does over them, and the grids."""
        return self.j, self.l, self.stream, self.grids

    @property
    def name(self) -> str:
        """``data=2, tensor=4: parameters kept, 2 micro-batches``."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        kept = " kept" if self.keep else ""
        batches = f", {self.accumulation} micro-batches" if self.accumulation > 1 else ""
        stream = ", all-reduce" if self.stream == "whole" else ""
        parts = zip(("attention", "MLP"), self.grids, strict=True)
        flat = "".join(f", {part} flat" for part, grid in parts if grid == "flat")
        flight = f", {self.in_flight} in flight" if self.in_flight != IN_FLIGHT[0] else ""
        bucket = f", bucket ({self.bins} blocks a bin)" if self.bins else ""
        return f"{mesh}: {self.level}{kept}{flight}{bucket}{stream}{flat}{batches}"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What a block may choose from; without an axis that splits features there is nothing to choose."""
        if self.tensor == 1:
            return MODES[:1]
        if self.stream == "whole":
            return WHOLE_STREAM + tuple(mode for mode in CHUNKED if replace(mode, chunks=0) in WHOLE_STREAM)
        return MODES + CHUNKED

    @property
    def params(self) -> Any:
        """The plan's field ``params`` of every unit."""
        if self.level == "replicate":
            return "replicate"
        stored = {"level": self.level, "axes": ["data"]}
        return stored | ({"keep": True} if self.keep else {})

    def layout(self, site: Site, mode: Mode, attention: bool = False) -> GridLayout:
        """The layout of a site, of attention or not: consecutive sites swap the roles of j and l."""
        if self.tensor == 1:
            return GridLayout(m=self.token_axes)
        first: tuple[str, ...] = self.feature_axes
        second: tuple[str, ...] = ()
        if self.l > 1 and self.grids[0 if attention else 1] == "grid":
            first, second = ("j",), ("l",)
        n, k = (first, second) if site.kind == "column" else (second, first)
        word = "sharded" if self.stream == "split" else "replicated"
        layout = GridLayout(m=self.token_axes, n=n, k=k, x=word, y=word, overlap=mode.overlap, chunks=mode.chunks)
        return replace(layout, save_x=mode.save_x) if word == "sharded" and n else layout


def structures(family: Family, config: Any, devices: int, batch: int, sequence: int) -> Iterator[Structure]:
    """Every structure that the model's heads and the batch allow, on all ``devices``, plain ones and variants.

    batch: sequences of a step over the whole mesh; a rank that splits tokens takes whole sequences.
    """
    for j, l in _tensor_axes(devices):  # noqa: E741
        ranks = devices // (j * l)
        if batch % ranks:
            continue
        for stream in ("split", "whole") if j * l > 1 else ("split",):
            probe = Structure(1, ranks, j, l, stream, "replicate", False, 1)
            allowed = {
                grids
                for grids in (GRIDS if l > 1 else GRIDS[:1])
                if _allowed(replace(probe, grids=grids), family, config, batch * sequence)
            }
            for accumulation in _accumulations(batch // ranks):
                for level, keep in LEVELS if ranks > 1 else LEVELS[:1]:
                    for data in _storage(ranks) if level != "replicate" else (ranks,):
                        plain = Structure(ranks // data, data, j, l, stream, level, keep, accumulation)
                        every = (plain, *plain.variants(config.num_hidden_layers))
                        yield from (each for each in every if each.grids in allowed)


def _tensor_axes(devices: int) -> Iterator[tuple[int, int]]:
    for tensor in _divisors(devices):
        if tensor > WIDEST_TENSOR:
            return
        yield tensor, 1
        for l in _divisors(tensor):  # noqa: E741
            if 1 < l < tensor:
                yield tensor // l, l


def _accumulations(sequences: int) -> Iterator[int]:
    """Micro-batches that a rank's sequences may be cut into: powers of two, and one sequence each."""
    count = 1
    while count < sequences:
        if sequences % count == 0:
            yield count
        count *= 2
    yield sequences


def _bins(blocks: int) -> list[int]:
    """How many of a model's blocks may fill a bin."""
    return sorted({bins for bins in (*BINS, blocks) if not bins or (bins <= FEW_BLOCKS and blocks % bins == 0)})


def _storage(ranks: int) -> list[int]:
    """How many of the ranks that split tokens may split storage: all, as many as are sensible, and 8 or 64 of them."""
    wide = [size for size in _divisors(ranks) if 1 < size <= WIDEST_STORAGE]
    return sorted({wide[-1], *(size for size in (8, 64) if size in wide)}, reverse=True)


def _allowed(structure: Structure, family: Family, config: Any, tokens: int) -> bool:
    """Whether heads divide and edges join. Blocks have sites of the same sizes, so two of them tell."""
    mesh = structure.mesh
    sites = family.sites(of_blocks(config, range(min(2, config.num_hidden_layers))), tokens)
    layouts = {site.name: structure.layout(site, MODES[0], family.in_attention(site)) for site in sites}
    try:
        for site in sites:
            check_divides(site, layouts[site.name], mesh)
            if site.name.endswith(f"{family.attention}.qkv"):
                check_heads(site, layouts[site.name], structure.token_axes, mesh)
        edges(sites, layouts, structure.token_axes, mesh)
    except InputError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})

"""What a model of many equal blocks holds, saves and sends, composed from a rehearsal of one with few.

A model is runs of equal blocks between what comes before, between and after them. Where a run of r blocks stands for one of
n, its middle block stands for n − r more. In the pass forward each of them adds what the middle one's pieces add, before
everything that follows; in the pass backward likewise, in descending order; parameters and moments of all blocks are alive
all the time. So every number of the long step is the short one's plus (n − r) times a difference that the short trace shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.planner.pieces import Piece, of_block
from shardwright.trace import PHASES


@dataclass(frozen=True)
class Run:
    """Consecutive equal blocks: how many the rehearsal has (``short``), of which ``middle`` (a block's number, counted
    over all runs) is like its neighbours; standing: bytes of one block that are alive from the start of a step (its
    parameters), moments: those that the first step adds.
    """

    short: int
    middle: int
    standing: int
    moments: int


@dataclass(frozen=True)
class Composed:
    """A step of the long model on one rank, in bytes: the peak of each phase, what is saved, what is sent in step 1."""

    phase_peaks: Mapping[str, int]
    saved: int
    sent: int

    @property
    def peak(self) -> int:
        """The most alive at once."""
        return max(self.phase_peaks.values())


def compose(pieces: Sequence[Piece], saved: Sequence[int], runs: Sequence[Run], lengths: Sequence[int]) -> Composed:
    """The long model whose runs have ``lengths`` blocks.

    pieces, saved: of the short trace (pieces.cut, Trace.saved). Two steps are looked at, as the trace has them.
    """
    more = [length - run.short for run, length in zip(runs, lengths, strict=True)]
    peaks = dict.fromkeys(PHASES, 0)
    shift, step = sum(n * run.standing for n, run in zip(more, runs, strict=True)), 1
    for index, piece in enumerate(pieces):
        if piece.step != step:
            step = piece.step
            shift = sum(n * (run.standing + run.moments + _lasting(pieces, run)) for n, run in zip(more, runs, strict=True))
        grown = sum(n * run.moments for n, run in zip(more, runs, strict=True)) if piece.phase == "step" and step == 1 else 0
        peaks[piece.phase] = max(peaks[piece.phase], piece.most + shift + grown)
        for n, run in zip(more, runs, strict=True):
            if n and _ends_middle(pieces, index, run.middle):
                one = of_block(pieces, run.middle, piece.step, piece.phase, piece.micro)
                added = one[-1].end - one[0].start
                highest = max(each.most for each in one) + shift
                peaks[piece.phase] = max(peaks[piece.phase], highest + added, highest + n * added)
                shift += n * added
    return Composed(
        {phase: peak for phase, peak in peaks.items() if peak},
        max(
            (held + _more_saved(pieces, runs, more, number) for number, held in enumerate(saved)),
            default=0,
        ),
        _sent(pieces) + sum(n * _sent([p for p in pieces if p.block == run.middle]) for n, run in zip(more, runs, strict=True)),
    )


def _ends_middle(pieces: Sequence[Piece], index: int, middle: int) -> bool:
    """Whether the middle block's pass ends with this piece."""
    piece = pieces[index]
    if piece.block != middle or piece.phase not in ("forward", "backward"):
        return False
    return of_block(pieces, middle, piece.step, piece.phase, piece.micro)[-1] is piece


def _lasting(pieces: Sequence[Piece], run: Run) -> int:
    """What the first step of one block leaves (weights that stay gathered)."""
    return sum(piece.lasting for piece in pieces if piece.block == run.middle and piece.step == 1)


def _sent(pieces: Sequence[Piece]) -> int:
    return sum(piece.sent for piece in pieces if piece.step == 1)


def _more_saved(pieces: Sequence[Piece], runs: Sequence[Run], more: Sequence[int], backward: int) -> int:
    """Saved bytes of the blocks that the short trace lacks, at its ``backward``-th pass backward."""
    passes = sorted({(piece.step, piece.micro) for piece in pieces if piece.phase == "forward" and piece.block is not None})
    step, micro = passes[backward]
    return sum(
        n * sum(piece.saved for piece in of_block(pieces, run.middle, step, "forward", micro))
        for n, run in zip(more, runs, strict=True)
    )

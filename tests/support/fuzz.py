"""Random products on real ranks against dense float64. ``make fuzz`` runs many; a draw that fails is printed as JSON.

cd tests && python -m support.fuzz --draws 10000 --seed 1
cd tests && python -m support.fuzz --replay '{"form": "column", ...}'
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.reshard.conversion import Conversion
from shardwright.spec.edge import conversion, left_by
from support import dense, ranks
from support.draws import DTYPES, Draw, make
from support.ranks import on_ranks

TOLERANCES = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 0.02}
"""Of the largest entry of the same result computed with absolute values, which no cancellation makes small (relative
to the result itself that is at most ten times as much)."""
BATCH = 25


# -- one draw, on every rank -------------------------------------------------------------------------------------------


class _Transposed(torch.nn.Module):
    """A linear whose weight is stored as [K,N], as Hugging Face's Conv1D stores it."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous(), linear.weight.requires_grad)
        self.register_parameter("bias", linear.bias)


def _references(draw: Draw) -> list[list[torch.nn.Linear]]:
    """Dense linears in float64, with values that the draw's dtype can hold."""
    widths = [[(draw.k, n) for n in draw.n]]
    if draw.two:
        widths.append([(draw.n[0], draw.k)])
    sites, seed = [], 7 * draw.seed
    for i, site in enumerate(widths):
        linears = []
        for j, (k, n) in enumerate(site):
            linear = torch.nn.Linear(k, n, bias=draw.bias, dtype=torch.float64)
            for kind, parameter in zip("wb", linear.parameters(), strict=False):
                seed += 1
                parameter.data.copy_(_values(draw, *parameter.shape, seed=seed))
                parameter.requires_grad_(f"{i}.{kind}{j}" not in draw.frozen)
            linears.append(linear)
        sites.append(linears)
    return sites


def _values(draw: Draw, *shape: int, seed: int) -> torch.Tensor:
    return dense.random(*shape, seed=seed).to(DTYPES[draw.dtype]).double()


def _run(draw: Draw, sites: Sequence[Sequence[Callable[..., torch.Tensor]]], x: torch.Tensor, first: dict) -> list:
    """The outputs of all siblings (of the last site)."""

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [linear(x, **first) for linear in sites[0]]
        if draw.two:
            hidden = outputs[0]
            for output in outputs[1:]:
                hidden = hidden * output
            outputs = [sites[1][0](hidden)]
        return tuple(outputs)

    if draw.recompute and first:
        return list(checkpoint(block, x, use_reentrant=False))
    return list(block(x))


def _backward(draw: Draw, passes: Sequence[list], ups: Sequence[list]) -> None:
    for outputs, gradients in zip(passes, ups, strict=True):
        pairs = list(zip(outputs, gradients, strict=True))[: -1 if draw.unused else None]
        used = [(y, g) for y, g in pairs if y.requires_grad]
        if used:
            torch.autograd.backward([y for y, _ in used], [g for _, g in used])


def _dense(draw: Draw, absolute: bool) -> tuple[list, list, list[list[torch.nn.Linear]]]:
    """xs and outputs of every pass, and the references with their gradients; all of absolute values if asked."""
    change = torch.abs if absolute else torch.Tensor.clone
    sites = _references(draw)
    for linear in (linear for site in sites for linear in site):
        for parameter in linear.parameters():
            parameter.data.copy_(change(parameter.data))
    shape = (draw.tokens, draw.k)
    xs = [change(_values(draw, *shape, seed=draw.seed + i)) for i in range(draw.passes)]
    xs = [x.requires_grad_("x" not in draw.frozen) for x in xs]
    outputs = [_run(draw, sites, x, {}) for x in xs]
    _backward(draw, outputs, [[change(up) for up in ups] for ups in _upstream(draw)])
    return xs, outputs, sites


def _upstream(draw: Draw) -> list[list[torch.Tensor]]:
    widths = [draw.k] if draw.two else draw.n
    return [
        [_values(draw, draw.tokens, n, seed=draw.seed + 100 + 10 * i + j) for j, n in enumerate(widths)]
        for i in range(draw.passes)
    ]


def compute(draw: Draw) -> list[tuple[str, torch.Tensor | None, Any]]:
    """(name, this rank's result or None, its mesh and placements) of Y, dX and every parameter's gradient."""
    mesh = dense.mesh_of(**draw.axes)
    arena = sw.Runtime.of(mesh).arena
    arena.poison = draw.poison
    dtype = DTYPES[draw.dtype]
    sites: list[list[sw.GridLinear]] = []
    for layout, references in zip(draw.layouts, _references(draw), strict=True):
        linears = [linear.to(dtype) for linear in references]
        modules = [_Transposed(linear) for linear in linears] if draw.transposed else linears
        sites.append(sw.GridLinear.siblings(modules, layout, mesh))
    if draw.form == "mixed":
        _join(draw, sites, mesh)
    into, out = sites[0][0].input_placements, sites[-1][0].output_placements

    def local(whole: torch.Tensor, placements: Any) -> torch.Tensor:
        part = dense.part(whole.to(dtype), mesh, placements)
        return part if draw.ndim == 2 else part.unsqueeze(0)

    xs = [local(_values(draw, draw.tokens, draw.k, seed=draw.seed + i), into) for i in range(draw.passes)]
    xs = [x.requires_grad_("x" not in draw.frozen) for x in xs]
    rows = rows_of(draw.tokens, draw.layouts[0], mesh)
    outputs = [_run(draw, sites, x, {"tokens": rows}) for x in xs]
    results: list[tuple[str, torch.Tensor | None, Any]] = [
        (f"y{j} of pass {i}", _flat_tokens(y.detach().clone()), (mesh, out))
        for i, ys in enumerate(outputs)
        for j, y in enumerate(ys)
    ]
    _backward(draw, outputs, [[local(up, out) for up in ups] for ups in _upstream(draw)])
    del outputs
    arena.poison = False
    if arena.held:
        raise AssertionError(f"the arena still holds {arena.held} bytes")
    for i, x in enumerate(xs):
        results.append((f"dx of pass {i}", None if x.grad is None else _flat_tokens(x.grad), (mesh, into)))
    for i, site in enumerate(sites):
        for j, linear in enumerate(site):
            for kind, parameter in zip("wb", (linear.weight, linear.bias), strict=True):
                if parameter is not None:
                    grad = parameter.grad
                    if grad is not None and grad.placements != parameter.placements:
                        raise AssertionError(f"{i}.{kind}{j}: a gradient placed as {grad.placements}")
                    where = parameter.device_mesh, parameter.placements
                    results.append((f"d{i}.{kind}{j}", None if grad is None else grad.to_local(), where))
    return results


def _join(draw: Draw, sites: Sequence[Sequence[sw.GridLinear]], mesh: torch.distributed.DeviceMesh) -> None:
    """Puts the conversion of its edge before the second site, as parallelize does."""
    runtime, (first, second) = sw.Runtime.of(mesh), draw.layouts
    taken = second.input_token_axes, second.input_feature_axes
    site = sites[1][0].site
    site.before = Conversion(conversion(left_by(first), taken, (), draw.axes), runtime, draw.n[0], "edge")
    site.tokens, site.sequences = draw.tokens, runtime.group(second.m)


def _flat_tokens(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2)


def rows_of(tokens: int, layout: sw.GridLayout, mesh: torch.distributed.DeviceMesh) -> int:
    """T: the tokens of this rank's place on the m axes."""
    assert mesh.mesh_dim_names is not None
    placements = [Shard(0) if axis in layout.m else Replicate() for axis in mesh.mesh_dim_names]
    return dense.part(torch.empty(tokens, 0), mesh, placements).shape[0]


def twin(draw: Draw) -> Draw | None:
    """The blocking draw that must agree bit for bit: it cuts the same pieces.

    In bfloat16 only, where every rounding shows; in float32 and float64 BLAS rounds small products as their operands
    happen to be aligned.
    """
    alike = draw.overlap != "blocking" and draw.chunks > 0 and draw.dtype == "bfloat16"
    return dataclasses.replace(draw, overlap="blocking") if alike else None


def errors(draw: Draw) -> dict[str, float]:
    """Result → its error, relative (see TOLERANCES); raises where a result is missing, not due, or not its twin's."""
    results = compute(draw)
    found, other = dict[str, float](), twin(draw)
    if other is not None:
        for (name, a, _), (_, b, _) in zip(results, compute(other), strict=True):
            if a is not None and b is not None and not torch.equal(a, b):
                raise AssertionError(f"{name}: not blocking's, bit for bit")
    wholes, scales = (_flat(draw, *_dense(draw, absolute)) for absolute in (False, True))
    for name, local, (mesh, placements) in results:
        whole, scale = wholes[name], scales[name]
        if (local is None) != (whole is None):
            raise AssertionError(f"{name}: found {'nothing' if local is None else 'a result'}; dense says the contrary")
        if local is None:
            continue
        expected = dense.part(whole, mesh, placements)
        if local.shape != expected.shape or local.dtype != DTYPES[draw.dtype]:
            raise AssertionError(f"{name}: {local.dtype} {tuple(local.shape)}, dense {tuple(expected.shape)}")
        if local.numel():
            found[name] = dense.error(local.double(), expected) / scale.abs().max().item()
    return found


def _flat(draw: Draw, xs: list, outputs: list, sites: list) -> dict[str, torch.Tensor | None]:
    flat: dict[str, torch.Tensor | None] = {}
    for i, (x, ys) in enumerate(zip(xs, outputs, strict=True)):
        flat[f"dx of pass {i}"] = x.grad
        for j, y in enumerate(ys):
            flat[f"y{j} of pass {i}"] = y.detach()
    for i, site in enumerate(sites):
        for j, linear in enumerate(site):
            for kind, parameter in zip("wb", linear.parameters(), strict=False):
                grad = parameter.grad
                if grad is not None and kind == "w" and draw.transposed:
                    grad = grad.t()
                flat[f"d{i}.{kind}{j}"] = grad
    return flat


def check(draws: Sequence[Draw]) -> list[dict[str, float]]:
    """On a rank: the errors of every draw. What goes wrong names its draw, so that it can be run alone."""
    found = []
    for draw in draws:
        try:
            found.append(errors(draw))
        except Exception as error:
            raise AssertionError(f"{replay(draw)}\n{traceback.format_exc()}") from error
    return found


# -- many draws --------------------------------------------------------------------------------------------------------


def replay(draw: Draw) -> str:
    """The command that runs a draw alone."""
    return f"cd tests && python -m support.fuzz --replay '{draw.to_json()}'"


@dataclass(frozen=True)
class Outcome:
    """A draw, the errors that every rank found, and what was raised, if anything."""

    draw: Draw
    errors: tuple[dict[str, float], ...] = ()
    raised: str = ""

    @property
    def ratio(self) -> float:
        """The largest error over what is tolerated: above 1 is a failure."""
        if self.raised:
            return float("inf")
        worst = max((error for rank in self.errors for error in rank.values()), default=0.0)
        return worst / TOLERANCES[self.draw.dtype]

    @property
    def failure(self) -> str:
        """What to print where it failed: how to run the draw alone, and why."""
        if self.ratio <= 1:
            return ""
        return self.raised or f"{replay(self.draw)}\n{self.ratio:.1f} × tolerance: {self.errors}"


def run(draws: Sequence[Draw]) -> Iterator[Outcome]:
    """Every draw's outcome, in batches of draws that need as many ranks; where one raises, its batch one by one."""
    by_world: dict[int, list[Draw]] = {}
    for draw in draws:
        by_world.setdefault(draw.world, []).append(draw)
    for _, group in sorted(by_world.items()):
        for start in range(0, len(group), BATCH):
            yield from _together(group[start : start + BATCH])


def _together(batch: Sequence[Draw]) -> Iterator[Outcome]:
    try:
        answers = on_ranks(batch[0].world, check, batch)
    except (AssertionError, RuntimeError, EOFError) as error:  # the last two: a rank died
        ranks._drop(batch[0].world)
        if len(batch) == 1:
            yield Outcome(
                batch[0], raised=str(error) if replay(batch[0]) in str(error) else f"{replay(batch[0])}\n{error!r}"
            )
        else:
            for draw in batch:
                yield from _together([draw])
        return
    for draw, found in zip(batch, zip(*answers, strict=True), strict=True):
        yield Outcome(draw, tuple(found))


def modes(draws: Sequence[Draw]) -> Counter[str]:
    """How many draws of each overlap mode work on more than one rank of the axis that it concerns."""
    return Counter(draw.overlap for draw in draws if draw.tensor > 1)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", help="one draw, as a failure prints it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay:
        (outcome,) = run([Draw.from_json(options.replay)])
        for rank, found in enumerate(outcome.errors):
            print(f"rank {rank}: " + ", ".join(f"{name} {error:.2e}" for name, error in found.items()))
        print(outcome.failure)
        return int(outcome.ratio > 1)
    start, failed, done = time.monotonic(), 0, 0
    worst = dict.fromkeys(DTYPES, 0.0)
    drawn = Counter[str]()
    for first in range(0, options.draws, 500):
        draws = [make(options.seed, number) for number in range(first, min(first + 500, options.draws))]
        drawn += modes(draws)
        for outcome in run(draws):
            done += 1
            worst[outcome.draw.dtype] = max(worst[outcome.draw.dtype], outcome.ratio)
            if outcome.failure:
                failed += 1
                print(outcome.failure, flush=True)
        counted = ", ".join(f"{mode} {count}" for mode, count in sorted(drawn.items()))
        shares = ", ".join(f"{dtype} {share:.2f}" for dtype, share in worst.items())
        seconds = time.monotonic() - start
        print(f"{done} draws ({counted}), {failed} failed, {seconds:.0f} s; error/tolerance: {shares}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

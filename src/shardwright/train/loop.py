"""The training loop, as every rank runs it under torch's launcher.

    python -m torch.distributed.run --nproc-per-node N -m shardwright train RUN.yaml

Bad input is one line from rank 0 and exit status 2 on every rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright import mesh as mesh_math
from shardwright._errors import InputError
from shardwright._plan import Plan
from shardwright.train.data import TokenStream, encode_files, load_tokenizer
from shardwright.train.metrics import MetricsWriter
from shardwright.train.progress import StepProgress
from shardwright.train.run_file import Run

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

RECORDED_STEPS = 2
"""Steps that a recording covers: the moments of the optimizer appear in the first."""

REFUSAL_SECONDS = 30.0
"""How long a rank that refuses its input waits for the others to refuse it too."""

METRICS, TOKENS = "metrics.jsonl", "tokens.npy"
"""Files of a run's output directory; `trace_name` tells the third."""

MicroBatches = list[tuple["torch.Tensor", "torch.Tensor"]]


def trace_name(rank: int) -> str:
    """The file of a rank's trace in the output directory."""
    return f"trace-rank{rank}.json.gz"


def data_place(plan: Plan, rank: int) -> tuple[int, int]:
    """(index, size) of ``rank`` among the plan's data ranks, which share out the rows of a batch."""
    place = mesh_math.coordinates(rank, plan.mesh)
    index, size = 0, 1
    for axis in plan.data_axes:
        index, size = index * plan.mesh[axis] + place[axis], size * plan.mesh[axis]
    return index, size


@dataclass(frozen=True)
class Place:
    """Where this process stands, as the launcher tells it: rank and world over all machines, local on this one."""

    rank: int
    world: int
    local: int

    @classmethod
    def from_environment(cls, run_path: Path) -> Place:
        """InputError, with the command that starts the ranks, where no launcher set the environment."""
        try:
            return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
        except (KeyError, ValueError):
            raise InputError(
                "train: found no RANK, WORLD_SIZE and LOCAL_RANK in the environment; allowed: python -m "
                f"torch.distributed.run --nproc-per-node N -m shardwright train {run_path}"
            ) from None


def train(run_path: Path | str) -> None:
    """Trains what ``run_path`` says, on this rank among the launcher's. Exits with 2 on bad input."""
    run_path = Path(run_path)
    place = Place.from_environment(run_path)

    from torch.distributed import destroy_process_group, is_initialized
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    try:
        _train(run_path, place, store)
    except InputError as error:
        _refuse(error, place, store)
    if is_initialized():
        destroy_process_group()


def _refuse(error: InputError, place: Place, store: Store) -> None:
    """Ends this rank with 2, not before every rank refuses: the launcher ends the others when the first has exited."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if place.rank == 0:
        print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    deadline = time.monotonic() + REFUSAL_SECONDS
    refused = store.add("shardwright/refused", 1)
    while refused < place.world and time.monotonic() < deadline:
        time.sleep(0.02)
        refused = store.add("shardwright/refused", 0)
    sys.exit(2)


def _train(run_path: Path, place: Place, store: Store) -> None:
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh

    from shardwright import models
    from shardwright._parallelize import parallelize
    from shardwright.step import TrainStep, record_steps

    run = Run.load(run_path)
    plan = Plan.load(run.plan_path)
    plan.check_world_size(place.world)
    index, size = data_place(plan, place.rank)
    if plan.batch % size:
        raise InputError(f"batch: found {plan.batch}; allowed: a multiple of the {size} data ranks")
    if plan.backend == "nccl" and torch.cuda.device_count() <= place.local:
        raise InputError(
            f"backend: found nccl with {torch.cuda.device_count()} GPUs; allowed: one for each rank, or gloo"
        )
    config = models.load_config(plan.config_path)
    tokenizer = load_tokenizer(run.tokenizer_path)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"tokenizer: found {tokenizer.get_vocab_size()} tokens; allowed: at most the model's {config.vocab_size}"
        )
    output = run.output_dir
    output.mkdir(parents=True, exist_ok=True)
    if place.local == 0:
        encode_files(run.text_paths, tokenizer, output / TOKENS)

    if plan.backend == "nccl":
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    torch.distributed.init_process_group(plan.backend, store=store, rank=place.rank, world_size=place.world)
    torch.distributed.barrier()  # the tokens are on disk
    mesh: DeviceMesh = init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    model = parallelize(models.build_meta(config, plan.dtype), mesh, plan)
    step = TrainStep(model, mesh, plan, learning_rate=run.learning_rate, weight_decay=run.weight_decay, betas=run.betas)
    stream = TokenStream.load(output / TOKENS, plan.seed)

    def batches(number: int) -> MicroBatches:
        drawn = (
            stream.batch_at(number, micro, batch=plan.batch, sequence=plan.sequence, data_index=index, data_size=size)
            for micro in range(plan.accumulation)
        )
        return [(inputs.to(device), labels.to(device)) for inputs, labels in drawn]

    tokens = plan.batch * plan.sequence * plan.accumulation
    with ExitStack() as shown:
        writer = shown.enter_context(MetricsWriter(output / METRICS)) if place.rank == 0 else None
        progress = shown.enter_context(StepProgress(run.steps)) if place.rank == 0 else None

        def tell(number: int, loss: float, seconds: float, peak: int | None) -> None:
            if writer is not None and progress is not None:
                rate = tokens / seconds
                writer.write(step=number, loss=loss, tokens_per_second=rate, seconds=seconds, peak_bytes=peak)
                progress.show(number, loss, rate)

        recorded = min(RECORDED_STEPS, run.steps) if run.record else 0
        if recorded:
            began = time.perf_counter()
            losses, trace = record_steps(step, [batches(number) for number in range(1, recorded + 1)])
            seconds = (time.perf_counter() - began) / recorded  # the mean: nothing is read between recorded steps
            trace.save(output / trace_name(place.rank))
            for number, loss in enumerate(losses, start=1):
                tell(number, loss.item(), seconds, trace.peak_bytes)
        for number in range(recorded + 1, run.steps + 1):
            began = time.perf_counter()
            mean = step(batches(number)).item()
            tell(number, mean, time.perf_counter() - began, _device_peak(device))
    torch.distributed.barrier()


def _device_peak(device: torch.device) -> int | None:
    """The most bytes that torch allocated on the device so far; unknown on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

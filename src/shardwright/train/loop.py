"""The training loop, as every rank runs it under torch's launcher.

    python -m torch.distributed.run --nproc-per-node N -m shardwright train RUN.yaml

Bad input is one line from rank 0 and exit status 2 on every rank; what does not fit, 3.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.comm.launched import Place, join, refuse, tell
from shardwright.errors import DoesNotFit, InputError
from shardwright.spec import mesh as mesh_math
from shardwright.spec.plan import Plan
from shardwright.train.data import TokenStream
from shardwright.train.metrics import MetricsWriter, Writer, forget_metrics_after, step_metrics
from shardwright.train.preparation import (
    EVALUATION_TOKENS,
    TOKENS,
    check_same_run,
    fingerprint,
    prepare,
    stated,
    vocabulary,
)
from shardwright.train.progress import StepProgress
from shardwright.train.run_file import Run
from shardwright.train.tensorboard import TensorBoardWriter

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

    from shardwright.checkpoint.manifest import RunState
    from shardwright.step.train_step import TrainStep

RECORDED_STEPS = 2
"""Steps that a recording covers: the moments of the optimizer appear in the first."""

METRICS, EVENTS = "metrics.jsonl", "tensorboard"
"""What a run's output directory holds beside its tokens; `trace_name` tells the rest."""

WRITERS: dict[str, Callable[..., Writer]] = {
    "jsonl": lambda output, done=0: MetricsWriter(output / METRICS),
    "tensorboard": lambda output, done=0: TensorBoardWriter(output / EVENTS, done + 1 if done else None),
}
"""Writers of metrics, of an output directory and the steps done before, by the name that run files use."""

MicroBatches = list[tuple["torch.Tensor", "torch.Tensor"]]


def trace_name(rank: int) -> str:
    """The file of a rank's trace in the output directory."""
    return f"trace-rank{rank}.json.gz"


def data_place(plan: Plan, rank: int) -> tuple[int, int]:
    """(index, size) of ``rank`` among the ranks that share out the sequences of a batch."""
    place = mesh_math.coordinates(rank, plan.mesh)
    index, size = 0, 1
    for axis in plan.batch_axes:
        index, size = index * plan.mesh[axis] + place[axis], size * plan.mesh[axis]
    return index, size


def train(run_path: Path | str) -> None:
    """Trains what ``run_path`` says, on this rank among the launcher's.

    Exits with 2 on bad input, with 3 where the plan needs more than the run's cluster has.
    """
    run_path = Path(run_path)
    place = Place.from_environment(f"train {run_path}")

    fault: InputError | DoesNotFit | None = None
    try:  # what the files say is checked before anything slow is imported
        run, plan = stated(run_path, place.world)
    except (InputError, DoesNotFit) as error:
        tell(error, place)
        fault = error
    store = join(place)
    if fault is not None:
        refuse(fault, place, store, told=True)

    from torch.distributed import destroy_process_group, is_initialized

    try:
        _train(run, plan, place, store)
    except (InputError, DoesNotFit) as error:
        refuse(error, place, store)
    if is_initialized():
        destroy_process_group()


def _train(run: Run, plan: Plan, place: Place, store: Store) -> None:
    from shardwright.checkpoint.export import ExportedTokenizer, save_pretrained
    from shardwright.models.build import build_meta
    from shardwright.models.config import load_config
    from shardwright.models.fits import check_fits
    from shardwright.models.parallelize import put
    from shardwright.step.train_step import TrainStep

    _check_devices(plan, place)
    config = load_config(plan.config_path)
    tokenizer, ending = vocabulary(run, config)
    model = build_meta(config, plan.stored_dtype)
    check_fits(model, plan)
    resumed = prepare(run, plan, place, store, tokenizer, ending)
    batches = _Batches.load(run, plan, place)
    mesh, batches.device = _join_mesh(plan, place, store)
    put(model, mesh, plan, _source(run, model, resumed, batches.device))
    step = TrainStep(
        model,
        mesh,
        plan,
        learning_rate=run.learning_rate,
        weight_decay=run.weight_decay,
        betas=run.betas,
        max_grad_norm=run.max_grad_norm,
    )
    session = _Session(run, plan, place, model, step, batches)
    done = session.resume(resumed) if resumed is not None else 0
    with ExitStack() as shown:
        if place.rank == 0:
            if done:
                print(f"continues after step {done} from {resumed}", flush=True)
                forget_metrics_after(run.output_dir / METRICS, done)
            _tell_remarks(config, plan, run.learning_rate)
            session.writers = [shown.enter_context(WRITERS[kind](run.output_dir, done)) for kind in run.metrics]
            session.progress = shown.enter_context(StepProgress(run.steps))
        session.train(done)
    if run.export_dir is not None:
        save_pretrained(model, run.export_dir, tokenizer=ExportedTokenizer(run.tokenizer_path, ending))
    _barrier()


def _check_devices(plan: Plan, place: Place) -> None:
    import torch

    if plan.backend == "nccl" and torch.cuda.device_count() <= place.local:
        raise InputError(
            f"backend: found nccl with {torch.cuda.device_count()} GPUs; allowed: one for each rank, or gloo"
        )


def _join_mesh(plan: Plan, place: Place, store: Store) -> tuple[DeviceMesh, torch.device]:
    """The plan's mesh over the launcher's ranks, and this rank's device."""
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh

    if plan.backend == "nccl":
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    torch.distributed.init_process_group(plan.backend, store=store, rank=place.rank, world_size=place.world)
    return init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh)), device


def _barrier() -> None:
    import torch.distributed

    torch.distributed.barrier()


def _source(run: Run, model: Any, resumed: Path | None, device: torch.device) -> Any:
    """Where shards get their values: a checkpoint fills them later, else weights from files, else the plan's seed."""
    from shardwright.checkpoint.pretrained import from_safetensors
    from shardwright.values.initial import Unfilled

    if resumed is not None:
        return Unfilled(device)
    if run.weights_dir is not None:
        return from_safetensors(run.weights_dir, {module: name for name, module in model.named_modules()}, device)
    return None


@dataclass
class _Batches:
    """This rank's batches. index, size: its place among the ranks that share out the sequences."""

    plan: Plan
    index: int
    size: int
    training: TokenStream
    held_out: TokenStream
    device: torch.device | None = None

    @classmethod
    def load(cls, run: Run, plan: Plan, place: Place) -> _Batches:
        """The tokens that ``prepare`` wrote. Raises InputError where they are fewer than a sequence."""
        index, size = data_place(plan, place.rank)
        training = TokenStream.load(run.output_dir / TOKENS, plan.seed)
        training.check_length(plan.sequence, "data")
        held_out = training
        if run.evaluation is not None:
            held_out = TokenStream.load(run.output_dir / EVALUATION_TOKENS, plan.seed)
        held_out.check_length(plan.sequence, "evaluation")
        return cls(plan, index, size, training, held_out)

    def of(self, stream: TokenStream, number: int, count: int) -> MicroBatches:
        """``count`` micro-batches of step ``number``."""
        plan = self.plan
        drawn = (
            stream.batch_at(
                number,
                micro,
                batch=plan.micro_batch,
                sequence=plan.sequence,
                data_index=self.index,
                data_size=self.size,
            )
            for micro in range(count)
        )
        return [(inputs.to(self.device), labels.to(self.device)) for inputs, labels in drawn]


@dataclass
class _Session:
    """One rank's steps: what is trained, evaluated, told and saved after each. writers, progress: on rank 0 only."""

    run: Run
    plan: Plan
    place: Place
    model: Any
    step: TrainStep
    batches: _Batches
    writers: Sequence[Writer] = ()
    progress: StepProgress | None = None

    def resume(self, path: Path) -> int:
        """Fills model and optimizer from the checkpoint; the steps done. InputError where it is of another run."""
        from shardwright.checkpoint.manifest import Manifest
        from shardwright.checkpoint.training_state import load

        check_same_run(path, Manifest.load(path).state, self._state(0))
        return load(path, self.model, self.step.optimizer).step

    def train(self, done: int) -> None:
        """The steps after ``done``; the first ones recorded, where the run asks for it."""
        recorded = min(RECORDED_STEPS, self.run.steps) if self.run.record and not done else 0
        if recorded:
            self._record(recorded)
        for number in range(max(recorded, done) + 1, self.run.steps + 1):
            began = time.perf_counter()
            mean = self.step(self.batches.of(self.batches.training, number, self.plan.accumulation)).item()
            seconds = time.perf_counter() - began
            self._write(number, mean, seconds, _device_peak(self.batches.device), self._evaluated(number))
            self._save_if_due(number)

    def _record(self, count: int) -> None:
        from shardwright.step.train_step import record_steps

        began = time.perf_counter()
        training, micro_batches = self.batches.training, self.plan.accumulation
        chosen = [self.batches.of(training, number, micro_batches) for number in range(1, count + 1)]
        losses, trace = record_steps(self.step, chosen)
        seconds = (time.perf_counter() - began) / count  # the mean: nothing is read between recorded steps
        trace.save(self.run.output_dir / trace_name(self.place.rank))
        for number, loss in enumerate(losses, start=1):
            held = self._evaluated(number) if number == count else None
            self._write(number, loss.item(), seconds, trace.peak_bytes, held)
        self._save_if_due(count)

    def _evaluated(self, number: int) -> float | None:
        """The loss on held-out data after step ``number``, where it is due: on the same batches every time."""
        evaluation = self.run.evaluation
        if evaluation is None or number % evaluation.every:
            return None
        return self.step.evaluate(self.batches.of(self.batches.held_out, 0, evaluation.batches)).item()

    def _write(self, number: int, loss: float, seconds: float, peak: int | None, held_out_loss: float | None) -> None:
        rate = self.plan.global_batch * self.plan.sequence / seconds
        values = step_metrics(
            loss=loss, tokens_per_second=rate, seconds=seconds, peak_bytes=peak, evaluation_loss=held_out_loss
        )
        for writer in self.writers:
            writer.write(number, values)
        if self.progress is not None:
            self.progress.show(number, loss, rate)

    def _state(self, number: int) -> RunState:
        from shardwright.checkpoint.manifest import RunState

        plan, tokens = self.plan, len(self.batches.training.tokens)
        return RunState(step=number, seed=plan.seed, tokens=tokens, model=plan.model.sha256, plan=fingerprint(plan))

    def _save_if_due(self, number: int) -> None:
        from shardwright.checkpoint.training_state import save

        due, directory = self.run.checkpoint, self.run.checkpoint_dir
        if due is not None and directory is not None and (number % due.every == 0 or number == self.run.steps):
            save(directory, self.model, self.step.optimizer, self._state(number), due.keep)


def _tell_remarks(config: Any, plan: Plan, learning_rate: float) -> None:
    """Says what of the plan could not be applied, and what may not go as it is meant."""
    from shardwright.models.remarks import not_applied, warnings_of

    for each in not_applied(config, plan):
        print(each, flush=True)
    for line in warnings_of(config, plan, learning_rate):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def _device_peak(device: torch.device | None) -> int | None:
    """The most bytes that torch allocated on the device so far; unknown on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device is not None and device.type == "cuda" else None

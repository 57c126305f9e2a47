"""The training loop, as every rank runs it under torch's launcher.

    python -m torch.distributed.run --nproc-per-node N -m shardwright train RUN.yaml

Bad input is one line from rank 0 and exit status 2 on every rank; what does not fit, 3.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.comm.launched import POLL_SECONDS, Place, join, refuse, tell
from shardwright.errors import DOES_NOT_FIT, DoesNotFit, InputError
from shardwright.spec import mesh as mesh_math
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import ANSWERS, Plan
from shardwright.train.data import TokenStream, encode_documents, end_token, load_tokenizer
from shardwright.train.metrics import MetricsWriter, Writer, forget_metrics_after, step_metrics
from shardwright.train.progress import StepProgress
from shardwright.train.run_file import Run
from shardwright.train.sources import documents
from shardwright.train.tensorboard import TensorBoardWriter

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

    from shardwright.checkpoint.manifest import RunState

RECORDED_STEPS = 2
"""Steps that a recording covers: the moments of the optimizer appear in the first."""

RESUME = "shardwright/resume"
"""Where the ranks' store tells from which checkpoint they continue; empty: from the beginning."""

METRICS, EVENTS = "metrics.jsonl", "tensorboard"
TOKENS, EVALUATION_TOKENS = "tokens.npy", "evaluation-tokens.npy"
"""What a run's output directory holds; `trace_name` tells the rest."""

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


def _on_each_machine(work: Callable[[], None], place: Place, store: Store) -> None:
    """Does ``work`` on one rank of each machine while all others wait, however long; what one refuses all refuse."""
    if place.local == 0:
        try:
            work()
        except (InputError, DoesNotFit) as error:
            store.set("shardwright/fault", json.dumps([isinstance(error, DoesNotFit), str(error)]))
    done = store.add("shardwright/prepared", 1)
    while done < place.world:
        time.sleep(POLL_SECONDS)
        done = store.add("shardwright/prepared", 0)
    if store.check(["shardwright/fault"]):
        too_large, line = json.loads(store.get("shardwright/fault"))
        raise DoesNotFit(line) if too_large else InputError(line)


def _write_tokens(run: Run, tokenizer: Tokenizer, ending: str) -> None:
    """Makes the output directory and writes the tokens of the run's documents into it."""
    output = run.output_dir
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output: found {output} ({error.strerror}); allowed: a directory that can be made") from None
    for source, name in ((run.data, TOKENS), (run.evaluation, EVALUATION_TOKENS)):
        if source is not None:
            found = documents(source.kind, run.source_paths(source), source.field)
            encode_documents(found, tokenizer, output / name, ending)


def stated(run_path: Path, ranks: int) -> tuple[Run, Plan]:
    """The run and its plan, checked against the ranks that there are, and the run's cluster.

    Raises InputError, one line; DoesNotFit where the plan predicts more than a device of the cluster has.
    """
    run = Run.load(run_path)
    plan = Plan.load(run.plan_path)
    plan.check_world_size(ranks)
    if run.cluster_path is not None:
        cluster = Cluster.load(run.cluster_path)
        cluster.check_devices(plan.world_size, str(run.cluster_path))
        if plan.predicted is not None:
            cluster.check_peak(max(plan.predicted.peak.values()), "the plan predicts a peak of")
    return run, plan


def _check_peak(run: Run, plan: Plan) -> None:
    """Raises DoesNotFit where a plan that predicts nothing of itself, rehearsed on rank 0, needs more than a device of
    the run's cluster has.
    """
    if run.cluster_path is None or plan.predicted is not None:
        return
    words = ["rehearse", str(run.plan_path), "--cluster", str(run.cluster_path)]
    done = subprocess.run([sys.executable, "-m", "shardwright", *words], capture_output=True, text=True, check=False)
    line = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
    if done.returncode == DOES_NOT_FIT:
        raise DoesNotFit(line)
    if done.returncode:
        raise InputError(f"cluster: found a plan that could not be rehearsed ({line}); allowed: one that can")


def _train(run: Run, plan: Plan, place: Place, store: Store) -> None:
    index, size = data_place(plan, place.rank)

    import torch
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh

    from shardwright.checkpoint.export import ExportedTokenizer, save_pretrained
    from shardwright.checkpoint.manifest import Manifest, RunState
    from shardwright.checkpoint.pretrained import from_safetensors
    from shardwright.checkpoint.training_state import latest, load, save
    from shardwright.models.build import build_meta
    from shardwright.models.config import load_config
    from shardwright.models.parallelize import check_fits, put
    from shardwright.step.train_step import TrainStep, record_steps
    from shardwright.values.initial import Source, Unfilled

    if plan.backend == "nccl" and torch.cuda.device_count() <= place.local:
        raise InputError(
            f"backend: found nccl with {torch.cuda.device_count()} GPUs; allowed: one for each rank, or gloo"
        )
    config = load_config(plan.config_path)
    tokenizer = load_tokenizer(run.tokenizer_path)
    ending = end_token(tokenizer, run.tokenizer_path, run.data.end_token)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"tokenizer: found {tokenizer.get_vocab_size()} tokens; allowed: at most the model's {config.vocab_size}"
        )

    model = build_meta(config, plan.stored_dtype)
    check_fits(model, plan)

    def prepare() -> None:
        if place.rank == 0:  # one rank looks, so that all continue from the same
            found = latest(run.checkpoint_dir) if run.checkpoint_dir is not None else None
            store.set(RESUME, str(found or ""))
            _check_peak(run, plan)
        _write_tokens(run, tokenizer, ending)

    _on_each_machine(prepare, place, store)
    resumed = store.get(RESUME).decode()
    output = run.output_dir
    stream = TokenStream.load(output / TOKENS, plan.seed)
    stream.check_length(plan.sequence, "data")
    held_out = TokenStream.load(output / EVALUATION_TOKENS, plan.seed) if run.evaluation is not None else stream
    held_out.check_length(plan.sequence, "evaluation")

    if plan.backend == "nccl":
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    torch.distributed.init_process_group(plan.backend, store=store, rank=place.rank, world_size=place.world)
    mesh: DeviceMesh = init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    source: Source | None = None
    if resumed:
        source = Unfilled(device)  # every value comes from the checkpoint
    elif run.weights_dir is not None:
        source = from_safetensors(run.weights_dir, {module: name for name, module in model.named_modules()}, device)
    put(model, mesh, plan, source)
    step = TrainStep(
        model,
        mesh,
        plan,
        learning_rate=run.learning_rate,
        weight_decay=run.weight_decay,
        betas=run.betas,
        max_grad_norm=run.max_grad_norm,
    )

    def batches(source: TokenStream, number: int, count: int) -> MicroBatches:
        drawn = (
            source.batch_at(number, micro, batch=plan.batch, sequence=plan.sequence, data_index=index, data_size=size)
            for micro in range(count)
        )
        return [(inputs.to(device), labels.to(device)) for inputs, labels in drawn]

    def evaluated(number: int) -> float | None:
        """The loss on held-out data after step ``number``, where it is due: on the same batches every time."""
        if run.evaluation is None or number % run.evaluation.every:
            return None
        return step.evaluate(batches(held_out, 0, run.evaluation.batches)).item()

    def state(number: int) -> RunState:
        return RunState(
            step=number, seed=plan.seed, tokens=len(stream.tokens), model=plan.model.sha256, plan=_fingerprint(plan)
        )

    def save_if_due(number: int) -> None:
        if run.checkpoint is not None and (number % run.checkpoint.every == 0 or number == run.steps):
            save(_given(run.checkpoint_dir), model, step.optimizer, state(number), run.checkpoint.keep)

    done = 0
    if resumed:
        _check_same_run(Path(resumed), Manifest.load(Path(resumed)).state, state(0))
        done = load(Path(resumed), model, step.optimizer).step
    tokens = plan.batch * plan.sequence * plan.accumulation
    with ExitStack() as shown:
        first = place.rank == 0
        if first and done:
            print(f"continues after step {done} from {resumed}", flush=True)
            forget_metrics_after(output / METRICS, done)
        if first:
            _tell_remarks(config, plan, run.learning_rate)
        writers = [shown.enter_context(WRITERS[kind](output, done)) for kind in run.metrics] if first else []
        progress = shown.enter_context(StepProgress(run.steps)) if first else None

        def write(number: int, loss: float, seconds: float, peak: int | None, held_out_loss: float | None) -> None:
            rate = tokens / seconds
            values = step_metrics(
                loss=loss, tokens_per_second=rate, seconds=seconds, peak_bytes=peak, evaluation_loss=held_out_loss
            )
            for writer in writers:
                writer.write(number, values)
            if progress is not None:
                progress.show(number, loss, rate)

        recorded = min(RECORDED_STEPS, run.steps) if run.record and not done else 0
        if recorded:
            began = time.perf_counter()
            chosen = [batches(stream, number, plan.accumulation) for number in range(1, recorded + 1)]
            losses, trace = record_steps(step, chosen)
            seconds = (time.perf_counter() - began) / recorded  # the mean: nothing is read between recorded steps
            trace.save(output / trace_name(place.rank))
            for number, loss in enumerate(losses, start=1):
                held = evaluated(number) if number == recorded else None
                write(number, loss.item(), seconds, trace.peak_bytes, held)
            save_if_due(recorded)
        for number in range(max(recorded, done) + 1, run.steps + 1):
            began = time.perf_counter()
            mean = step(batches(stream, number, plan.accumulation)).item()
            seconds = time.perf_counter() - began
            write(number, mean, seconds, _device_peak(device), evaluated(number))
            save_if_due(number)
    if run.export_dir is not None:
        save_pretrained(model, run.export_dir, tokenizer=ExportedTokenizer(run.tokenizer_path, ending))
    torch.distributed.barrier()


def _tell_remarks(config: Any, plan: Plan, learning_rate: float) -> None:
    """Says what of the plan could not be applied, and what may not go as it is meant."""
    from shardwright.models.remarks import not_applied, warnings_of

    for each in not_applied(config, plan):
        print(each, flush=True)
    for line in warnings_of(config, plan, learning_rate):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def _given(path: Path | None) -> Path:
    assert path is not None
    return path


def _fingerprint(plan: Plan) -> str:
    """SHA-256 of what a plan states, what it predicts left out."""
    stated = plan.model_dump(exclude=set(ANSWERS))
    return hashlib.sha256(json.dumps(stated, default=str).encode()).hexdigest()


def _check_same_run(path: Path, found: RunState, own: RunState) -> None:
    """InputError where the checkpoint at ``path`` is of another model, or of other data: its curve would not go on."""
    for name, what in (("model", "SHA-256 of the config"), ("seed", "seed"), ("tokens", "tokens of the data")):
        if getattr(found, name) != getattr(own, name):
            raise InputError(
                f"{path}: {name}: found {getattr(found, name)} as the {what}; allowed: {getattr(own, name)}, that of "
                "this run (or checkpoints in another directory)"
            )


def _device_peak(device: torch.device) -> int | None:
    """The most bytes that torch allocated on the device so far; unknown on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

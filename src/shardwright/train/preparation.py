"""What comes before a run's first step: what its files state, checked; its tokens written; where it continues.

Nothing here loads torch before the files are known to be good.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.comm.launched import POLL_SECONDS, Place
from shardwright.errors import DOES_NOT_FIT, DoesNotFit, InputError
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import ANSWERS, Plan
from shardwright.train.data import encode_documents, end_token, load_tokenizer
from shardwright.train.run_file import Run
from shardwright.train.sources import documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch.distributed.distributed_c10d import Store

    from shardwright.checkpoint.manifest import RunState

RESUME = "shardwright/resume"
"""Where the ranks' store tells from which checkpoint they continue; empty: from the beginning."""

TOKENS, EVALUATION_TOKENS = "tokens.npy", "evaluation-tokens.npy"
"""The run's tokens in its output directory."""


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


def vocabulary(run: Run, config: Any) -> tuple[Tokenizer, str]:
    """The run's tokenizer and its end token. Raises InputError where it has more tokens than the model."""
    tokenizer = load_tokenizer(run.tokenizer_path)
    ending = end_token(tokenizer, run.tokenizer_path, run.data.end_token)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InputError(
            f"tokenizer: found {tokenizer.get_vocab_size()} tokens; allowed: at most the model's {config.vocab_size}"
        )
    return tokenizer, ending


def prepare(run: Run, plan: Plan, place: Place, store: Store, tokenizer: Tokenizer, ending: str) -> Path | None:
    """Writes the run's tokens, once a machine; the checkpoint from which every rank continues, None: from the start."""
    from shardwright.checkpoint.training_state import latest

    def work() -> None:
        if place.rank == 0:  # one rank looks, so that all continue from the same
            found = latest(run.checkpoint_dir) if run.checkpoint_dir is not None else None
            store.set(RESUME, str(found or ""))
            _check_peak(run, plan)
        _write_tokens(run, tokenizer, ending)

    _on_each_machine(work, place, store)
    resumed = store.get(RESUME).decode()
    return Path(resumed) if resumed else None


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


def fingerprint(plan: Plan) -> str:
    """SHA-256 of what a plan states, what it predicts left out."""
    stated = plan.model_dump(exclude=set(ANSWERS))
    return hashlib.sha256(json.dumps(stated, default=str).encode()).hexdigest()


def check_same_run(path: Path, found: RunState, own: RunState) -> None:
    """InputError where the checkpoint at ``path`` is of another model, or of other data: its curve would not go on."""
    for name, what in (("model", "SHA-256 of the config"), ("seed", "seed"), ("tokens", "tokens of the data")):
        if getattr(found, name) != getattr(own, name):
            raise InputError(
                f"{path}: {name}: found {getattr(found, name)} as the {what}; allowed: {getattr(own, name)}, that of "
                "this run (or checkpoints in another directory)"
            )

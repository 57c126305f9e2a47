"""Models without a rule table for tests: tiny plans, the unmodified model beside, and errors against it."""

from __future__ import annotations

import torch
import transformers

import shardwright as sw
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.step.train_step import record_steps
from shardwright.values.placement import cut
from support import dense, tiny
from support.unruled import FAMILIES

BATCH, SEQUENCE = 4, 11


def path_of(family, **changes):
    return tiny.write_config({"model_type": family, **FAMILIES[family], **changes})


def plan_of(path, ranks=1, **changes):
    changes = {"micro_batch": BATCH, "sequence": SEQUENCE, "fallback": True, **changes}
    return tiny.plan_of({"data": ranks}, "replicate", path, **changes)


def numbers(seed):
    return torch.randint(3, 40, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def rows_of(mesh, whole):
    """This rank's rows of a batch."""
    place = sw.Runtime.of(mesh).group(("data",))
    return whole.chunk(place.size)[place.index].clone()


def dense_of(model, path, attention="eager"):
    """The unmodified model with the values of a parallelized one."""
    config = load_config(path)
    config.use_cache = False
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    reference.load_state_dict(whole)
    return reference.train()


def errors_of(model, mesh, reference, **more):
    """The largest errors of loss and gradients of a training forward, against the reference on the whole batch."""
    ids, labels = numbers(1), numbers(2)
    labels[:, 2:4] = -100
    if "attention_mask" in more:
        labels[more["attention_mask"] == 0] = -100
    count, own = (labels != -100).sum(), rows_of(mesh, labels)
    given = {name: rows_of(mesh, value) for name, value in more.items()}
    ours = rows_of(mesh, ids)
    loss = model(input_ids=ours, labels=own, shift_labels=own, num_items_in_batch=count, **given).loss
    loss.backward()
    logits = reference(input_ids=ids, **more).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    errors = {"loss": dense.error(total, expected)}
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        local = torch.zeros_like(ours.to_local()) if ours.grad is None else ours.grad.to_local()
        scale = max(1e-3, wanted.abs().max().item())
        if local.numel():
            errors[name] = dense.error(local, cut(wanted, ours.device_mesh, ours.placements)) / scale
    model.zero_grad()
    return errors


def built(plan, path, source=None):
    mesh = dense.mesh_of(**plan.mesh)
    return sw.parallelize(build_meta(load_config(path)), mesh, plan, source)


def against_own_code(path, plan):
    """(errors of loss and gradients, the trace of a step before) on this rank."""
    model, mesh = tiny.build(plan, path)
    step = sw.TrainStep(model, mesh, plan)
    _, trace = record_steps(step, [[(rows_of(mesh, numbers(3)), rows_of(mesh, numbers(4)))]])
    return errors_of(model, mesh, dense_of(model, path)), trace

"""What tests compare with: Hugging Face's unmodified models in float64, and the record of a real run."""

from __future__ import annotations

import collections
import functools

import torch
from transformers import AttentionInterface

import shardwright as sw
from shardwright.comm.collectives import all_reduce
from shardwright.models.build import build_meta
from shardwright.models.config import load_config
from shardwright.values.placement import cut
from support import dense, tiny


def dense_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, **_):
    """Attention by its definition, in the tensors' own precision."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    far = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None, :]
    seen = (far >= 0) & (far < (sliding_window or query.shape[2]))
    return (torch.where(seen, scores, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


def in_float64(reference):
    """Hugging Face normalises in fp32 whatever the model: compare in float64."""
    AttentionInterface.register("dense64", dense_attention)
    reference.config._attn_implementation = "dense64"
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm64, module)


def norm64(module, x):
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = module.weight + 1 if type(module).__name__.startswith("Gemma") else module.weight
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def both(path, plan, mesh):
    """(the parallelized model, the reference), of equal random values."""
    config = load_config(path)
    reference = build_meta(config, "float64").to_empty(device="cpu")
    reference.tie_weights()
    with torch.no_grad():
        for index, parameter in enumerate(reference.parameters()):
            parameter.copy_(0.2 * dense.random(*parameter.shape, seed=index) + (parameter.dim() == 1))
        for module in reference.modules():
            if module._buffers:
                for name, buffer in module._buffers.items():
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
                reference._init_weights(module)
    model = build_meta(config, "float64").to_empty(device="cpu")
    model.tie_weights()  # moving off the meta device unties
    for (_, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        a.data.copy_(b.data)
    for a, b in zip(model.modules(), reference.modules(), strict=True):
        for name in a._buffers:
            a._buffers[name] = b._buffers[name].clone()
    in_float64(reference)
    names = list(model.state_dict())
    model = sw.parallelize(model, mesh, plan)
    assert list(model.state_dict()) == names
    return model, reference


def against_hugging_face(path, axes, layout, batch=tiny.BATCH, sequence=tiny.SEQUENCE, own_mask=False):
    """The largest errors of loss and gradients against the unmodified model in float64; released memory is spoiled."""
    plan = tiny.plan_of(axes, layout, path, dtype="float64", micro_batch=batch, sequence=sequence)
    mesh = dense.mesh_of(**axes)
    model, reference = both(path, plan, mesh)
    if own_mask:
        reference.config._attn_implementation = "sdpa"
    sw.Runtime.of(mesh).arena.poison = True
    vocab = reference.config.vocab_size
    ids = torch.randint(0, vocab, (batch, sequence), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 3:5] = -100
    data = sw.Runtime.of(mesh).group(plan.batch_axes)
    piece = -(-batch // data.size)
    mine = slice(data.index * piece, (data.index + 1) * piece)
    out = model(input_ids=ids[mine], labels=labels[mine])
    out.loss.backward()
    logits = reference(input_ids=ids, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    total = out.loss.detach().clone()
    all_reduce(total, model.loss_function.over_vocabulary.shares)
    errors = {"loss": dense.error(total, expected)}
    for (name, parameter), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        local = parameter.grad.to_local()
        if local.numel():
            errors[name] = (
                dense.error(local, cut(other.grad, parameter.device_mesh, parameter.placements))
                / other.grad.abs().max().item()
            )
    sw.Runtime.of(mesh).arena.poison = False
    return errors


def assert_same(rehearsed, real):
    """Same events in the same order in forward, loss and backward; the same multiset in step; equal peaks."""
    for step in (1, 2):
        for phase in ("forward", "loss", "backward"):
            a = [e for e in rehearsed.events if e.phase == phase and e.step == step]
            b = [e for e in real.events if e.phase == phase and e.step == step]
            for place, (one, other) in enumerate(zip(a, b, strict=False)):
                assert one == other, f"step {step} {phase} event {place}: rehearsed {one}, real {other}"
            assert len(a) == len(b)
        a, b = ([e for e in t.events if e.phase == "step" and e.step == step] for t in (rehearsed, real))
        assert collections.Counter(a) == collections.Counter(b)
    assert rehearsed.storages == real.storages
    assert rehearsed.phase_peaks == real.phase_peaks
    assert rehearsed.peak_bytes == real.peak_bytes
    assert rehearsed.peaks == real.peaks
    assert rehearsed.saved == real.saved

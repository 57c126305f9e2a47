"""Recording: the hooks that a recorder needs around a step, and a cycle collector that does not work meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.trace.recorder import Observer, Recorder
from shardwright.trace.trace import Trace


@contextmanager
def record(*roots: Any, observer: Observer | None = None) -> Iterator[Trace]:
    """Records what runs inside the ``with`` block.

    roots: the modules, optimizers and tensors alive at the start; other tensors enter as ``input`` when first used.
    observer: is told of every operator, and of the storages that it is handed.
    Yields a Trace, complete when the block ends. Works on real tensors and under a FakeTensorMode alike.
    """
    trace = Trace()
    recorder = Recorder(observer)
    hooks = torch.nn.modules.module
    with collector_at_rest():
        handles: list[Any] = [
            hooks.register_module_forward_pre_hook(recorder.enter_module),
            hooks.register_module_forward_hook(recorder.leave_module, always_call=True),
            register_optimizer_step_pre_hook(recorder.before_optimizer),
            register_optimizer_step_post_hook(recorder.after_optimizer),
        ]
        handles += [
            parameter.register_post_accumulate_grad_hook(recorder.accumulated)
            for root in roots
            if isinstance(root, torch.nn.Module)
            for parameter in root.parameters()
            if parameter.requires_grad
        ]
        try:
            recorder.begin(roots)
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor), recorder:
                yield trace
            recorder.end()
        finally:
            for handle in handles:
                handle.remove()
            trace.events, trace.storages, trace.saved = recorder.events, recorder.storages(), recorder.saved
            recorder._living.clear()  # deaths after the recording are nobody's business


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Python's cycle collector works before the block, and not inside.

    A block inside of such a block does not wait for it again: what is garbage by then was made in peace.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

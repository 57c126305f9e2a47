"""fairscale's FullyShardedDataParallel on CPU and gloo: no streams, and flat tensors for its reduce-scatter.

Only fp32. What it gives back by resizing storages is told to the recorder, or its memory would be counted for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fairscale.internal.reduce_scatter_bucketer import Bucket
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.nn.data_parallel import fully_sharded_data_parallel as implementation

from shardwright import trace


class _Stream:
    """The only one there is."""

    def wait_stream(self, _: Any) -> None:
        """Nothing runs beside it."""


STREAM = _Stream()


class Sharded(FullyShardedDataParallel):
    """As it comes, its streams aside. cap: MiB of its bucket."""

    def __init__(self, module: torch.nn.Module, cap: int = 25):
        group = dist.group.WORLD
        super().__init__(
            module,
            process_group=group,
            process_group_reduce_scatter=group,
            compute_device=torch.device("cpu"),
            bucket_cap_mb=cap,
        )

    def _setup_streams(self) -> None:
        super()._setup_streams()
        self._streams.update(dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), STREAM))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Around every pass."""
    reduce_scatter = dist._reduce_scatter_base

    def flat(output: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
        return reduce_scatter(output.view(-1), whole.view(-1), group=group)

    with ExitStack() as stack:
        for where, name, what in (
            (torch.cuda, "current_stream", lambda *_: STREAM),
            (torch.cuda, "stream", lambda _: nullcontext()),
            (torch.Tensor, "record_stream", lambda *_: None),
            (dist, "_reduce_scatter_base", flat),
            (implementation, "alloc_storage_", _telling_renewed(implementation.alloc_storage_)),
            (implementation, "free_storage_", _telling_released(implementation.free_storage_)),
            (Bucket, "setup", _of_bucket(Bucket.setup, renews=True)),
            (Bucket, "teardown", _of_bucket(Bucket.teardown, renews=False)),
        ):
            stack.enter_context(mock.patch.object(where, name, what))
        yield


def _telling_renewed(allocate: Callable[..., None]) -> Callable[..., None]:
    def telling(data: torch.Tensor, size: torch.Size) -> None:
        empty = not data.untyped_storage().size()
        allocate(data, size)
        if empty:
            trace.renewed(data, "gathered")

    return telling


def _telling_released(free: Callable[..., None]) -> Callable[..., None]:
    def telling(data: torch.Tensor) -> None:
        trace.released(data)
        free(data)

    return telling


def _of_bucket(act: Callable[[Any], None], renews: bool) -> Callable[[Any], None]:
    def telling(bucket: Any) -> None:
        tensors = (bucket.data, bucket.output_shard)
        empty = [not tensor.untyped_storage().size() for tensor in tensors]
        if not renews:
            for tensor in tensors:
                trace.released(tensor)
        act(bucket)
        for tensor, was_empty in zip(tensors, empty, strict=True):
            if renews and was_empty:
                trace.renewed(tensor, "bucket")

    return telling

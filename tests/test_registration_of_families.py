"""A model family is one file and one line of a table, a device is one file: dummies of both, added and taken away."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

import shardwright as sw
from shardwright.errors import InputError
from shardwright.families import decoder
from shardwright.families.family import Family
from shardwright.families.table import FAMILIES
from shardwright.simulate.machine import Machine
from shardwright.simulate.rehearsal import rehearse
from shardwright.spec import cluster
from shardwright.spec.cluster import Cluster
from support import tiny
from support.ranks import on_ranks

DUMMY = Family(model_type="helium", sites=decoder.sites)
"""A family of transformers that is built like Llama and has no rule table here."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LINE = {DUMMY.model_type: DUMMY}


def config() -> Path:
    return tiny.write_config({"model_type": DUMMY.model_type, **SIZES})


def traced(plan: sw.Plan, path: Path):
    """On one rank: losses, and the trace of the second step."""
    with mock.patch.dict(FAMILIES, LINE):
        return tiny.train(plan, 2, record=2, path=path)


def test_a_family_is_a_line_of_the_table():
    path, before = config(), dict(FAMILIES)
    plan = tiny.plan_of({"data": 1, "tensor": 2}, "sequence-parallel", path)
    with pytest.raises(InputError, match="model_type: found 'helium'; allowed: "):
        rehearse(path, plan, 0)
    with mock.patch.dict(FAMILIES, LINE):
        rehearsed = [rehearse(path, plan, rank) for rank in range(2)]
    for expected, (losses, trace) in zip(rehearsed, on_ranks(2, traced, plan, path), strict=True):
        assert losses[1] < losses[0]
        assert (trace.phase_peaks, trace.saved_bytes) == (expected.phase_peaks, expected.saved_bytes)
        assert trace.sent_bytes == expected.sent_bytes > 0
    assert before == FAMILIES


DEVICE = """
version: 1
hosts: 1
devices_per_host: 4
device: {name: Dummy, memory: 1GiB, flops: {float32: 1.0e12}}
links: {within_host: {latency: 1.0e-6, bandwidth: 1.0e9}, between_hosts: {latency: 2.0e-6, bandwidth: 1.0e8}}
"""


def test_a_device_is_a_file(tmp_path, monkeypatch):
    before = sorted(path.name for path in cluster.SHIPPED.iterdir())
    (tmp_path / "DUMMY-1GB.yaml").write_text(DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "SHIPPED", tmp_path)
        machines = Cluster.named("8xDUMMY-1GB")
        assert (machines.hosts, machines.devices_per_host, machines.memory_bytes) == (2, 4, 2**30)
        machine = Machine(machines, {"data": 8}, "float32", "nccl")
        assert machine.product(1000, 1000, 1000) == pytest.approx(2e9 / 1e12)
        assert machine.link(("data",)) == "between hosts"
    with pytest.raises(InputError, match="devices: found '8xDUMMY-1GB'"):
        Cluster.named("8xDUMMY-1GB")
    assert sorted(path.name for path in cluster.SHIPPED.iterdir()) == before

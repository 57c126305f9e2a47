"""Cases from public reports of other programs, as small inputs with their right values.

Others of that list are tests elsewhere, with the same figures:

| case                                           | test                                                               |
|------------------------------------------------|--------------------------------------------------------------------|
| one scratch buffer under two linears           | test_grid_linear: test_a10_no_shared_scratch                       |
| recompute gathers twice (3 gathers, 2 sums)    | test_overlap: test_a14_recomputation[blocking-2]                   |
| reduction inputs held to the end               | test_sharded_traffic: test_no_more_units_live_than_stated          |
| communication peak of blocks (294,912 B)       | test_sharded_traffic: test_communication_peak_of_blocks            |
| adapters beside frozen linears (2,048 B)       | test_sharded_traffic: test_frozen_and_trainable_parameters_of_…    |
| parameters of Qwen3-0.6B, tied (596,049,920)   | test_families: test_f3_real_configs_…[Qwen/Qwen3-0.6B]             |
| norm of a clipped gradient (5.65685)           | test_clipping: test_a_known_norm                                   |
| odd vocabulary (25129 + 25128, 10.824905)      | test_layers: test_a12_a_vocabulary_that_does_not_divide[2-50257]   |
| w [2,6] saved on four ranks, loaded on fewer   | test_checkpoint: test_uneven_empty_and_fused_shards_come_back_on_… |
| norm gradient with split tokens (8)            | test_layers: test_norm_gradient_with_split_tokens                  |
| a tall weight: the planner picks one dimension | test_single: test_a_tall_weight_and_few_tokens_want_one_dimension  |
| ids and labels that no rank owns               | test_values: test_ids_and_labels_outside_the_vocabulary_are_…      |
| all logits + 1e4                               | test_layers: test_an_offset_that_all_logits_share_costs_no_…       |
| fewer key/value heads than ranks (128 rows)    | test_shared_heads: test_a_rank_stores_the_rows_of_its_head         |
| adapters, before parallelize and after         | test_structure: test_what_the_rule_table_…, test_what_is_put_…     |
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwright as sw
from shardwright.layers.loss import VocabParallelLoss
from shardwright.reshard.carrier import tokens_of
from shardwright.simulate.rehearsal import stage
from shardwright.values.initial import Unfilled, from_seed
from support import dense, grids, tiny
from support.nets import Chain, most, recorded
from support.ranks import on_ranks
from support.reference import assert_same, both

COLUMN = sw.GridLayout(n="tensor", x="sharded", save_x="shard")


def staged(axes, rank=0):
    return stage(SimpleNamespace(mesh=axes, world_size=torch.Size(axes.values()).numel(), backend="gloo"), rank)


# -- linears -------------------------------------------------------------------------------------------------------


def column():
    mesh = dense.mesh_of(tensor=2)
    lin = sw.GridLinear.from_dense(nn.Linear(32, 128, bias=False), COLUMN, mesh)
    x = torch.ones(64, 32, requires_grad=True)
    with sw.record(lin, x) as trace:
        lin(x).sum().backward()
    return trace.saved_bytes, [(c.phase, c.kind) for c in trace.collectives]


def test_a_column_linear_gathers_its_input_again():
    """128 tokens × 32 in fp32, split by tokens over two ranks: 8,192 B are saved; the gathered input is 16,384 B."""
    for saved, collectives in on_ranks(2, column):
        assert saved == 8_192
        assert collectives == [("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")]


def test_adapters_keep_no_gathered_norm_output():
    """A of 64 adapters on frozen qkv and up: h 4096, S 8192, bf16, 8 ranks. Saved: 0.5 GiB of shards, not 4 GiB."""
    axes = {"tensor": 8}
    with staged(axes) as mesh, torch.device("meta"):
        pairs = [
            [nn.Linear(4096, width, bias=False, dtype=torch.bfloat16) for width in (wide, 8)]
            for wide in (3 * 4096, 11_008)
        ]
        for wide, _ in pairs:
            wide.weight.requires_grad_(False)
        with FakeTensorMode():
            source = Unfilled(torch.device("cpu"))
            sites = [sw.GridLinear.siblings(pair, COLUMN, mesh, source=source) for pair in pairs]
            xs = [torch.empty(1024, 4096, dtype=torch.bfloat16, device="cpu", requires_grad=True) for _ in range(64)]
            with sw.record(*sites[0], *sites[1]) as trace:
                ys = [lin(x).sum() for number, x in enumerate(xs) for lin in sites[number % 2]]
                torch.autograd.backward(ys)
    assert trace.saved_bytes == 2**29


def test_a_tall_weight_on_a_grid_keeps_its_shard_and_gathers_one_tile():
    """256 → 1,000,000 in fp32, 64 tokens, 8 ranks: a shard of 122 MiB, and at most one gathered tile of 244 MiB."""
    layout, axes = grids.layout_of("grid-scatter", "column"), grids.GRIDS[0]
    with staged(axes) as mesh:
        with torch.device("meta"):
            linear = nn.Linear(256, 1_000_000, bias=False)
        with FakeTensorMode():
            (lin,) = sw.GridLinear.siblings([linear], layout, mesh, source=Unfilled(torch.device("cpu")))
            x = torch.empty(lin.site.product.shape_in(32, lin.site.width), requires_grad=True)
            with sw.record(lin, x) as trace:
                y = lin(x)
                y.backward(torch.empty_like(y))
    assert lin.weight.to_local().nbytes == 128_000_000
    tile, upstream = 256_000_000, 64_000_000  # of W; of dY
    assert most(trace, ("gathered",), 1) == tile + upstream
    assert max(s.bytes for s in trace.storages if s.category == "unreduced") <= tile
    after = next(point for point in trace.points if point.name == "after forward")
    assert after.categories["gathered"] == 0


def drawn(layout, axes):
    with torch.device("meta"):
        linear = nn.Linear(8, 8, bias=False)
    module = nn.ModuleList([linear])

    def initialise(inner):
        if isinstance(inner, nn.Linear):
            nn.init.normal_(inner.weight)

    source = from_seed(initialise, {inner: name for name, inner in module.named_modules()}, 0, torch.device("cpu"))
    (lin,) = sw.GridLinear.siblings([linear], layout, dense.mesh_of(**axes), source=source)
    return lin.weight.full_tensor().detach()


def test_a_seed_gives_the_same_weight_for_every_layout():
    """W [8,8], seed 0."""
    row, whole = sw.GridLayout(k="tensor", y="sharded"), sw.GridLayout(n="tensor", x="replicated")
    stored = sw.GridLayout(m="tensor", w="sharded")
    found = [
        each
        for layout in (COLUMN, row, whole, stored)
        for n in (1, 2, 4)
        for each in on_ranks(n, drawn, layout, {"tensor": n})
    ]
    axes = {"i": 2, "j": 2, "l": 1}
    found += [
        each
        for name in grids.DESIGNS
        for kind in grids.KINDS
        for each in on_ranks(4, drawn, grids.layout_of(name, kind), axes)
    ]
    assert found[0].std() > 0.5
    assert all(torch.equal(each, found[0]) for each in found)


# -- the loss, and uneven sequences ----------------------------------------------------------------------------------


def all_ignored():
    layer = VocabParallelLoss(dense.mesh_of(tensor=2), ("tensor",))
    logits = dense.random(6, 4, seed=1).requires_grad_()
    loss = layer(logits, torch.full((6,), -100))
    loss.backward()
    return loss.item(), logits.grad.abs().max().item()


def test_all_targets_ignored():
    """6 × −100: a loss of 0.0 with gradients of zero, where torch's mean is NaN."""
    assert on_ranks(2, all_ignored) == [(0.0, 0.0)] * 2


def seven_tokens(path):
    """(this rank's tokens at the first block, the error of the loss, that of the gradients) for one row of S = 7."""
    axes = {"data": 1, "tensor": 2}
    plan = tiny.plan_of(axes, "sequence-parallel", path, dtype="float64", micro_batch=1, sequence=7)
    model, reference = both(path, plan, dense.mesh_of(**axes))
    seen = []
    model.model.layers[0].input_layernorm.register_forward_pre_hook(
        lambda _, args: seen.append(tokens_of(args[0]).shape)
    )
    ids = torch.arange(3, 10)[None]
    labels = (ids + 5) % 240
    loss = model(input_ids=ids, labels=labels, shift_labels=labels).loss
    loss.backward()
    expected = nn.functional.cross_entropy(reference(input_ids=ids).logits[0], labels[0])
    expected.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return (
        seen[0].numel() // 96,
        (loss - expected).abs().item(),
        max(dense.error(a.grad.full_tensor(), b.grad) for a, b in pairs),
    )


def test_an_odd_sequence_is_split_four_and_three():
    found = on_ranks(2, seven_tokens, tiny.config_path())
    assert [tokens for tokens, _, _ in found] == [4, 3]
    assert max(max(loss, gradient) for _, loss, gradient in found) <= 1e-12


# -- sharded parameters ----------------------------------------------------------------------------------------------


def test_hybrid_sharding_keeps_no_outputs_in_float32():
    """Six linears of 64 × 64, shards over two ranks: of what is reduced, one float32 part of 8,192 B, not all six."""
    args = ({"replica": 2, "shard": 2}, "parameters", {"count": 6}, {"dtype": torch.bfloat16})
    for trace, behind, of in on_ranks(4, recorded, *args, 2, 2, torch.bfloat16):
        assert behind == of == 6 * 8_192
        parts = most(trace, ("gradient",), 2) - of  # beside what is in .grad at last
        assert parts <= 8_192
        assert most(trace, ("bucket", "temporary"), 2) <= 2 * 8_192


def accumulated(mesh, unsynchronised, rank):
    model = sw.shard(Chain(2, 8), mesh, "gradients")
    x = torch.ones(2, 8)
    with sw.record(model) as trace:
        for number in range(2):
            with sw.no_sync(model) if unsynchronised and number == 0 else torch.enable_grad():
                model(x).sum().backward()
            torch.zeros(1)  # the recorder notices the end of backward
    return trace


def accumulate_for_real(unsynchronised):
    return accumulated(dense.mesh_of(data=2), unsynchronised, dist.get_rank())


@pytest.mark.parametrize(("unsynchronised", "held"), [(False, 256), (True, 512)])
def test_accumulation_without_synchronisation_is_predicted(unsynchronised, held):
    """Two linears of 8 × 8 in fp32 on two ranks: 256 B of gradients with, 512 B without; the rehearsal says so."""
    for rank, real in enumerate(on_ranks(2, accumulate_for_real, unsynchronised)):
        with staged({"data": 2}, rank) as mesh, FakeTensorMode():
            rehearsed = accumulated(mesh, unsynchronised, rank)
        assert_same(rehearsed, real)
        for trace in (real, rehearsed):
            point = next(point for point in trace.points if point.name == "after backward")
            assert point.categories["gradient"] == held


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 16, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def tied(level):
    ids = torch.tensor([[1, 2, 3], [3, 4, 15]])
    up = dense.random(2, 3, 16, seed=1)
    model, reference = sw.shard(Tied(), dense.mesh_of(data=2), level), Tied()
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    (model(ids[mine]) * up[mine]).sum().backward()
    (reference(ids) * up).sum().backward()
    error = dense.error(model.embed.weight.grad.full_tensor(), reference.embed.weight.grad)
    return model.head.weight is model.embed.weight, len(list(model.parameters())), error


@pytest.mark.parametrize("level", ["replicate", "optimizer", "gradients", "parameters"])
def test_tied_weights_are_stored_once_and_have_the_gradient_of_both_uses(level):
    """Embedding(16, 4) tied to the head."""
    for same, count, error in on_ranks(2, tied, level):
        assert same and count == 1 and error <= 1e-14


def tied_from_meta(path):
    model, _ = tiny.build(tiny.plan_of({"data": 1, "tensor": 2}, "sequence-parallel", path), path)
    weights = model.lm_head.weight, model.model.embed_tokens.weight
    return weights[0] is weights[1], sum(p.numel() for p in model.parameters())


def test_tied_weights_drawn_from_meta_are_one():
    """Counted once: 596,049,920 parameters for Qwen3-0.6B are a test of real configs; here that they are one tensor."""
    path = tiny.config_path(tie_word_embeddings=True)
    untied = on_ranks(2, tied_from_meta, tiny.config_path())[0]
    for same, count in on_ranks(2, tied_from_meta, path):
        assert same and count == untied[1] - 240 * 96

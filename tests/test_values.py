"""Token ids and labels outside of the vocabulary are refused by name, on every layout, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.layers.classes import check_classes
from shardwright.trace import Op
from support import tiny
from support.ranks import on_ranks

V = tiny.FIELDS["vocab_size"]
WITHOUT_RULES = {**tiny.FIELDS, "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"]}


def refused(axes, layout, fallback):
    """What a model says to each wrong number, and its loss before and after."""
    path = tiny.write_config(WITHOUT_RULES) if fallback else tiny.config_path()
    plan = tiny.plan_of(axes, layout, path, fallback=fallback)
    model, mesh = tiny.build(plan, path)
    ((ids, labels),) = tiny.batches(plan, 1, sw.Runtime.of(mesh).group(plan.batch_axes).index)[0]

    def loss(ids, labels):
        value = model(input_ids=ids, labels=labels, shift_labels=labels).loss
        value.backward()
        model.zero_grad()
        return value.item()

    before, lines = loss(ids, labels), []
    for number in (V, -1, V + 1000, -99):
        for wrong in range(2):
            texts = [ids.clone(), labels.clone()]
            texts[wrong][1, 2] = number
            try:
                lines.append(f"not refused: {loss(*texts)}")
            except sw.InputError as error:
                lines.append(str(error))
    ignored = labels.clone()
    ignored[0, :] = -100
    return before, loss(ids, labels), loss(ids, ignored), lines


@pytest.mark.parametrize(
    ("axes", "layout", "fallback"),
    [
        ({"data": 1, "tensor": 1}, "replicate", False),
        ({"data": 1, "tensor": 2}, "sequence-parallel", False),
        ({"data": 1, "tensor": 2}, "tensor-all-reduce", False),
        ({"data": 2, "tensor": 1}, "replicate", False),
        ({"data": 1, "tensor": 1}, "replicate", True),
        ({"data": 2, "tensor": 1}, "replicate", True),
    ],
)
def test_ids_and_labels_outside_the_vocabulary_are_refused_on_every_rank(axes, layout, fallback):
    expected = [
        line
        for number in (V, -1, V + 1000, -99)
        for line in (
            f"input_ids: found {number}; allowed: 0 to {V - 1}",
            f"labels: found {number}; allowed: 0 to {V - 1}, or -100 for a token without a target",
        )
    ]
    for before, after, _, lines in on_ranks(axes["data"] * axes["tensor"], refused, axes, layout, fallback):
        assert lines == expected
        assert after == before


def test_a_check_has_no_operators():
    """Recorded or rehearsed, a step has the same ones."""
    labels = torch.arange(4)
    with sw.record() as trace:
        check_classes("labels", labels, 4, -100)
        torch.zeros(2).add_(1)
    assert [event.name for event in trace.events if isinstance(event, Op)] == [
        "aten.zeros.default", "aten.add_.Tensor"
    ]  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and that the host must not read."""

    device = property(lambda self: torch.device("cuda", 0))

    def __bool__(self):
        raise AssertionError("the host reads a value of the device")


def test_off_the_cpu_an_assertion_says_it_and_the_host_does_not_wait():
    numbers = torch.tensor([0, 3, -100]).as_subclass(OnDevice)
    check_classes("labels", numbers, 4, -100)
    for classes, ignored, words in ((3, -100, "0 to 2, or -100 for"), (4, None, "0 to 3")):
        with pytest.raises(RuntimeError, match=f"labels: found a number outside the vocabulary; allowed: {words}"):
            check_classes("labels", numbers, classes, ignored)

"""What is wrong in plan, cluster and run files comes out as one line, and nothing is overwritten (ACCEPTANCE F6)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan
from shardwright.train.run_file import Run
from support.malformed import CLUSTER, CLUSTERS, COUNT, PLAN, PLANS, RUN, RUNS, Case
from test_cli import refused


def fault(schema: Any, path: Path) -> str:
    with pytest.raises(InputError) as caught:
        schema.load(path)
    return str(caught.value)


KINDS = [(Plan, PLAN, case) for case in PLANS]
KINDS += [(Cluster, CLUSTER, case) for case in CLUSTERS]  # type: ignore[misc]
KINDS += [(Run, RUN, case) for case in RUNS]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schema", "right", "case"), KINDS, ids=[f"{s.__name__}-{c[2]}-{c[4][:24]!r}" for s, _, c in KINDS]
)
def test_malformed_file_is_one_line(schema: Any, right: str, case: Case, place: Path) -> None:
    old, new, key, line, found, allowed = case
    assert right.count(old) == 1
    path = place / "bad.yaml"
    path.write_text(right.replace(old, new))
    message = fault(schema, path)
    assert message.splitlines() == [message]
    at = " ".join(part for part in (key, f"(line {line})" if line else "") if part)
    start = f"{path}: {at + ': ' if at else ''}found "
    assert message.startswith(start)
    told, _, rest = message.removeprefix(start).partition("; allowed: ")
    for text, expected in ((told, found), (re.sub(r" \(and \d+ more\)$", "", rest), allowed)):
        assert text.startswith(expected[:-3]) if expected.endswith("...") else text == expected


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its path."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("schema", "right", "case"), KINDS, ids=[f"{s.__name__}-{c[2]}-{c[4][:24]!r}" for s, _, c in KINDS]
)
def test_commands_refuse_a_malformed_file_with_2_and_overwrite_nothing(
    schema: Any, right: str, case: Case, place: Path, one_rank: None
) -> None:
    bad = place / "bad.yaml"
    bad.write_text(right.replace(case[0], case[1]))
    (place / "out").mkdir()
    for name in ("figures.json", "figures.svg", "out/tokens.npy", "out/metrics.jsonl", "out/evaluation-tokens.npy"):
        (place / name).write_text("of an earlier run")
    figures = ["--json", place / "figures.json", "--svg", place / "figures.svg"]
    before = contents(place)
    if schema is Plan:
        line = refused("rehearse", bad, *figures)
    elif schema is Cluster:
        line = refused("rehearse", place / "plan.yaml", "--cluster", bad, *figures)
    else:
        line = refused("train", bad)
    assert line == f"error: {fault(schema, bad)}\n"
    assert contents(place) == before


def test_train_refuses_a_malformed_plan_too(place: Path, one_rank: None) -> None:
    (place / "plan.yaml").write_text(PLAN.replace("micro_batch: 8", "micro_batch: eight"))
    before = contents(place)
    assert f"{place / 'plan.yaml'}: micro_batch (line 7): found 'eight'" in refused("train", place / "run.yaml")
    assert contents(place) == before


def test_there_are_enough_malformed_files() -> None:
    assert len(KINDS) >= 40


@pytest.mark.parametrize("schema", [Plan, Cluster, Run])
def test_a_path_that_holds_no_text_is_one_line(schema: Any, tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.yaml", tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert fault(schema, missing) == f"{missing}: found no such file; allowed: the path of a YAML file"
    assert fault(schema, binary).startswith(f"{binary}: found bytes that are not UTF-8")
    assert fault(schema, tmp_path).startswith(f"{tmp_path}: found no way in (is a directory)")


def test_the_first_fault_in_file_order_is_told_and_the_others_counted(place: Path) -> None:
    text = (
        PLAN.replace("seed: 0", "seed: x")
        .replace("micro_batch: 8", "micro_batch: y")
        .replace("mesh: {data: 2", "mesh: {data: z")
    )
    (place / "bad.yaml").write_text(text.replace("sequence: 128\n", ""))
    message = fault(Plan, place / "bad.yaml")
    assert message == f"{place / 'bad.yaml'}: mesh.data (line 5): found 'z'; allowed: {COUNT} (and 3 more)"


def test_a_misspelt_key_is_told_before_the_key_that_is_missing_for_it(place: Path) -> None:
    (place / "bad.yaml").write_text(PLAN.replace("  sha256:", "  sha:").replace("sequence: 128", "sequenc: 128"))
    assert "model.sha (line 4): found an unknown key (did you mean sha256?)" in fault(Plan, place / "bad.yaml")
    assert fault(Plan, place / "bad.yaml").endswith("(and 3 more)")


def test_a_preset_needs_its_axes_in_the_mesh(place: Path) -> None:
    (place / "bad.yaml").write_text(PLAN.replace("tensor: 4}", "model: 4}").replace("[tensor]", "[model]"))
    message = fault(Plan, place / "bad.yaml")
    assert (
        "layouts.* (line 18): found sequence-parallel, which uses the axis 'tensor'; allowed: the mesh's axes"
        in message
    )

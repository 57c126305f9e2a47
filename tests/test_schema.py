"""JSON schemas of the user files: valid ones, which accept what we accept, and the page that is made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shardwright.files.plain_yaml import parse
from shardwright.report.schema import FILES, UNITS, file_fields, is_number, json_schema, markdown, unit
from shardwright.spec.layout import CHOICES, OPERAND_WORDS
from shardwright.spec.presets import presets
from support.malformed import CLUSTER, CLUSTERS, PLAN, PLANS, RUN, RUNS
from test_cli import modules_after, refused, run

PAGE = Path(__file__).parent.parent / "docs" / "files.md"
NAMES = {"version", "seed"}
"""Numbers that count nothing."""

FIELDS = [(kind, field) for kind in FILES for field in file_fields(json_schema(kind))]


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=[f"{kind}-{field.key}" for kind, field in FIELDS])
def test_every_field_is_described_and_every_number_has_a_unit(kind: str, field: Any) -> None:
    root = json_schema(kind)
    assert field.schema.get("description")
    if is_number(field.schema, root) and field.key not in NAMES:
        assert unit(field.schema, root), f"the description names none of the units {', '.join(UNITS)}"


def test_fields_are_found_wherever_they_stand() -> None:
    keys = {f"{kind}.{field.key}" for kind, field in FIELDS}
    assert {"plan.layouts.NAME.save_x", "plan.predicted.peak", "cluster.links.between_hosts.latency"} <= keys
    assert {"run.data.field", "run.evaluation.every", "run.metrics"} <= keys


def test_units() -> None:
    units = {f"{kind}.{field.key}": unit(field.schema, json_schema(kind)) for kind, field in FIELDS}
    assert units["cluster.links.within_host.latency"] == "seconds"
    assert units["cluster.links.within_host.bandwidth"] == "bytes per second"
    assert units["plan.micro_batch"] == "sequences" and units["plan.arena"] == "bytes"
    assert units["run.learning_rate"] == "none" and units["plan.seed"] == "" and units["run.plan"] == ""


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: shardwright schema --markdown -o docs/files.md"


def test_the_page_has_a_row_for_every_field() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(FIELDS)
    assert all(len(row.replace("\\|", "").split("|")) == 8 for row in rows)


def test_layout_words_are_in_the_schema() -> None:
    layout = json_schema("plan")["$defs"]["_LayoutFields"]["properties"]
    for operand, words in OPERAND_WORDS.items():
        assert [option.get("enum") for option in layout[operand]["anyOf"]] == [list(words), None]
    for name, choices in CHOICES.items():
        assert layout[name]["enum"] == list(choices)
    assert list(presets) in [option.get("enum") for option in layouts_options()]


def layouts_options() -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = json_schema("plan")["properties"]["layouts"]["additionalProperties"]["anyOf"]
    return options


def plain(text: str) -> Any:
    """What our own reader makes of a YAML text, before it is checked."""

    return parse("file", text)[0]


@pytest.mark.parametrize(("kind", "text"), [("plan", PLAN), ("cluster", CLUSTER), ("run", RUN)])
def test_schemas_are_valid_and_accept_what_is_right(kind: str, text: str) -> None:
    schema = json_schema(kind)
    Draft202012Validator.check_schema(schema)
    assert not list(Draft202012Validator(schema).iter_errors(plain(text)))


BEYOND = (
    "no file", "which is", "which matches", "which uses", "which none", "the axis", "axis", "the element type",
    " after ", "a second time", "not available", "ab" * 32, "nan", "inf", "8.0", "1.0", "2.0", "true at level",
)  # fmt: skip
"""In what was found: faults that only the disk or another field shows, or JSON cannot spell (in it, 8.0 is whole)."""


@pytest.mark.parametrize(
    ("kind", "right", "case"),
    [
        (kind, right, case)
        for kind, right, cases in (("plan", PLAN, PLANS), ("cluster", CLUSTER, CLUSTERS), ("run", RUN, RUNS))
        for case in cases
        if case[2] and case[3] and case[5] != "each key once" and not any(word in case[4] for word in BEYOND)
    ],
    ids=lambda value: value[2] + "-" + value[4][:24] if isinstance(value, tuple) else "",
)
def test_schemas_refuse_most_of_what_is_wrong(kind: str, right: str, case: Any) -> None:
    try:
        data = plain(right.replace(case[0], case[1]))
    except ValueError:
        return  # no YAML at all
    assert list(Draft202012Validator(json_schema(kind)).iter_errors(data))


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    for kind in FILES:
        status, output, _ = run("schema", kind)
        assert status == 0 and json.loads(output) == json_schema(kind)
        assert run("schema", kind, "-o", tmp_path / kind)[:2] == (0, "")
        assert json.loads((tmp_path / kind).read_text(encoding="utf-8")) == json_schema(kind)
    assert run("schema", "--markdown")[:2] == (0, markdown())


def test_the_command_loads_no_torch() -> None:
    assert not {"torch", "transformers", "numpy"} & modules_after(
        "from shardwright.cli import app; app(['schema', 'run'])"
    )


def test_the_command_refuses_bad_input(tmp_path: Path) -> None:
    assert "schema: found model; allowed: plan, cluster, run" in refused("schema", "model")
    assert "schema: found nothing; allowed: plan, cluster, run" in refused("schema")
    assert "--markdown: found plan beside it" in refused("schema", "plan", "--markdown")
    assert "--output" in refused("schema", "plan", "-o", tmp_path / "no" / "plan.json")

"""Tables and plain data from a trace made by hand."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwright.report.ledger import alive_rows, cells, ledger_json, ledger_table, peak_table, rank_label
from shardwright.report.volume import collectives_json, collectives_table
from shardwright.trace import Alloc, Collective, Event, Free, Mark, Storage, Trace


def trace(saved: int = 300, sent: int = 64) -> Trace:
    """Two steps: parameters 1,000 bytes; each saves ``saved`` bytes; the second also has 2,000 bytes of moments."""
    storages = [Storage(1000, "parameter", "head.weight", "")]
    events: list[Event] = [Alloc(1, "forward", 0)]
    for step in (1, 2):
        first = len(storages)
        storages += [Storage(saved, "saved", "head", "aten.mm"), Storage(1000, "gradient", "head", "aten.mm")]
        events += [
            Mark(step, "forward", "start"),
            Alloc(step, "forward", first),
            Collective(step, "forward", "head", "all_gather", ("tensor",), (0, 1), 128, sent),
            Mark(step, "forward", "after forward"),
            Alloc(step, "backward", first + 1),
            Collective(step, "backward", "head", "all_gather", ("tensor",), (0, 1), 128, sent),
            Collective(step, "backward", "head", "all_reduce", ("data",), (0, 2), 1000, 1000),
            Free(step, "backward", first),
        ]
        if step == 1:
            storages.append(Storage(2000, "optimizer", "", "aten.zeros_like"))
            events.append(Alloc(1, "step", first + 2))
        events.append(Free(step, "step", first + 1))
    return Trace(events, storages, [saved, saved])


def shown(table: Table) -> str:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def row_of(text: str, name: str) -> list[list[str]]:
    """The cells of every row whose first cell is ``name``."""
    rows = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in text.splitlines() if "│" in line]
    return [row[1:] for row in rows if row[0] == name]


def test_cells_take_the_larger_step_of_each_phase() -> None:
    found = cells(trace())
    assert found["total", "forward"] == 1000 + 2000 + 300
    assert found["optimizer", "forward"] == 2000
    assert found["total", "backward"] == 1000 + 2000 + 300 + 1000
    assert found["total", "step"] == 1000 + 1000 + 2000
    assert ("total", "loss") not in found
    for phase in ("forward", "backward", "step"):
        assert (
            sum(count for (row, of), count in found.items() if of == phase and row != "total") == found["total", phase]
        )


def test_equal_ranks_are_one_block() -> None:
    text = shown(ledger_table([trace(), trace(), trace()], [trace(), trace(), trace()]))
    assert text.count("ranks 0–2") == 1
    assert "≠" not in text
    assert row_of(text, "saved") == [["300 = 300", "0 = 0", "300 = 300", "0 = 0"]]


def test_ranks_that_differ_have_their_own_block_and_a_mark() -> None:
    text = shown(ledger_table([trace(), trace(), trace()], [trace(), trace(304), trace()]))
    assert "ranks 0, 2" in text and "rank 1" in text
    same, other = row_of(text, "total")
    assert same[0] == "3,300 = 3,300"
    assert other[0] == "3,300 ≠ 3,304"


def test_rehearsal_alone_shows_one_number_and_names_its_ranks() -> None:
    text = shown(ledger_table([trace(), trace()], ranks=[4, 7]))
    assert "ranks 4, 7" in text
    assert row_of(text, "parameter") == [["1,000", "0", "1,000", "1,000"]]


def test_rank_labels() -> None:
    assert rank_label([2]) == "rank 2"
    assert rank_label([0, 1, 2, 3]) == "ranks 0–3"
    assert rank_label([0, 1, 4]) == "ranks 0–1, 4"


def test_peak_table_sums_to_the_peak() -> None:
    rows = alive_rows(trace())
    assert [row["bytes"] for row in rows] == [2000, 1000, 1000, 300]
    assert sum(row["bytes"] for row in rows) == trace().peak_bytes
    text = shown(peak_table(trace()))
    assert "4,300 bytes" in text and "aten.zeros_like" in text and "the rest" not in text


def test_peak_table_adds_up_the_rest() -> None:
    storages = [Storage(100 + number, "saved", f"part{number}", "aten.mm") for number in range(25)]
    storages += [storages[24]]  # two tensors of one operator are one row
    many = Trace([Alloc(1, "forward", number) for number in range(26)], storages)
    assert alive_rows(many)[0] == {
        "bytes": 248,
        "count": 2,
        "category": "saved",
        "module": "part24",
        "operator": "aten.mm",
    }
    text = shown(peak_table(many))
    assert row_of(text, f"{sum(range(100, 105)):,}")[0][:2] == ["5", "the rest"]


def test_the_same_place_in_every_block_is_one_row() -> None:
    names = ["model.layers.0.mlp", "model.layers.11.mlp", "model.norm", "0"]
    storages = [Storage(10, "saved", name, "aten.mm") for name in names]
    blocks = Trace([Alloc(1, "forward", number) for number in range(4)], storages)
    assert [(row["module"], row["bytes"]) for row in alive_rows(blocks)] == [
        ("model.layers.*.mlp", 20),
        ("0", 10),
        ("model.norm", 10),
    ]


def test_collectives_of_one_step() -> None:
    gather = {"kind": "all_gather", "axes": ["tensor"], "count": 2, "size": 256, "sent": 128}
    reduce = {"kind": "all_reduce", "axes": ["data"], "count": 1, "size": 1000, "sent": 1000}
    assert collectives_json(trace()) == [gather, reduce]
    by_phase = collectives_json(trace(), by_phase=True)
    assert [(entry["phase"], entry["count"]) for entry in by_phase] == [
        ("forward", 1),
        ("backward", 1),
        ("backward", 1),
    ]
    assert sum(entry["sent"] for entry in by_phase) == trace().sent_bytes
    assert "1,128 bytes sent" in shown(collectives_table(trace()))


def test_ledger_json() -> None:
    data = ledger_json(trace())
    assert data["peak"] == 4300 and data["saved"] == 300
    assert data["phases"]["forward"] == {
        "step": 2,
        "total": 3300,
        "categories": data["phases"]["forward"]["categories"],
    }
    assert {(point["step"], point["name"]) for point in data["points"]} == {
        (1, "start"),
        (1, "after forward"),
        (2, "start"),
        (2, "after forward"),
    }

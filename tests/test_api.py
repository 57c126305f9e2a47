"""The public face: every name loads, says what it is, and stands in docs/api.md with a page that exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import shardwright as sw

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


@pytest.mark.parametrize("name", sw.__all__)
def test_a_public_name_loads_and_says_what_it_is(name: str) -> None:
    value = getattr(sw, name)
    assert name in dir(sw)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value) and value.__module__.startswith("shardwright.")


def test_the_page_tells_of_every_name_and_of_no_other() -> None:
    told = re.findall(r"`sw\.(\w+)`", "".join(line for line in PAGE.read_text().splitlines() if line.startswith("| ")))
    assert sorted(told) == sorted(set(told)) and sorted(told) == sw.__all__


def test_pages_exist() -> None:
    pages = set(re.findall(r"\]\((\w+\.md)\)", PAGE.read_text()))
    assert pages and all((PAGE.parent / page).is_file() for page in pages)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'shardwright' has no attribute 'nosuch'"):
        sw.nosuch  # noqa: B018


def test_what_the_library_does_is_logged_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal parallelizes a model: the room's logger tells, at a level that is not shown by default."""
    config = Path(sw.__file__).parent / "demo" / "config.json"
    plan = sw.Plan.for_config(config, mesh={"data": 1}, layout="replicate", micro_batch=1, sequence=8)
    with caplog.at_level("INFO", "shardwright.models"):
        sw.rehearse(config, plan)
    told = [(record.name, record.levelname) for record in caplog.records if record.name.startswith("shardwright")]
    assert told == [("shardwright.models.parallelize", "INFO")]
    assert capsys.readouterr() == ("", "")

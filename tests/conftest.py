"""What is selected, garbage between tests, and fixtures; the parent of all forked ranks is single-threaded."""

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also what repeats a quicker test on more ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are left out where there is no CUDA device, and slow ones where nobody asks for them."""
    left_out = [
        item
        for item in items
        if (item.get_closest_marker("gpu") and not torch.cuda.is_available())
        or (item.get_closest_marker("slow") and not config.getoption("--slow"))
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """What is loaded by now is not garbage: every record and every full collection would look through it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Nor is what a test leaves in a cache."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment that a launcher gives the only rank of a run; handlers of signals come back as they were."""
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which support/malformed.py's plan, cluster and run are right."""
    from support.malformed import CLUSTER, CONFIG, PLAN, RUN

    (tmp_path / "text").mkdir()
    (tmp_path / "pretrained").mkdir()
    for name, text in {
        "config.json": CONFIG,
        "tokenizer.json": "{}",
        "text/a.txt": "a",
        "text/b.txt": "b",
        "held.jsonl": '{"body": "b"}\n',
        "plan.yaml": PLAN,
        "cluster.yaml": CLUSTER,
        "run.yaml": RUN,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path

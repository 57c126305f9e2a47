"""What is selected, garbage between tests, and fixtures; the parent of all forked ranks is single-threaded."""

import gc
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


SLOW = re.compile(
    r"test_every_gradient_of_every_family_equals_dense\[(?!llama).*-(axes1|axes2)-"
    r"|test_model\.py::test_(loss_and|f1_same).*\[1x[34]-"
    r"|test_f1_same.*\[(1x2-|2x2-sequence-parallel-keep)"
    r"|test_recomputed_blocks_train.*\[sequence-parallel-"
    r"|test_every_family_trains.*\[(qwen2|mistral)"
    r"|test_a21_one_sequence.*\[grid-reduce|test_mixed_designs.*\[layouts[17]-"
    r"|test_every_structure_priced|test_e2_the_composed.*\[([35789]|[1234]\d)\]"
    r"|test_mixed_designs.*\[layouts[246]-"
    r"|test_gradients_through_buckets_equal_dense\[[38]\]|test_random_draws\[(100|175)\]"
    r"|test_volume\.py::test_reduction_in_float32|test_sharding\.py::test_three_steps.*\[axes[13]-"
    r"|test_sharding\.py::test_gradients_equal_dense\[axes5-|test_f2_parameters.*\[odd llama\]"
    r"|test_a_rehearsal_is_the_run\[(replicate|optimizer)\]"
    r"|test_fake.*\[(gpt2|gemma2)|test_design_1_overlapped.*-2x1x4\]"
    r"|test_a_variant_is_priced.*\[(l before|three|data before)|test_in_a_plan_a_bucket_trains_alike"
    r"|test_every_family_trains.*\[(phi|gpt2)|test_f1_same_curve.*\[2x2x2-grid-reduce|test_overlap_modes_train.*\[async"
    r"|test_gradients_through_buckets_equal_dense\[2x2\]|test_a14_recomputed_blocks\[grid-reduce"
    r"|test_a_stretched_rehearsal.*\[(optimizer|gradients|qwen3)|test_without_time_it_is_not_said"
    r"|test_sharding\.py::test_gradients_equal_dense\[axes2-|test_compile.*inductor"
    r"|test_volume\.py::test_every_(mesh|frozen).*-async\]|test_a_stretched_rehearsal.*\[a bucket, two runs"
    r"|test_sharded_model\.py::test_every_level_trains_alike.*\[axes(5|10)-"
    r"|test_from_profile_to_measured_peaks|test_8b\.py|test_property\.py::test_random_products"
)
"""What repeats quicker tests on more ranks, larger models, or by chance: ``--slow`` (make test-all)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also what repeats a quicker test on more ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are left out where there is no CUDA device, and slow ones where nobody asks for them."""
    left_out = [
        item
        for item in items
        if (item.get_closest_marker("gpu") and not torch.cuda.is_available())
        or (SLOW.search(item.nodeid) and not config.getoption("--slow"))
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

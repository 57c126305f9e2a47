"""Commands: quick help, and bad input in one line with the exit status it deserves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli.common import app
from shardwright.spec.plan import Plan
from shardwright.trace import Alloc, Collective, Storage, Trace
from shardwright.train.launch import command

CONFIG = Path(str(resources.files("shardwright.demo") / "config.json"))
SIZES = ["--layout", "sequence-parallel", "--micro-batch", "8", "--sequence", "128"]
MESH = ["--mesh", "data=2,tensor=2"]


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command run in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str | Path, status: int = 2) -> str:
    """The one line on standard error of a command that exits with ``status``."""
    code, _, error = run(*arguments)
    assert code == status, error
    assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n"), error
    return error


def modules_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter loads while it runs ``code``."""
    program = f"import json, sys\nbefore = set(sys.modules)\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
    program += "print('\\n' + json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_no_third_party_package() -> None:
    assert modules_after("import shardwright") - sys.stdlib_module_names == {"shardwright"}


@pytest.mark.parametrize("command", [[], ["demo"], ["train"], ["profile"], ["rehearse"], ["schema"]])
def test_help_loads_neither_torch_nor_transformers(command: list[str]) -> None:
    loaded = modules_after(f"from shardwright.cli import app; app({[*command, '--help']!r})")
    assert "typer" in loaded
    assert not {"torch", "transformers", "tokenizers", "numpy"} & loaded


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "nosuch.json", "--devices", "8xH100-80GB", "--global-batch", "8", "--sequence", "128"],
        ["plan", str(CONFIG), "--devices", "8xH1000", "--global-batch", "8", "--sequence", "128"],
        [
            "plan",
            str(CONFIG),
            "--devices",
            "8xH100-80GB",
            "--global-batch",
            "8",
            "--sequence",
            "128",
            "--memory",
            "81GiB",
        ],
        ["rehearse", "nosuch.yaml"],
        ["rehearse", "nosuch.json", *SIZES, *MESH],
        ["rehearse", str(CONFIG), *SIZES, *MESH, "--cluster", "nosuch.yaml"],
        ["rehearse", str(CONFIG), *SIZES, *MESH, "--svg", "no/such/place.svg"],
        ["bounds", "nosuch.json"],
        ["bounds", str(CONFIG), "--ranks", "none"],
        ["demo", "--ranks", "0"],
        ["train", "nosuch.yaml"],
    ],
    ids=lambda command: " ".join(command)[:40],
)
def test_arguments_are_checked_before_anything_slow_is_imported(command: list[str]) -> None:
    loaded = modules_after(f"from shardwright.cli import app; app({command!r})")
    assert "typer" in loaded
    assert not {"torch", "transformers", "tokenizers", "numpy"} & loaded


def test_python_m_shardwright() -> None:
    done = subprocess.run([sys.executable, "-m", "shardwright", "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("demo", "train", "rehearse", "schema"))


# rehearse


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    plan = Plan.for_config(
        CONFIG, mesh={"data": 2, "tensor": 2}, layout="sequence-parallel", micro_batch=8, sequence=128, dtype="float32"
    )
    path = tmp_path / "plan.yaml"
    plan.save(path)
    return path


def test_rehearse_refuses_bad_input(plan_path: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("version: 1\nmesh: [\n")
    assert "nope.yaml" in refused("rehearse", tmp_path / "nope.yaml")
    assert "broken.yaml" in refused("rehearse", tmp_path / "broken.yaml")
    assert "nope.json" in refused("rehearse", tmp_path / "nope.json", *SIZES, *MESH)
    assert "--mesh" in refused("rehearse", CONFIG, *SIZES)
    assert "mesh: found 'data2'" in refused("rehearse", CONFIG, *SIZES, "--mesh", "data2")
    assert "layout" in refused("rehearse", CONFIG, *MESH, "--layout", "nope", "--micro-batch", "8", "--sequence", "128")
    assert "float12" in refused("rehearse", CONFIG, *SIZES, *MESH, "--dtype", "float12")
    assert "params.*: found 'zero9'; allowed: one of replicate" in refused(
        "rehearse", CONFIG, *SIZES, *MESH, "--level", "zero9"
    )
    assert "beside a plan" in refused("rehearse", plan_path, *MESH)
    assert "beside a plan" in refused("rehearse", plan_path, "--level", "parameters")
    assert "--level: found 'zero9'; allowed: replicate" in refused("demo", "--level", "zero9")
    assert "--rank: found 4; allowed: 0 to 3, or all" in refused("rehearse", plan_path, "--rank", "4")
    assert "--rank" in refused("rehearse", plan_path, "--rank", "-1")
    assert "--json" in refused("rehearse", plan_path, "--json", tmp_path / "no" / "figures.json")


def cluster_file(path: Path, devices: int, memory: str) -> Path:
    path.write_text(
        f"version: 2\nhosts: 1\ndevices_per_host: {devices}\ndevice: {{name: small, memory: {memory}}}\n",
        encoding="utf-8",
    )
    return path


def test_rehearse_refuses_a_cluster_of_another_size(plan_path: Path, tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path / "cluster.yaml", 8, "1GiB")
    assert "mesh: found 4 ranks for the 8 devices" in refused("rehearse", plan_path, "--cluster", cluster)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rehearsals that tell a peak of 1000 + rank bytes; the list fills with the ranks asked for."""
    asked: list[int] = []

    def rehearse(config: Path, plan: Plan, rank: int = 0, job: str = "steps") -> Trace:
        asked.append(rank)
        events = [Alloc(1, "forward", 0), Collective(1, "forward", "", "all_gather", ("tensor",), (0, 1), 64, 32)]
        return Trace(list(events), [Storage(1000 + rank, "parameter", "head.weight", "")])

    monkeypatch.setattr("shardwright.simulate.rehearsal.rehearse", rehearse)
    return asked


def test_rehearse_shows_and_writes_the_figures(plan_path: Path, tmp_path: Path, rehearsed: list[int]) -> None:
    status, output, _ = run("rehearse", plan_path, "--json", tmp_path / "figures.json")
    assert (status, rehearsed) == (0, [0])
    assert "1,000 bytes" in output and "head.weight" in output and "all_gather" in output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rehearsed_peak"] == [1000]
    assert figures["plan"]["mesh"] == {"data": 2, "tensor": 2}
    assert figures["collectives"][0][0]["sent"] == 32


def test_rehearse_all_ranks_from_a_config(rehearsed: list[int]) -> None:
    status, output, _ = run("rehearse", CONFIG, *SIZES, *MESH, "--dtype", "bf16", "--rank", "all")
    assert (status, rehearsed) == (0, [0, 1, 2, 3])
    assert "1,003 bytes" in output


def test_rehearse_against_a_cluster(plan_path: Path, tmp_path: Path, rehearsed: list[int]) -> None:
    cluster = cluster_file(tmp_path / "cluster.yaml", 4, "1002B")
    assert run("rehearse", plan_path, "--cluster", cluster)[0] == 0
    line = refused("rehearse", plan_path, "--rank", "all", "--cluster", cluster, status=3)
    assert "the peak of rank 3" in line and "1,003 bytes" in line and "1,002 bytes" in line


# demo


def test_demo_refuses_bad_input(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    assert "--memory" in refused("demo", "--memory", "1GB")
    assert "--ranks" in refused("demo", "--ranks", "0")
    assert "--steps" in refused("demo", "--steps", "1")
    assert "--output" in refused("demo", "--output", tmp_path / "full")
    assert "--json" in refused("demo", "--json", tmp_path / "no" / "figures.json")
    assert "seed" in refused("demo", "--seed", "-1")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


# train


def test_train_without_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert "torch.distributed.run" in refused("train", tmp_path / "run.yaml")


def test_train_refuses_from_rank_0_and_every_rank_exits_with_2(plan_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(
        "version: 1\nplan: plan.yaml\ndata: {text: [a.txt], tokenizer: tokenizer.json}\nsteps: 2\noutput: out\n"
    )
    done = subprocess.run(
        command(["train", str(tmp_path / "run.yaml")], 3),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "needs 4 ranks, found 3" in lines[0]
    assert done.stderr.count("exitcode  : 2 ") == 3
    assert not (tmp_path / "out").exists()


def test_bounds_tells_of_every_product() -> None:
    status, output, _ = run("bounds", CONFIG, "--ranks", "8,64", "--tokens", "8192")
    assert status == 0
    assert output.count("*.mlp.down") == 2 and output.count("lm_head") == 2
    assert "--ranks: found '8,x'" in refused("bounds", CONFIG, "--ranks", "8,x")


def test_rehearse_tells_what_sites_move_beside_the_bound(plan_path: Path, tmp_path: Path, rehearsed: list[int]) -> None:
    _, output, _ = run("rehearse", plan_path, "--json", tmp_path / "figures.json")
    assert "beside the bound" in output
    sites = {entry["site"]: entry for entry in json.loads((tmp_path / "figures.json").read_text())["sites"]}
    assert sites["*.mlp.down"]["forward"] == 0 and sites["*.mlp.down"]["bound"] > 0

"""The run file: which plan trains on which documents, for how long, and where the results go."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from shardwright.files.messages import FieldError
from shardwright.files.parser import STRICT, Version1, read_yaml
from shardwright.train.extras import PACKAGES, check_extra

Text = Annotated[str, Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Metrics = Literal["jsonl", "tensorboard"]

FILES = {"text": "text files", "jsonl": "JSON-lines files", "parquet": "parquet files"}
"""Kinds of files that hold documents, and what their list is called."""


def _must_be_file(path: str, info: ValidationInfo, what: str) -> None:
    """Only a run that comes from a file knows what its paths are relative to."""
    if info.context and not (info.context["directory"] / path).is_file():
        raise FieldError((), f"{path!r}, which is no file in {info.context['directory']}", what)


def _must_not_be_file(path: str, info: ValidationInfo) -> str:
    if info.context and (info.context["directory"] / path).is_file():
        raise FieldError((), f"{path!r}, which is a file", "a directory, which may not exist yet")
    return path


def _matches(directory: Path, pattern: str) -> list[Path]:
    """Files that a path or glob names, sorted by name; ``**`` crosses directories."""
    literal = directory / pattern
    if literal.is_file():
        return [Path(os.path.abspath(literal))]
    found = glob.glob(os.path.join(glob.escape(str(directory)), pattern), recursive=True)
    return [Path(os.path.abspath(path)) for path in sorted(found) if os.path.isfile(path)]


def _files(kind: str) -> Any:
    """A field for the files of one kind; whoever gives none of them leaves the list empty."""
    return Field(
        default_factory=list,
        min_length=1,
        description=f"{FILES[kind]}, as paths or globs (** crosses directories) relative to the run file; "
        f"exactly one of {', '.join(FILES)} is given",
    )


class Source(BaseModel):
    """Files of one kind, and where a document is in them. Files are read in the sorted order of their paths."""

    model_config = STRICT | ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [kind]} for kind in FILES],
            "not": {"required": ["text", "field"]},
        }
    )

    text: list[Text] = _files("text")
    jsonl: list[Text] = _files("jsonl")
    parquet: list[Text] = _files("parquet")
    field: Text = Field(default="text", description="JSON key, or parquet column, that holds a document")

    @field_validator(*FILES)
    @classmethod
    def _files_exist(cls, patterns: list[str], info: ValidationInfo) -> list[str]:
        if info.context:
            directory, kind = info.context["directory"], str(info.field_name)
            for index, pattern in enumerate(patterns):
                if not _matches(directory, pattern):
                    raise FieldError(
                        (index,),
                        f"{pattern!r}, which matches no file in {directory}",
                        f"a path or glob of {FILES[kind]}",
                    )
            if kind in PACKAGES:
                check_extra(kind)
        return patterns

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in FILES if kind in self.model_fields_set]
        if len(given) != 1:
            raise FieldError((), " and ".join(given) or "none of them", f"exactly one of {', '.join(FILES)}")
        if given == ["text"] and "field" in self.model_fields_set:
            raise FieldError(("field",), f"{self.field!r} beside text", "a field beside jsonl or parquet")
        return self

    @property
    def kind(self) -> str:
        """The kind of the files, a name of `shardwright.train.sources.KINDS`."""
        return next(kind for kind in FILES if kind in self.model_fields_set)

    @property
    def patterns(self) -> list[str]:
        """The paths and globs of the files."""
        patterns: list[str] = getattr(self, self.kind)
        return patterns


class Data(Source):
    """What the model reads."""

    tokenizer: Text = Field(description="path of a tokenizer.json of the tokenizers library, relative to the run file")
    end_token: Text | None = Field(
        default=None,
        description="token that ends each document; null: the eos_token of the tokenizer_config.json beside the "
        "tokenizer, else the tokenizer's <|endoftext|>, <|end_of_text|>, </s> or <eos>",
    )

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_exists(cls, tokenizer: str, info: ValidationInfo) -> str:
        _must_be_file(tokenizer, info, "the path of a tokenizer.json, relative to the run file")
        return tokenizer


class Evaluation(Source):
    """Held-out documents, the same batches of which are evaluated every time."""

    every: int = Field(
        ge=1, description="optimizer steps from one evaluation to the next; a recording (steps 1 and 2) has none inside"
    )
    batches: int = Field(default=8, ge=1, description="batches of an evaluation, each of the plan's sequences")


class Checkpoint(BaseModel):
    """Where a run saves itself, and continues from when it is started again."""

    model_config = STRICT

    directory: Text = Field(
        description="directory of the checkpoints, relative to the run file; a run continues from the newest whole one"
    )
    every: int = Field(
        ge=1,
        description="optimizer steps from one checkpoint to the next; the last step makes one too, and a recording "
        "(steps 1 and 2) has none inside",
    )
    keep: int = Field(default=2, ge=1, description="checkpoints that stay, the newest ones")

    @field_validator("directory")
    @classmethod
    def _directory_is_no_file(cls, path: str, info: ValidationInfo) -> str:
        return _must_not_be_file(path, info)


class Run(BaseModel):
    """One training run. The optimizer is AdamW; sizes of batch and sequence stand in the plan."""

    model_config = STRICT

    version: Version1 = Field(description="version of this schema")
    plan: Text = Field(description="path of the plan file, relative to the run file")
    data: Data = Field(description="what the model reads")
    steps: int = Field(ge=1, description="optimizer steps")
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's step size, without a unit")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay, without a unit")
    max_grad_norm: float | None = Field(
        default=None,
        gt=0,
        description="2-norm over the whole mesh to which gradients are clipped, without a unit; null: not clipped",
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95),
        strict=False,
        description="AdamW's decay rates of the first and second moment, without a unit",
    )
    output: Text = Field(description="directory that the run writes into, relative to the run file")
    metrics: list[Metrics] = Field(
        default=["jsonl"],
        description="what metrics are written as: jsonl appends to metrics.jsonl, tensorboard adds an event file",
    )
    record: bool = Field(
        default=False,
        description="record steps 1 and 2 and save one trace for each rank; a run that continues records nothing",
    )
    cluster: Text | None = Field(
        default=None,
        description="path of a cluster file, relative to the run file; it must have as many devices as the plan has "
        "ranks, and a device room for its peak: the one that the plan predicts, else that of rank 0 as it is rehearsed",
    )
    evaluation: Evaluation | None = Field(default=None, description="held-out documents; null: none are evaluated")
    checkpoint: Checkpoint | None = Field(default=None, description="checkpoints to save and continue from; null: none")
    weights: Text | None = Field(
        default=None,
        description="Hugging Face directory with the safetensors files that training starts from, relative to the run "
        "file; null: weights are drawn from the plan's seed",
    )
    export: Text | None = Field(
        default=None,
        description="directory, relative to the run file, into which the trained model is written as Hugging Face's "
        "from_pretrained opens it; null: it is not",
    )

    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("plan", "cluster")
    @classmethod
    def _file_exists(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None:
            _must_be_file(path, info, f"the path of a {info.field_name} file, relative to the run file")
        return path

    @field_validator("output")
    @classmethod
    def _output_is_no_file(cls, path: str, info: ValidationInfo) -> str:
        return _must_not_be_file(path, info)

    @field_validator("weights")
    @classmethod
    def _weights_exist(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.context and not (info.context["directory"] / path).is_dir():
            raise FieldError(
                (),
                f"{path!r}, which is no directory in {info.context['directory']}",
                "a Hugging Face directory with safetensors files, relative to the run file",
            )
        return path

    @field_validator("export")
    @classmethod
    def _export_is_free(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.context:
            _must_not_be_file(path, info)
            place = info.context["directory"] / path
            if place.is_dir() and any(place.iterdir()):
                raise FieldError((), f"{path!r}, which is not empty", "a directory that is empty or does not exist yet")
        return path

    @field_validator("metrics")
    @classmethod
    def _metrics_available(cls, metrics: list[str], info: ValidationInfo) -> list[str]:
        for index, word in enumerate(metrics):
            if word in metrics[:index]:
                raise FieldError((index,), f"{word!r} a second time", "each word once")
            if info.context and word in PACKAGES:
                check_extra(word, (index,))
        return metrics

    @model_validator(mode="after")
    def _evaluated_at_all(self) -> Run:
        if self.evaluation is not None and self.evaluation.every > self.steps:
            raise FieldError(
                ("evaluation", "every"),
                f"{self.evaluation.every}, which none of the {self.steps} steps reaches",
                f"a whole number of at most {self.steps}",
            )
        return self

    @model_validator(mode="after")
    def _keep_directory(self, info: ValidationInfo) -> Run:
        if info.context:
            self._directory = info.context["directory"]
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """The run in a file; raises InputError, one line. The files that it names must exist."""
        return read_yaml(path, cls)

    def _absolute(self, path: str) -> Path:
        return Path(os.path.abspath(self._directory / path))

    @property
    def plan_path(self) -> Path:
        """The plan file, absolute."""
        return self._absolute(self.plan)

    def source_paths(self, source: Source) -> tuple[Path, ...]:
        """Every file of a source of this run, absolute, once, in the order of the entries, sorted by name in each."""
        found = (path for pattern in source.patterns for path in _matches(self._directory, pattern))
        return tuple(dict.fromkeys(found))

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer file, absolute."""
        return self._absolute(self.data.tokenizer)

    @property
    def output_dir(self) -> Path:
        """The output directory, absolute; it may not exist yet."""
        return self._absolute(self.output)

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory of checkpoints, absolute, if the run saves any; it may not exist yet."""
        return self._absolute(self.checkpoint.directory) if self.checkpoint is not None else None

    @property
    def weights_dir(self) -> Path | None:
        """The directory of the weights that training starts from, absolute, if the run names one."""
        return self._absolute(self.weights) if self.weights is not None else None

    @property
    def export_dir(self) -> Path | None:
        """The directory for the trained model, absolute, if the run wants it."""
        return self._absolute(self.export) if self.export is not None else None

    @property
    def cluster_path(self) -> Path | None:
        """The cluster file, absolute, if the run names one."""
        return self._absolute(self.cluster) if self.cluster is not None else None

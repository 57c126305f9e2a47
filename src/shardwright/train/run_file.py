"""The run file: which plan trains on which text, for how long, and where the results go."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from shardwright._files import STRICT, FieldError, Version1, read_yaml

Text = Annotated[str, Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _must_be_file(path: str, info: ValidationInfo, what: str) -> None:
    """Only a run that comes from a file knows what its paths are relative to."""
    if info.context and not (info.context["directory"] / path).is_file():
        raise FieldError((), f"{path!r}, which is no file in {info.context['directory']}", what)


def _matches(directory: Path, pattern: str) -> list[Path]:
    """Files that a path or glob names, sorted by name; ``**`` crosses directories."""
    literal = directory / pattern
    if literal.is_file():
        return [Path(os.path.abspath(literal))]
    found = glob.glob(os.path.join(glob.escape(str(directory)), pattern), recursive=True)
    return [Path(os.path.abspath(path)) for path in sorted(found) if os.path.isfile(path)]


class Data(BaseModel):
    """What the model reads."""

    model_config = STRICT

    text: list[Text] = Field(
        min_length=1, description="text files, as paths or globs (** crosses directories) relative to the run file"
    )
    tokenizer: Text = Field(description="path of a tokenizer.json of the tokenizers library, relative to the run file")

    @field_validator("text")
    @classmethod
    def _text_exists(cls, text: list[str], info: ValidationInfo) -> list[str]:
        if info.context:
            directory = info.context["directory"]
            for index, pattern in enumerate(text):
                if not _matches(directory, pattern):
                    raise FieldError(
                        (index,), f"{pattern!r}, which matches no file in {directory}", "a path or glob of text files"
                    )
        return text

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_exists(cls, tokenizer: str, info: ValidationInfo) -> str:
        _must_be_file(tokenizer, info, "the path of a tokenizer.json, relative to the run file")
        return tokenizer


class Run(BaseModel):
    """One training run. The optimizer is AdamW; sizes of batch and sequence stand in the plan."""

    model_config = STRICT

    version: Version1 = Field(description="version of this schema")
    plan: Text = Field(description="path of the plan file, relative to the run file")
    data: Data = Field(description="what the model reads")
    steps: int = Field(ge=1, description="optimizer steps")
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's step size, without a unit")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay, without a unit")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW's decay rates of the first and second moment"
    )
    output: Text = Field(description="directory that the run writes into, relative to the run file")
    record: bool = Field(default=False, description="record steps 1 and 2 and save one trace for each rank")
    cluster: Text | None = Field(default=None, description="path of a cluster file, relative to the run file")

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
        if info.context and (info.context["directory"] / path).is_file():
            raise FieldError((), f"{path!r}, which is a file", "a directory, which may not exist yet")
        return path

    @model_validator(mode="after")
    def _keep_directory(self, info: ValidationInfo) -> Run:
        if info.context:
            self._directory = info.context["directory"]
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """The run in a file; raises InputError, one line. Plan, tokenizer, cluster and text files must exist."""
        return read_yaml(path, cls)

    def _absolute(self, path: str) -> Path:
        return Path(os.path.abspath(self._directory / path))

    @property
    def plan_path(self) -> Path:
        """The plan file, absolute."""
        return self._absolute(self.plan)

    @property
    def text_paths(self) -> tuple[Path, ...]:
        """Every text file, absolute, once, in the order of the entries and sorted by name within each."""
        found = (path for pattern in self.data.text for path in _matches(self._directory, pattern))
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
    def cluster_path(self) -> Path | None:
        """The cluster file, absolute, if the run names one."""
        return self._absolute(self.cluster) if self.cluster is not None else None

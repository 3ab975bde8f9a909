"""From a command line to the three dataclasses: without any problem, or as far as it can be judged with them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hfpretrain.arguments.command_line import Reading, read_command_line
from hfpretrain.arguments.defaults import settle
from hfpretrain.arguments.fields import DataArguments, ModelArguments, PretrainArguments
from hfpretrain.arguments.rules import check_values
from hfpretrain.errors import Problem, refuse


@dataclass(frozen=True)
class Parsed:
    """What a command line says, and what is wrong with it.

    Attributes:
        problems: unknown keys, values that cannot be read, contradictions; each with its source.
        doubtful: fields that hold their default because their own value could not be read: not to be judged.
        contradicted: fields that the contradictions are about: said once, not to be judged in other words again.
    """

    model_args: ModelArguments
    data_args: DataArguments
    args: PretrainArguments
    problems: list[Problem]
    doubtful: frozenset[str]
    contradicted: frozenset[str] = frozenset()


def parse(argv: Sequence[str] | None = None) -> tuple[ModelArguments, DataArguments, PretrainArguments]:
    """Read `--config` files and the command line into the three dataclasses.

    Args:
        argv: the command line without the program's name; None takes this process's.

    Raises:
        ConfigError: with every unknown key, wrong type and contradiction at once, each with its source and remedy.
        SystemExit: after `--help` or `--help_all` only.
    """
    read = _read(argv)
    refuse(read.problems)  # before TrainingArguments is built, which makes a process group
    parsed = _build(read)
    refuse(parsed.problems)
    return parsed.model_args, parsed.data_args, parsed.args


def parse_leniently(argv: Sequence[str] | None = None) -> Parsed:
    """As `parse`, but with the problems beside what could be read, so that the rest can be judged in the same launch.

    Raises:
        ConfigError: transformers refuses to build its arguments whatever is left out.
        SystemExit: after `--help` or `--help_all` only.
    """
    return _build(_read(argv))


@dataclass(frozen=True)
class _Read:
    reading: Reading
    values: SimpleNamespace
    problems: list[Problem]
    contradicted: frozenset[str]


def _read(argv: Sequence[str] | None) -> _Read:
    argv = list(sys.argv[1:] if argv is None else argv)
    reading = read_command_line((ModelArguments, DataArguments, PretrainArguments), argv)
    values = SimpleNamespace(**reading.values)
    settle(values, reading.sources)
    rules = check_values(values, sources=reading.sources)
    judged = [(fields, problem) for fields, problem in rules if not reading.bad_fields.intersection(fields)]
    contradicted = frozenset(name for fields, _ in judged for name in fields)
    return _Read(reading, values, reading.problems + [problem for _, problem in judged], contradicted)


def _build(read: _Read) -> Parsed:
    """Fields that transformers refuses are noted, set to their default and tried without."""
    reading, values = read.reading, read.values
    problems, doubtful = list(read.problems), set(reading.bad_fields)
    given = reading.values_of(PretrainArguments, values)
    while True:
        try:
            args = PretrainArguments(**given)
            break
        except (ValueError, ImportError, RuntimeError) as error:
            named = [name for name in given if name in str(error) and reading.sources[name] != "default"]
            if isinstance(error, RuntimeError) and not named:  # no argument's fault: a process group that does not form
                raise
            problems.append(_refused_by_transformers(error, {name: reading.sources[name] for name in named}))
            if not named:
                refuse(problems)
            doubtful |= set(named)
            given = {name: value for name, value in given.items() if name not in named}
    args.sources = reading.sources
    if reading.sources["gradient_accumulation_steps"] != "default":
        args.accumulation_asked = values.gradient_accumulation_steps
    return Parsed(
        ModelArguments(**reading.values_of(ModelArguments, values)),
        DataArguments(**reading.values_of(DataArguments, values)),
        args,
        problems,
        frozenset(doubtful),
        read.contradicted,
    )


def _refused_by_transformers(error: Exception, named: Mapping[str, Any]) -> Problem:
    origin = ", ".join(f"{name} from {source}" for name, source in named.items()) or "see the message"
    return Problem(
        what="transformers.TrainingArguments refuses these arguments",
        given=str(error).replace("\n", " "),
        source=origin,
        remedy="change the field that the message names",
    )

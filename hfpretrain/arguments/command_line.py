"""YAML files and the command line -> one flat set of values, with every mistake collected instead of the first.

The files are merged, written out as command-line tokens and put before the real command line, so that argparse does all
typing once and a value means the same in a file and in a flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser, TrainingArguments

from hfpretrain.arguments.files import merge_files, merged_deeply
from hfpretrain.arguments.types import CONVERTERS
from hfpretrain.arguments.unknown_keys import nearest, unknown_key
from hfpretrain.errors import Problem

COMMAND_LINE = "command line"
DEFAULT = "default"

# Mappings whose keys are merged over the files and the command line; any other value replaces the earlier one.
MERGED = {"config_overrides", "mup_base_config", "mup_overrides"}
DICT_FIELDS = MERGED | set(TrainingArguments._VALID_DICT_FIELDS)
_MISSING = object()


@dataclass(frozen=True)
class Kind:
    """What a field's annotation says about the words it takes."""

    optional: bool
    many: bool


@dataclass
class Reading:
    """What was read: a value for every field, its source, and every problem met on the way.

    `bad_fields` names the fields whose value could not be read, or was given under a name that does not exist; they
    hold their default, so no rule should judge them.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    problems: list[Problem]
    bad_fields: set[str]

    def values_of(self, cls: type, values: Any) -> dict[str, Any]:
        """The values that belong to one dataclass, by field name."""
        return {f.name: getattr(values, f.name) for f in dataclasses.fields(cls) if f.init}


def read_command_line(classes: Sequence[type], argv: Sequence[str]) -> Reading:
    """Read `--config` files and flags for these dataclasses.

    Raises:
        SystemExit: after `--help` or `--help_all`; everything else ends up in `Reading.problems`.
    """
    if any(word in {"-h", "--help", "--help_all"} for word in argv):
        print(_help_text(classes, everything="--help_all" in argv))
        raise SystemExit(0)
    names = {f.name: _kind(cls, f.name) for cls in classes for f in dataclasses.fields(cls) if f.init}
    files, flags = _split_config(argv)
    problems: list[Problem] = []
    meant: set[str] = set()
    given, sources = merge_files(files, names, problems=problems, meant=meant)
    reading = Reading(values={}, sources=dict.fromkeys(names, DEFAULT) | sources, problems=problems, bad_fields=set())
    tokens = _known_flags(flags, names, reading, meant)
    reading.bad_fields |= {name for name in meant if reading.sources[name] == DEFAULT}
    overridden = {name for name, source in reading.sources.items() if source == COMMAND_LINE}
    file_tokens: list[str] = []
    for name, value in given.items():
        if name not in overridden or name in MERGED:
            file_tokens += _tokens(name, value, reading, kind=names[name], source=sources[name])
    for name in MERGED & overridden & given.keys():
        reading.sources[name] = f"{sources[name]}, {COMMAND_LINE}"
    parser = _parser(classes, names, reading)
    try:
        namespace, strays = parser.parse_known_args(file_tokens + tokens)
    except _UnreadableError as error:
        what = f"the command line cannot be read: {error}"
        problems.append(Problem(what, " ".join(flags), COMMAND_LINE, "correct that flag"))
        namespace, strays = parser.parse_known_args([])
        reading.bad_fields |= names.keys()
    if strays:
        what = "a value that belongs to no flag"
        problems.append(Problem(what, " ".join(strays), COMMAND_LINE, "remove it, or put its flag before it"))
    reading.values = {name: getattr(namespace, name) for name in names}
    _note_missing(reading, defaults=parser.parse_known_args([])[0])
    return reading


def _note_missing(reading: Reading, *, defaults: argparse.Namespace) -> None:
    for name, value in reading.values.items():
        if value is _MISSING or (value == [] and reading.sources[name] != DEFAULT):
            reading.bad_fields.add(name)
            reading.values[name] = getattr(defaults, name)
            what, remedy = f"{name} has no value", f"give --{name} its value, or leave the flag out"
            reading.problems.append(Problem(what, f"--{name}", reading.sources[name], remedy))


def _kind(cls: type, name: str) -> Kind:
    hint = get_type_hints(cls)[name]
    return Kind(optional=type(None) in get_args(hint), many=get_origin(hint) is list)


# --- files to words ---------------------------------------------------------------------------------------------------


def _tokens(name: str, value: Any, reading: Reading, *, kind: Kind, source: str) -> list[str]:
    """One field of a file as command-line words."""
    flag = f"--{name}"
    if isinstance(value, dict) and name in DICT_FIELDS:
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list) and kind.many and value and not any(isinstance(item, list | dict) for item in value):
        return [flag, *(_text(item) for item in value)]
    if not isinstance(value, list | dict) and name not in MERGED:
        return [f"{flag}={_text(value)}"]
    reading.bad_fields.add(name)
    expected = "a mapping" if name in MERGED else "one value or a list of values" if kind.many else "one value"
    reading.problems.append(Problem(f"{name} has the wrong form", str(value), source, f"expected {expected}"))
    return []


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files after every `--config`, and the rest."""
    files: list[str] = []
    rest: list[str] = []
    in_config = False
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            in_config = name == "--config"
            if in_config:
                files += [value] if equals else []
                continue
        (files if in_config else rest).append(word)
    return files, rest


# --- flags ----------------------------------------------------------------------------------------------------------


def _known_flags(flags: Sequence[str], names: Mapping[str, Kind], reading: Reading, meant: set[str]) -> list[str]:
    """The words that argparse shall see: without unknown flags and their values, which become problems."""
    kept: list[str] = []
    dropping: list[str] | None = None
    for position, word in enumerate(flags):
        if not word.startswith("--"):
            if dropping is None:
                kept.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        field_name = name if name in names else name.removeprefix("no_")
        if field_name in names:
            dropping = None
            reading.sources[field_name] = COMMAND_LINE
            kept.append(word)
        else:
            dropping = [word]
            values = [value] if equals else _until_flag(flags[position + 1 :])
            reading.problems.append(unknown_key(name, " ".join(values), source=COMMAND_LINE, names=names))
            meant |= {near for near in [nearest(name, names)] if near}
    return kept


def _until_flag(words: Sequence[str]) -> list[str]:
    taken: list[str] = []
    for word in words:
        if word.startswith("--"):
            break
        taken.append(word)
    return taken


class _UnreadableError(Exception):
    pass


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UnreadableError(message)


class _Typed:
    """An argparse type that notes what it cannot read and goes on, so that every mistake is found in one pass."""

    def __init__(self, action: argparse.Action, *, optional: bool, reading: Reading) -> None:
        self.name = action.dest
        self.convert: Any = CONVERTERS.get(self.name) or action.type or str
        self.choices = list(action.choices) if action.choices is not None else None
        self.default = action.default
        self.optional = optional
        self.reading = reading
        self.merged: dict[str, Any] = {}

    def __call__(self, text: str) -> Any:
        if self.optional and text.lower() in {"none", "null"}:
            return None
        try:
            value = self.convert(text)
            if self.name in MERGED:
                value = self.merged = merged_deeply(self.merged, value)
            if self.choices is None or value in self.choices:
                return value
            reason = "expected one of " + ", ".join(map(str, self.choices))
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            reason = self._reason(error)
        self.reading.bad_fields.add(self.name)
        problem = Problem(f"{self.name} cannot be read", text, self.reading.sources[self.name], reason)
        if problem not in self.reading.problems:
            self.reading.problems.append(problem)
        return self.default

    def _reason(self, error: Exception) -> str:
        expected = {int: "a whole number", float: "a number"}
        if self.convert in expected:
            return f"expected {expected[self.convert]}" + (" or none" if self.optional else "")
        return str(error)


def _parser(classes: Sequence[type], names: Mapping[str, Kind], reading: Reading) -> _Parser:
    parser = _Parser([cast(Any, cls) for cls in classes], allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.nargs == 0:  # the --no_... switches
            continue
        action.type = _Typed(action, optional=names[action.dest].optional, reading=reading)
        action.choices = None
        # A flag without its value must not end the reading: it is noted afterwards.
        if action.nargs is None:
            action.nargs, action.const = "?", _MISSING
        elif action.nargs == "+":
            action.nargs = "*"
    return parser


# --- help -----------------------------------------------------------------------------------------------------------


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        choices = "|".join(map(str, action.choices)) if action.choices is not None else ""
        many = " ..." if action.nargs == "+" else ""
        default = action.default if action.default not in (None, [], {}, "") else "not set"
        return f"{action.option_strings[0]} {choices or 'VALUE'}{many}   [default: {default}]"


def _help_text(classes: Sequence[type], *, everything: bool) -> str:
    parser = HfArgumentParser(
        [cast(Any, cls) for cls in classes],
        add_help=False,
        formatter_class=_HelpFormatter,
        usage="%(prog)s [--config FILE.yaml ...] [--FIELD VALUE ...]",
        description="Files after --config are merged from left to right, then the command line; same names in both. "
        "'none' (null in YAML) unsets a field that may be empty.",
    )
    shown = {name for cls in classes for name in cls.__annotations__}
    for action in parser._actions:
        if action.nargs == 0 or not (everything or action.dest in shown):
            action.help = argparse.SUPPRESS
    return parser.format_help()

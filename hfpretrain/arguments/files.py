"""YAML configuration files -> one mapping, merged from left to right, with every mistake collected."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from hfpretrain.arguments.unknown_keys import nearest, unknown_key
from hfpretrain.errors import Problem


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-3 is a number, `no` is a word), and a key given twice is an error, not the last."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way; the base class declares it)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands here twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:[Tt]rue|TRUE|[Ff]alse|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def merge_files(
    files: Sequence[str], names: Collection[str], *, problems: list[Problem], meant: set[str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """(field -> value, field -> file). `problems` gets what cannot be read, `meant` the fields near unknown keys."""
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for file in files:
        try:
            content = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            problems.append(
                Problem(
                    f"a configuration file cannot be read: {reason}", file, "--config", "correct the path or the file"
                )
            )
            continue
        if not isinstance(content, dict):
            problems.append(
                Problem("a configuration file is not a mapping", file, "--config", "write one `field: value` per line")
            )
            continue
        for key, value in content.items():
            if key not in names:
                problems.append(unknown_key(str(key), value, source=file, names=names))
                if meant is not None and (near := nearest(str(key), names)):
                    meant.add(near)
                continue
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merged_deeply(merged[key], value) if both else value
            sources[key] = file if not both else f"{sources[key]}, {file}"
    return merged, sources


def merged_deeply(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    result = dict(left)
    for key, value in right.items():
        old = result.get(key)
        result[key] = merged_deeply(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result

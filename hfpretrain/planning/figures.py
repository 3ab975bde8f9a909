"""A number with its unit, its formula and its source, and the table of them that people read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BYTES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True)
class Figure:
    """A number that can be read without its context.

    Attributes:
        name: what it is; `value` is in `unit`, "share" a fraction of 1.
        formula: how it follows. b is per_device_train_batch_size, K accumulation_steps, W world_size,
            L sequence_length, N parameters, D total_tokens.
        source: whose formula, or where the rule is in force.
    """

    name: str
    value: float
    unit: str
    formula: str
    source: str = "definition"


@dataclass(frozen=True)
class Section:
    """Figures that belong together."""

    title: str
    figures: tuple[Figure, ...]


def plan_table(sections: Sequence[Section], *, explain: bool = False) -> str:
    """`figure_table` of each section under its title."""
    return "\n\n".join(
        f"{section.title}\n{figure_table(section.figures, explain=explain)}" for section in sections if section.figures
    )


def figure_table(figures: Sequence[Figure], *, explain: bool = False) -> str:
    """One line a figure: name, value, unit, and with `explain` formula and source."""
    lines = []
    for figure in figures:
        value, unit = figure.value, figure.unit
        if unit == "bytes":
            value, unit = next(((value / size, name) for size, name in _BYTES if abs(value) >= size), (value, unit))
        elif unit == "share":
            value, unit = 100 * value, "%"
        whole = isinstance(figure.value, int) and unit == figure.unit
        shown = f"{value:,}" if whole else f"{value:,.4g}" if value < 1e4 else f"{value:.4g}"
        line = f"{figure.name.removesuffix('_bytes').replace('_', ' '):<36}{shown:>18} {unit:<16}"
        lines.append((f"{line}  {figure.formula}  [{figure.source}]" if explain else line).rstrip())
    return "\n".join(lines)


def positive(**values: float) -> None:
    """ValueError unless all of these are above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0; got {value}")

"""One way to say what is wrong with a run: every problem at once, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Problem:
    """One thing about a run that cannot be right.

    Attributes:
        what: what is wrong and why it matters, one sentence.
        given: the offending value as the user wrote it.
        source: where the value came from: a file, a flag, "default", the environment.
        remedy: what to change to make it right.
    """

    what: str
    given: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}\n      given:  {self.given}  ({self.source})\n      remedy: {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """One line of what was checked before the first step.

    Attributes:
        check: what was looked at, one word.
        verdict: "ok"; "note": allowed, but worth a look; "problem": the run is refused.
        why: what was found.
        value, source, remedy: as in `Problem`; empty where there is nothing to change.
    """

    check: str
    verdict: Literal["ok", "note", "problem"]
    why: str
    value: str = ""
    source: str = ""
    remedy: str = ""


class ConfigError(ValueError):
    """Raised before the first step with *all* problems that were found, so that none costs a launch of its own."""

    agreed = False  # whether every rank raises the same, so that one of them may speak for all

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        head = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        body = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        super().__init__(f"{head} with this run:\n{body}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        """Exceptions are pickled by their message unless told otherwise; this one may come from a worker process."""
        return type(self), (self.problems,)


def refuse(problems: Sequence[Problem]) -> None:
    """Raise `ConfigError` if there is any problem, else do nothing."""
    if problems:
        raise ConfigError(problems)

"""The list before the first step: what was checked, what was found, how long that took; and one refusal for all of it.

What is right or worth a note is printed as it is found, because what follows may take hours (tokenising). Problems are
collected and refused together, by all ranks with the same list.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist

from hfpretrain.errors import ConfigError, Problem, Verdict

T = TypeVar("T")

WIDTH = 120  # columns
WORK = "tokens"  # the name under which what is no check is timed: tokenising
_INDENT = " " * 18


class Verdicts:
    """The verdicts of one launch, on this rank.

    Attributes:
        found: in the order in which they were found.
        seconds: check -> time it took, in the order of the first of each name.
        json_path: where `refuse` and `write` put the list; None: nowhere.
        lenient: while there are problems, a check that breaks off in any other way is left out, aloud. Checks expect
            values that go together; not for checks in which ranks talk to one another.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None] | None = None,
        sources: Mapping[str, str] | None = None,
        doubtful: Collection[str] = (),
    ) -> None:
        """
        Args:
            say: prints a line; default is rank 0's standard output, and nothing on the others.
            sources: field -> where its value came from, for problems that name a field as their source.
            doubtful: fields that could not be read; checks that need them are left out, aloud.
        """
        self.found: list[Verdict] = []
        self.seconds: dict[str, float] = {}
        self.json_path: Path | None = None
        self.lenient = False
        self.sources = dict(sources or {})
        self.doubtful = set(doubtful)
        self._problems: list[Problem] = []
        self._say = say or (_print if os.environ.get("RANK", "0") == "0" else lambda _: None)

    @property
    def problems(self) -> list[Problem]:
        """Those of this rank so far."""
        return list(self._problems)

    def problems_of(self, check: str) -> bool:
        """Whether this check has found a problem here."""
        return any(verdict.check == check and verdict.verdict == "problem" for verdict in self.found)

    def ok(self, check: str, why: str, *, aloud: bool = True) -> None:
        """Nothing to do about this; `aloud` prints it, the list has it in any case."""
        self._add(Verdict(check, "ok", why), aloud=aloud)

    def note(self, check: str, why: str, *, value: str = "", source: str = "", remedy: str = "") -> None:
        self._add(Verdict(check, "note", why, value, source, remedy))

    def problem(self, check: str, problems: Iterable[Problem]) -> bool:
        """Add problems that are not known yet; whether there was any, known or not."""
        problems = list(problems)
        for problem in problems:
            where = self.sources.get(problem.source, "default")
            named = problem if where == "default" else replace(problem, source=f"{problem.source} from {where}")
            if named not in self._problems:
                self._problems.append(named)
                verdict = Verdict(check, "problem", named.what, named.given, named.source, named.remedy)
                self._add(verdict, aloud=False)  # the refusal says it, once
        return bool(problems)

    @contextmanager
    def timed(self, check: str) -> Iterator[None]:
        """Count the time of what is inside for this check; a `ConfigError` inside becomes its problems, and ends it."""
        start = time.perf_counter()
        try:
            yield
        except ConfigError as error:
            self.problem(check, error.problems)
        except Exception as error:
            if not (self.lenient and self._problems):
                raise
            self.note(check, f"not judged, because of the problems found so far: {type(error).__name__}: {error}")
        finally:
            self.seconds[check] = self.seconds.get(check, 0.0) + time.perf_counter() - start

    def attempt(self, check: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """What the function returns; None where it raises ConfigError, whose problems are added."""
        with self.timed(check):
            return function(*args, **kwargs)
        return None

    def needs(self, check: str, *fields: str) -> bool:
        """Whether these fields could be read; says so where not."""
        missing = [name for name in fields if name in self.doubtful]
        if missing:
            self.note(check, f"not judged: {', '.join(missing)} could not be read")
        return not missing

    def anywhere(self) -> bool:
        """Whether any rank has a problem. Collective, once there is a process group."""
        return bool(over_ranks(self._problems))

    def refuse(self) -> None:
        """Raise all problems of all ranks on every rank, if there is any. Collective, once there is a process group.

        Raises:
            ConfigError: the same on each; a problem that not all ranks have says which have it.
        """
        problems = over_ranks(self._problems)
        if problems:
            known = {(problem.what, problem.given) for problem in self._problems}
            for other in problems:
                if (other.what, other.given) not in known:
                    verdict = Verdict("ranks", "problem", other.what, other.given, other.source, other.remedy)
                    self._add(verdict, aloud=False)
            self.write()
            error = ConfigError(problems)
            error.agreed = True
            raise error

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the verdicts, and the seconds that each check took."""
        return {
            "verdicts": [asdict(verdict) for verdict in self.found],
            "seconds": {check: round(seconds, 3) for check, seconds in self.seconds.items()},
        }

    def write(self) -> None:
        """Put the list where `json_path` says; on rank 0 only."""
        if self.json_path is None or os.environ.get("RANK", "0") != "0":
            return
        try:
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:  # of which the list says more
            self.note("output_dir", f"{self.json_path} was not written: {error.strerror or error}")

    def __str__(self) -> str:
        """One line: how many of each kind, and the time, but for what a run has to do anyway (`WORK`)."""
        notes = sum(verdict.verdict == "note" for verdict in self.found)
        problems = f"{len(self._problems)} problem(s)" if self._problems else "nothing contradicts"
        checking = sum(seconds for check, seconds in self.seconds.items() if check != WORK)
        return f"{problems}; {len(self.found)} verdicts, {notes} of them notes, {checking:.1f} s"

    def _add(self, verdict: Verdict, *, aloud: bool = True) -> None:
        if verdict not in self.found:
            self.found.append(verdict)
            if aloud:
                self._say(line_of(verdict))


def line_of(verdict: Verdict) -> str:
    """A verdict as it is printed: wrapped at `WIDTH` columns; the further lines of a table as they are."""
    first, *table = verdict.why.splitlines() or [""]
    remedy = f": {verdict.remedy}" if verdict.remedy else ""
    head = f"{verdict.verdict:<5} {verdict.check:<11} {first}{remedy}"
    wrapped = textwrap.fill(head, WIDTH, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
    return "\n".join([wrapped, *(f"  {line}" for line in table)])


def over_ranks(problems: list[Problem]) -> list[Problem]:
    """The problems of all ranks, each once; where not all have it, its source says who has. The same on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(problems)
    ranks: list[list[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, problems)
    together = dict.fromkeys(problem for found in ranks for problem in found)
    merged = []
    for problem in together:
        having = [str(rank) for rank, found in enumerate(ranks) if problem in found]
        only = "" if len(having) == len(ranks) else f", on rank {', '.join(having)} only"
        merged.append(replace(problem, source=f"{problem.source}{only}"))
    return merged


def _print(line: str) -> None:
    print(line, flush=True)

"""The table of all architectures: made line by line, continued where it stopped, and never of mixed settings."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mup_architectures
from hfpretrain.errors import ConfigError
from hfpretrain.small_models import causal_model_types
from mup_architectures import Row, examine, made_with, main


def test_rows() -> None:
    """What can be checked is, with the control beside it; what cannot says why."""
    row = examine("llama")
    assert (row.verdict, row.control_verdict, row.tied, row.reason) == ("flat", "not flat", False, "")
    assert max(abs(float(cell.split()[0])) for cell in (row.size, row.change)) < 0.3
    assert float(row.control.split()[0]) > 0.4
    refused = examine("blt")
    assert refused.verdict == "refused"
    assert "remedy: " in refused.reason
    assert examine("gemma4_assistant").verdict == "not built"


def test_a_stopped_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, output = tmp_path / "lines.jsonl", tmp_path / "table.md"
    asked: list[str] = []

    def stand_in(model_type: str) -> Row:
        asked.append(model_type)
        if asked == ["llama", "gpt2"]:
            raise KeyboardInterrupt
        control = "+1.50 x" if model_type == "llama" else "+0.10 x"
        verdicts = "flat", "not flat" if model_type == "llama" else "flat"
        return Row(model_type, verdicts[0], made_with(), control=control, control_verdict=verdicts[1], reason="a|b")

    monkeypatch.setattr(mup_architectures, "examine", stand_in)
    flags = ["--only", "llama", "gpt2", "--results", str(results), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["mup_architectures.py", *flags])
    with pytest.raises(KeyboardInterrupt):
        main()
    assert not output.exists()
    main()
    assert asked == ["llama", "gpt2", "gpt2"]
    text = output.read_text()
    assert "- Verdicts: flat: 2\n- Without muP the same check says not flat on 1 of 2; flat: gpt2\n" in text
    assert f"- Not run: {len(causal_model_types()) - 2} of {len(causal_model_types())}: afmoe, " in text
    rows = [line for line in text.splitlines() if line.startswith(("| gpt2", "| llama"))]
    assert rows[0].startswith("| gpt2 | flat | no | 1 |")
    assert all(row.count("|") == 9 for row in rows)


def test_lines_of_other_settings_are_refused(tmp_path: Path) -> None:
    results = tmp_path / "lines.jsonl"
    results.write_text(json.dumps(vars(replace(Row("llama", "flat", "widths (8, 16)")))) + "\n")
    with pytest.raises(ConfigError, match=r"other settings[\s\S]*widths \(8, 16\)"):
        mup_architectures.read(results)

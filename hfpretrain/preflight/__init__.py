"""Everything that contradicts in a run, before its first step: what is checked, room by room.

`begin` judges what needs neither text nor weights; the other functions are called where a recipe has the text, the
model or its configuration. They return problems in place of raising, so that one refusal shows them all
(`hfpretrain.verdicts`). How the processes were started is checked in `hfpretrain.launch_checks`.
"""

from hfpretrain.preflight.machine import probes
from hfpretrain.preflight.model import check_model, isolation_ways, model_notes, mup_spec
from hfpretrain.preflight.start import Start, begin, check_arguments, check_start
from hfpretrain.preflight.text import check_amount, check_eval_data, check_sources, judge_text, reading

__all__ = [
    "Start",
    "begin",
    "check_amount",
    "check_arguments",
    "check_eval_data",
    "check_model",
    "check_sources",
    "check_start",
    "isolation_ways",
    "judge_text",
    "model_notes",
    "mup_spec",
    "probes",
    "reading",
]

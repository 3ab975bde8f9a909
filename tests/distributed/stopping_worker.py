"""recipes/pretrain.py on which rank 1 alone gets a SIGTERM during its fifth step."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from launching import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "recipes"))
import pretrain
from hfpretrain.launch_checks import close_process_group
from hfpretrain.training.trainer import PretrainTrainer

original = PretrainTrainer.training_step


def training_step(self: PretrainTrainer, *args: Any) -> Any:
    if self.state.global_step == 4 and self.args.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, *args)


PretrainTrainer.training_step = training_step  # type: ignore[method-assign,assignment]
pretrain.main(sys.argv[1:])
close_process_group()

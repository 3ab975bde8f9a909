"""A stock Trainer whose checkpoints are whole or absent, also when it is killed while it writes one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

from transformers import Trainer

from hfpretrain.training.checkpoints import publish, rotate, staging_dir


class WholeCheckpointTrainer(Trainer):
    """`transformers.Trainer` with another way to put its checkpoints on disk; their content is the stock one.

    Each is written to `<output_dir>/.saving`, synced and moved into place in one rename, and old ones are rotated only
    then, by step number. `save_total_limit` and all other arguments keep their meaning.
    """

    _staging: str | None = None  # where a checkpoint is being written, None outside of saving

    def write_beside_checkpoint(self, folder: Path) -> None:
        """Add files of one's own to a checkpoint before it is moved into place; on the saving process only."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        output_dir = Path(cast(str, self.args.output_dir))
        self._staging = str(staging_dir(output_dir))
        try:
            if self.args.should_save:
                shutil.rmtree(Path(self._staging) / name, ignore_errors=True)  # what a killed run left
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                os.makedirs(Path(self._staging) / name, exist_ok=True)
                self.write_beside_checkpoint(Path(self._staging) / name)
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            publish(output_dir, name)
        self.accelerator.wait_for_everyone()
        if self.is_local_process_zero():  # another node has something left to move only on a file system of its own
            publish(output_dir, name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate(output_dir, self.args.save_total_limit)

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

"""Tests use one thread per process, no network, and caches of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: tiny models on several threads spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["HFPRETRAIN_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and what was not asked for, each with its reason."""
    import torch

    asked = config.getoption("-m") or ""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m slow"))
    # Launches of real ranks last: a broken unit test shows within seconds.
    items.sort(key=lambda item: Path(item.fspath).parent.name == "distributed")

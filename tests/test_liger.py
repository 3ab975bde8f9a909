"""liger-kernel against our own kernel: on a GPU, or in Triton's interpreter on a CPU.

Neither triton nor liger-kernel is installed by the project's own set-up, so this is skipped there. By hand:
    pip install --no-deps triton liger-kernel && TRITON_INTERPRET=1 python -m pytest tests/test_liger.py
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from hfpretrain.loss import IGNORE_INDEX, head_sums
from hfpretrain.loss.liger import liger_can, liger_sums
from hfpretrain.loss.sums import LogitTransform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_liger = pytest.mark.skipif(
    find_spec("liger_kernel") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs liger-kernel and a GPU or TRITON_INTERPRET=1",
)
TRANSFORMS = {"plain": LogitTransform(), "scale": LogitTransform(scale=0.25), "softcap": LogitTransform(softcap=2.0)}


@needs_liger
@pytest.mark.parametrize("z_loss_weight", [0.0, 1e-2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_same_sums_and_gradients(name: str, z_loss_weight: float) -> None:
    if name == "softcap" and DEVICE == "cpu":
        pytest.skip("the interpreter of triton 3.9 has no tanh")
    results = []
    for kernel in (head_sums, liger_sums):
        generator = torch.Generator().manual_seed(0)
        shapes = ((37, 16), (61, 16), (61,))
        leaves = [torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
        targets = torch.randint(0, 61, (37,), generator=generator)
        targets[::4] = IGNORE_INDEX
        sums = kernel(
            *leaves[:2],
            targets.to(DEVICE),
            bias_V=leaves[2],
            z_loss_weight=z_loss_weight,
            transform=TRANSFORMS[name],
        )
        parts = [sums.total, sums.cross_entropy, sums.z_square, sums.log_z, sums.logit_max]
        results.append([*parts, *torch.autograd.grad(sums.total * 0.37, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_is_not_asked_of_it() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not liger_can(cpu, torch.float32, LogitTransform())
    assert not liger_can(cuda, torch.float64, LogitTransform())
    assert not liger_can(cuda, torch.bfloat16, LogitTransform(vocabulary=10))
    assert not liger_can(cuda, torch.bfloat16, LogitTransform(scale=1 / 6))
    assert liger_can(cuda, torch.bfloat16, LogitTransform(scale=0.25)) == (find_spec("liger_kernel") is not None)

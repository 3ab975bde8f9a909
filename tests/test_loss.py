"""Token sums against the definition, and the stock Trainer's hook."""

from __future__ import annotations

import math

import pytest
import torch

from hfpretrain.loss import IGNORE_INDEX, count_targets, cross_entropy_sum, shift_labels, token_mean_loss


def test_sum_is_the_definition_in_float64() -> None:
    """Sum over t of log sum_v exp(z_tv) - z_t,y(t+1), skipping ignored labels, written with Python floats."""
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[IGNORE_INDEX, 3, 6, IGNORE_INDEX, 0], [4, IGNORE_INDEX, 2, 1, 5]])
    expected = 0.0
    for row in range(2):
        for position in range(4):
            target = int(labels[row, position + 1])
            if target != IGNORE_INDEX:
                scores = logits[row, position].tolist()
                expected += math.log(sum(math.exp(score) for score in scores)) - scores[target]
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(expected, abs=1e-12)
    assert int(count_targets(labels)) == 3 + 3


def test_gradient_is_softmax_minus_one_hot_on_targets_and_zero_elsewhere() -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[2, 1, IGNORE_INDEX, 4]])
    cross_entropy_sum(logits, labels).backward()
    expected = torch.zeros(1, 4, 5, dtype=torch.float64)
    for position, target in ((0, 1), (2, 4)):
        expected[0, position] = logits[0, position].detach().softmax(-1)
        expected[0, position, target] -= 1
    torch.testing.assert_close(logits.grad, expected, atol=1e-14, rtol=0)


def test_nothing_to_learn_gives_zero_and_a_zero_gradient() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad) == 0


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 64, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(2))
    exact = cross_entropy_sum(logits.double(), labels)
    assert cross_entropy_sum(logits, labels).dtype == torch.float32
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(exact.item(), rel=1e-6)


def test_shifted_labels_have_no_target_at_the_end() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, IGNORE_INDEX]]


def test_mean_loss_divides_by_the_count_of_the_whole_step() -> None:
    logits = torch.randn(1, 6, 9)
    labels = torch.tensor([[IGNORE_INDEX, 1, 2, 3, 4, 5]])
    total = cross_entropy_sum(logits, labels)
    outputs = {"logits": logits}
    assert token_mean_loss(outputs, labels).item() == pytest.approx(total.item() / 5)
    assert token_mean_loss(outputs, labels, torch.tensor(20)).item() == pytest.approx(total.item() / 20)


@pytest.mark.parametrize("vocabulary", [5, 30_011])  # one chunk, and chunks of 69 rows
def test_chunks_agree_with_torch(vocabulary: int) -> None:
    logits = torch.randn(2, 101, vocabulary, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 101), generator=torch.Generator().manual_seed(1))
    labels[0, 10:90] = IGNORE_INDEX
    ours = cross_entropy_sum(logits, labels)
    (gradient,) = torch.autograd.grad(ours * 0.25, logits)
    theirs = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), shift_labels(labels).flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    (expected,) = torch.autograd.grad(theirs * 0.25, logits)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, atol=2e-7, rtol=1e-5)


def test_second_backward_is_refused_rather_than_wrong() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([[0, 1, 2]]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_bfloat16_gradient_is_the_rounded_float32_one() -> None:
    logits = torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    labels = torch.randint(0, 40, (1, 16), generator=torch.Generator().manual_seed(1))
    exact = logits.detach().float().requires_grad_()
    cross_entropy_sum(logits, labels).backward()
    cross_entropy_sum(exact, labels).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert torch.equal(logits.grad, exact.grad.bfloat16())

"""Loss sums against the definition in float64, from the logits and at the head, and the stock Trainer's hook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hfpretrain.loss import IGNORE_INDEX, count_targets, head_sums, logits_sums, shift_labels, token_mean_loss
from hfpretrain.loss.head import head_nats
from hfpretrain.loss.sums import LogitTransform, logits_nats

TOKENS, WIDTH, VOCABULARY = 13, 6, 31  # divisible by nothing


def _labels(*, ignored: tuple[int, ...] = ()) -> Tensor:
    labels = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    labels[0, list(ignored)] = IGNORE_INDEX
    return labels


def _head(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    return [
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]


def _definition(logits_NV: Tensor, targets: Tensor, z_loss_weight: float) -> tuple[float, Tensor]:
    """Loss and dL/dlogits with Python floats: log sum_v exp(z_tv) - z_t,target + w (log Z)^2, one token at a time."""
    loss, gradient = 0.0, torch.zeros_like(logits_NV)
    for token, target in enumerate(targets.tolist()):
        if target == IGNORE_INDEX:
            continue
        scores = logits_NV[token].tolist()
        top = max(scores)
        log_z = top + math.log(math.fsum(math.exp(score - top) for score in scores))
        loss += log_z - scores[target] + z_loss_weight * log_z**2
        for index, score in enumerate(scores):
            gradient[token, index] = (1 + 2 * z_loss_weight * log_z) * math.exp(score - log_z) - (index == target)
    return loss, gradient


IGNORED = {"none": (), "first and last": (1, TOKENS - 1), "a whole chunk": (4, 5, 6, 7), "all": tuple(range(TOKENS))}


@pytest.mark.parametrize("z_loss_weight", [0.0, 0.3])
@pytest.mark.parametrize("ignored", IGNORED.values(), ids=IGNORED)
def test_from_logits_is_the_definition(ignored: tuple[int, ...], z_loss_weight: float) -> None:
    hidden, weight, bias = _head()
    logits = (hidden @ weight.T + bias).detach().requires_grad_()
    labels = _labels(ignored=ignored)
    sums = logits_sums(logits[None], labels, z_loss_weight=z_loss_weight)
    (made,) = torch.autograd.grad(sums.total * 0.37, logits)
    loss, gradient = _definition(logits.detach(), shift_labels(labels)[0], z_loss_weight)
    assert sums.total.item() == pytest.approx(loss, abs=1e-10)
    torch.testing.assert_close(made, 0.37 * gradient, atol=1e-12, rtol=0)
    assert int(sums.target_tokens) == int(count_targets(labels)) == (labels[0, 1:] != IGNORE_INDEX).sum()


TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(softcap=1.5),
    "scale, softcap": LogitTransform(scale=3.0, softcap=2.0),
    "padded": LogitTransform(vocabulary=29),
}


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("ignored", IGNORED.values(), ids=IGNORED)
def test_at_the_head_is_the_definition(ignored: tuple[int, ...], transform: LogitTransform, chunk_tokens: int) -> None:
    """Loss and every gradient, chunk by chunk; autograd only takes dL/dlogits through the written-out transform."""
    hidden, weight, bias = _head()
    targets = shift_labels(_labels(ignored=ignored))[0].clamp(max=28)
    sums = head_sums(
        hidden,
        weight,
        targets,
        bias_V=bias,
        z_loss_weight=0.3,
        transform=transform,
        chunk_bytes=chunk_tokens * VOCABULARY * 8,
    )
    made = torch.autograd.grad(sums.total * 0.37, (hidden, weight, bias))
    logits = transform.scale * (hidden @ weight.T + bias)
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logits = logits[:, : transform.vocabulary]
    loss, gradient = _definition(logits.detach(), targets, 0.3)
    expected = torch.autograd.grad(logits, (hidden, weight, bias), grad_outputs=0.37 * gradient)
    assert sums.total.item() == pytest.approx(loss, abs=1e-10)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    log_z = logits.detach().logsumexp(-1)[targets != IGNORE_INDEX]
    assert sums.log_z.item() == pytest.approx(log_z.sum().item(), abs=1e-10)
    assert sums.z_square.item() == pytest.approx(log_z.square().sum().item(), abs=1e-10)
    largest = logits.detach()[targets != IGNORE_INDEX].abs()
    assert sums.logit_max.item() == pytest.approx(largest.max().item() if largest.numel() else 0.0, abs=1e-12)


def test_one_token_and_no_token() -> None:
    hidden, weight, _ = _head()
    one = head_sums(hidden[:1], weight, torch.tensor([7]), z_loss_weight=0.3)
    loss, _ = _definition((hidden[:1] @ weight.T).detach(), torch.tensor([7]), 0.3)
    assert one.total.item() == pytest.approx(loss, abs=1e-12)
    none = head_sums(hidden[:0], weight, torch.empty(0, dtype=torch.long))
    none.total.backward()
    assert none.total.item() == 0.0
    assert torch.count_nonzero(weight.grad) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_zero_is_cross_entropy_to_the_last_bit(dtype: torch.dtype) -> None:
    """Against a z-loss of the smallest weight, whose terms are added but too small to change any bit."""
    results = []
    for z_loss_weight in (0.0, 1e-30):
        hidden, weight, bias = _head(dtype)
        sums = head_sums(hidden, weight, shift_labels(_labels())[0], bias_V=bias, z_loss_weight=z_loss_weight)
        results.append([sums.total.detach(), *torch.autograd.grad(sums.total, (hidden, weight, bias))])
        logits = torch.nn.functional.linear(hidden, weight, bias).detach().requires_grad_()
        from_logits = logits_sums(logits[None], _labels(), z_loss_weight=z_loss_weight)
        results[-1] += [from_logits.total.detach(), *torch.autograd.grad(from_logits.total, logits)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_part_gets_no_gradient_and_the_others_theirs(frozen: int) -> None:
    """Freezing what comes before must not lose the head's gradient (liger-kernel 0.8.5 does lose it)."""
    parts, all_parts = _head(), _head()
    parts[frozen].requires_grad_(False)
    for tensors in (parts, all_parts):
        head_sums(*tensors[:2], shift_labels(_labels())[0], bias_V=tensors[2], z_loss_weight=0.1).total.backward()
    for index, (ours, theirs) in enumerate(zip(parts, all_parts, strict=True)):
        if index == frozen:
            assert ours.grad is None
        else:
            assert torch.equal(ours.grad, theirs.grad)


def test_half_precision_is_summed_and_accumulated_in_float32() -> None:
    """300 chunks of one token: were the head's gradient kept in bfloat16, each chunk would round it again."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(50, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (300,), generator=generator)
    sums = head_sums(hidden, weight, targets, z_loss_weight=1e-2, chunk_bytes=1)
    assert sums.total.dtype == torch.float32
    made = torch.autograd.grad(sums.total, (hidden, weight))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    reference = head_sums(*exact, targets, z_loss_weight=1e-2)
    expected = torch.autograd.grad(reference.total, exact)
    assert sums.total.item() == pytest.approx(reference.total.item(), rel=1e-6)
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-5)  # one rounding, at the very end


def test_logits_far_from_zero_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, 0.0], [-1e4, -2e4], [0.0, 0.0]]], requires_grad=True)
    sums = logits_sums(logits, torch.tensor([[0, 0, 1]]))
    assert sums.cross_entropy.item() == pytest.approx(0.0 + 1e4)
    assert sums.log_z.item() == pytest.approx(1e4 - 1e4)
    assert sums.logit_max.item() == 2e4
    (gradient,) = torch.autograd.grad(sums.total, logits)
    assert gradient[0].tolist() == [[0.0, 0.0], [1.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize("vocabulary", [5, 30_011])  # one block of rows, and blocks of 69
def test_blocks_agree_with_torch(vocabulary: int) -> None:
    logits = torch.randn(2, 101, vocabulary, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 101), generator=torch.Generator().manual_seed(1))
    labels[0, 10:90] = IGNORE_INDEX
    ours = logits_sums(logits, labels).total
    (gradient,) = torch.autograd.grad(ours * 0.25, logits)
    theirs = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), shift_labels(labels).flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    (expected,) = torch.autograd.grad(theirs * 0.25, logits)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, atol=2e-7, rtol=1e-5)


def test_only_one_chunk_of_scores_lives_at_a_time() -> None:
    """The largest tensor made, forward and backward, is one chunk of scores."""
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in (result if isinstance(result, tuple) else [result]) if torch.is_tensor(t))
            return result

    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with Watch():
        head_sums(hidden, weight, torch.zeros(512, dtype=torch.long), chunk_bytes=64 * 1000 * 4).total.backward()
    assert max(made) == 64 * 1000


def test_second_backward_is_refused_rather_than_wrong() -> None:
    hidden, weight, _ = _head()
    logits = (hidden @ weight.T).detach().requires_grad_()
    for sums in (logits_sums(logits[None], _labels()), head_sums(hidden, weight, shift_labels(_labels())[0])):
        sums.total.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="only once"):
            sums.total.backward()


def test_shifted_labels_have_no_target_at_the_end() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, IGNORE_INDEX]]


def test_mean_loss_divides_by_the_count_of_the_whole_step() -> None:
    logits = torch.randn(1, 6, 9)
    labels = torch.tensor([[IGNORE_INDEX, 1, 2, 3, 4, 5]])
    total = logits_sums(logits, labels, z_loss_weight=0.1).total
    outputs = {"logits": logits}
    assert token_mean_loss(outputs, labels, z_loss_weight=0.1).item() == pytest.approx(total.item() / 5)
    assert token_mean_loss(outputs, labels, torch.tensor(20), z_loss_weight=0.1).item() == pytest.approx(total / 20)


@pytest.mark.parametrize(
    "transform", [None, LogitTransform(scale=0.5, softcap=2.0, vocabulary=29)], ids=["plain", "capped"]
)
def test_nats_of_single_targets_are_the_definition(transform: LogitTransform | None) -> None:
    hidden, weight, bias = (tensor.detach() for tensor in _head())
    targets = torch.arange(TOKENS) * 2
    logits = (hidden @ weight.T + bias)[:, : 29 if transform else VOCABULARY]
    if transform:
        logits = 2.0 * torch.tanh(0.5 * logits / 2.0)
    expected = [
        math.log(math.fsum(math.exp(score) for score in row)) - row[target]
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True)
    ]
    for chunk_bytes in (8 * VOCABULARY * 4, None):  # four tokens at a time, all at once
        made = head_nats(hidden, weight, targets, bias_V=bias, transform=transform, chunk_bytes=chunk_bytes)
        assert made.dtype == torch.float64
        torch.testing.assert_close(made, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
    where = torch.full((1, TOKENS), IGNORE_INDEX)
    where[0, 3:7] = targets[3:7]
    torch.testing.assert_close(logits_nats(logits[None], where), made[3:7], rtol=1e-13, atol=0)


def test_labels_of_one_more_column_score_the_last_position() -> None:
    logits = torch.randn(2, 5, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    expected = -logits.log_softmax(-1).gather(2, labels[:, 1:, None]).sum()
    assert logits_sums(logits, labels).cross_entropy.item() == pytest.approx(expected.item(), rel=1e-12)
    assert count_targets(labels) == 10
    assert torch.equal(shift_labels(labels, 6), shift_labels(labels))

"""Published laws for the batch and the peak learning rate, each with its unit, source and measured range.

Batches are in tokens, sizes in parameters, compute in FLOPs. A law is an interpolation of its authors' runs: outside
the range that its docstring names it is a guess, and the laws for one quantity differ by factors of 2 to 4. Show
several, as a range. What is marked "from memory" was not compared with the paper again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hfpretrain.planning.figures import positive

# (least, most) of the runs behind each law, from memory.
KAPLAN_NATS = (2.4, 6.0)
ZHANG_PARAMETERS = (85e6, 1.2e9)
DEEPSEEK_FLOPS = (1e17, 2e19)
STEP_LAW_PARAMETERS = (60e6, 1e9)
STEP_LAW_TOKENS = (2e9, 100e9)

# GPT-3 125M (Brown et al. 2020, arXiv:2005.14165, table 2.1): the reference of the two rules of thumb below.
GPT3_LEARNING_RATE, GPT3_BATCH_TOKENS, GPT3_WIDTH = 6e-4, 500_000, 768

# --- batch: steps against tokens ------------------------------------------------------------------------------


def noise_scale(gradient_variance: float, squared_gradient_norm: float) -> float:
    """B_simple = tr(Sigma) / |G|^2, in the unit of which Sigma is the covariance (McCandlish et al. 2018, 1812.06162).

    A diagnostic: Merrill et al. 2025 (arXiv:2505.23971) find it orders of magnitude below the critical batch they
    measure on OLMo 1B and 7B.
    """
    positive(squared_gradient_norm=squared_gradient_norm)
    return gradient_variance / squared_gradient_norm


def steps_ratio(batch_tokens: float, critical_batch_tokens: float) -> float:
    """S / S_min = 1 + B_crit / B: steps to a loss over those of an infinite batch (McCandlish et al. 2018)."""
    positive(batch_tokens=batch_tokens, critical_batch_tokens=critical_batch_tokens)
    return 1.0 + critical_batch_tokens / batch_tokens


def tokens_ratio(batch_tokens: float, critical_batch_tokens: float) -> float:
    """E / E_min = 1 + B / B_crit: tokens to a loss, over those of a tiny batch (McCandlish et al. 2018).

    (S / S_min - 1) (E / E_min - 1) = 1; both are 2 at B = B_crit = E_min / S_min.
    """
    positive(batch_tokens=batch_tokens, critical_batch_tokens=critical_batch_tokens)
    return 1.0 + batch_tokens / critical_batch_tokens


def kaplan_critical_batch_tokens(loss_nats: float) -> float:
    """B_crit = 2e8 / L^(1 / 0.21) tokens (Kaplan et al. 2020, arXiv:2001.08361, eq. 1.4).

    L on WebText2 with GPT-2's tokenizer, about 2.4 to 6 nats there (range from memory); it grows while the loss falls.
    """
    positive(loss_nats=loss_nats)
    return float(2e8 / loss_nats ** (1 / 0.21))


# Zhang et al. give the batch in sequences of 512 tokens, and N and D in millions (units from memory).
_ZHANG_ROW_TOKENS = 512


def zhang_critical_batch_tokens(*, parameters: float | None = None, tokens: float | None = None) -> float:
    """The batch whose steps are 20 % above linear scaling (Zhang et al. 2024, arXiv:2410.21676), in tokens.

    From `parameters`, along D = 20 N: 93.20 (N / 1e6)^0.47 sequences of 512 tokens. From `tokens`: 22.91 (D / 1e6)^0.47
    of them, the same law rewritten (93.20 / 20^0.47 = 22.80). It is the data that count: at fixed D they find only
    621.34 (N / 1e6)^0.087. Measured from 85M to 1.2B parameters (range from memory).
    """
    if (parameters is None) == (tokens is None):
        raise ValueError("give one of parameters and tokens")
    if parameters is not None:
        positive(parameters=parameters)
        return float(93.20 * (parameters / 1e6) ** 0.47) * _ZHANG_ROW_TOKENS
    assert tokens is not None
    positive(tokens=tokens)
    return float(22.91 * (tokens / 1e6) ** 0.47) * _ZHANG_ROW_TOKENS


def zhang_critical_batch_tokens_at_fixed_data(parameters: float) -> float:
    """621.34 (N / 1e6)^0.087 sequences of 512 tokens, D the same for all sizes (Zhang et al. 2024): almost flat."""
    positive(parameters=parameters)
    return float(621.34 * (parameters / 1e6) ** 0.087) * _ZHANG_ROW_TOKENS


@dataclass(frozen=True)
class PowerLaw:
    """y = scale * x^exponent."""

    scale: float
    exponent: float

    def __call__(self, x: float) -> float:
        positive(x=x)
        return float(self.scale * x**self.exponent)


def power_law_through(points: Sequence[tuple[float, float]], exponent: float | None = 0.5) -> PowerLaw:
    """The power law nearest to measured (x, y) in logarithms, e.g. (parameters, critical batch tokens) of small models.

    Args:
        exponent: kept at this value, by default the 0.5 that is quoted for B* against N (the second of our two source
            documents, without a reference; Zhang et al. 2024 measure 0.47); None fits it, from at least two sizes.
    """
    for x, y in points:
        positive(x=x, y=y)
    if len({x for x, _ in points}) < (2 if exponent is None else 1):
        raise ValueError("not enough points: one for a fixed exponent, two different x to fit it")
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (math.fsum(values) / len(logs) for values in zip(*logs, strict=True))
    if exponent is None:
        spread = math.fsum((x - mean_x) ** 2 for x, _ in logs)
        exponent = math.fsum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    return PowerLaw(math.exp(mean_y - exponent * mean_x), exponent)


def deepseek_batch_tokens(training_flops: float) -> float:
    """Best batch in tokens: 0.2920 C^0.3271 (DeepSeek LLM, arXiv:2401.02954).

    Their C is non-embedding FLOPs per token, attention included, times D. Fitted from 1e17 to 2e19 FLOPs (range from
    memory).
    """
    positive(training_flops=training_flops)
    return float(0.2920 * training_flops**0.3271)


def step_law_batch_tokens(tokens: float) -> float:
    """Best batch in tokens: 0.58 D^0.571, whatever the size (Step Law, arXiv:2503.04715).

    Measured with 60M to 1B parameters and 2B to 100B tokens (range from memory).
    """
    positive(tokens=tokens)
    return float(0.58 * tokens**0.571)


# --- peak learning rate --------------------------------------------------------------------------------------------


def deepseek_learning_rate(training_flops: float) -> float:
    """Best peak learning rate of AdamW: 0.3118 C^-0.1250; C and range as in `deepseek_batch_tokens`."""
    positive(training_flops=training_flops)
    return float(0.3118 * training_flops**-0.1250)


def step_law_learning_rate(parameters: float, tokens: float) -> float:
    """Best peak learning rate of AdamW: 1.79 N^-0.713 D^0.307, N without the vocabulary; range as for its batch."""
    positive(parameters=parameters, tokens=tokens)
    return float(1.79 * parameters**-0.713 * tokens**0.307)


def adam_learning_rate(learning_rate: float, *, batch_tokens: float, new_batch_tokens: float) -> float:
    """Square-root rule for Adam: lr * sqrt(new / old) (Malladi et al. 2022). A rule of thumb, below the critical batch.

    The mean of B gradients has a standard deviation ~ 1 / sqrt(B), and Adam divides by the gradients' own size.
    """
    positive(batch_tokens=batch_tokens, new_batch_tokens=new_batch_tokens)
    return learning_rate * math.sqrt(new_batch_tokens / batch_tokens)


def sgd_learning_rate(learning_rate: float, *, batch_tokens: float, new_batch_tokens: float) -> float:
    """Linear rule for SGD: lr * new / old. A rule of thumb, below the critical batch; wrong for Adam."""
    positive(batch_tokens=batch_tokens, new_batch_tokens=new_batch_tokens)
    return learning_rate * new_batch_tokens / batch_tokens


def adam_learning_rate_near_noise(peak: float, *, batch_tokens: float, noise_scale_tokens: float) -> float:
    """Surge law: peak / (0.5 (sqrt(B_noise / B) + sqrt(B / B_noise))) (Li et al. 2024, arXiv:2405.14578).

    The square-root rule far below B_noise, highest (`peak`) at B_noise, and falling beyond it.
    """
    ratio = math.sqrt(steps_ratio(batch_tokens, noise_scale_tokens) - 1.0)
    return peak / (0.5 * (ratio + 1 / ratio))


def sgd_learning_rate_near_noise(limit: float, *, batch_tokens: float, noise_scale_tokens: float) -> float:
    """limit / (1 + B_noise / B) (McCandlish et al. 2018): the linear rule far below B_noise, flat above."""
    return limit / steps_ratio(batch_tokens, noise_scale_tokens)


def learning_rate_for_width(learning_rate: float, *, width: int, new_width: int) -> float:
    """Folk rule lr ~ 1 / sqrt(d_model). muP's rule for hidden matrices under Adam is 1 / d; this only imitates it."""
    positive(width=width, new_width=new_width)
    return learning_rate * math.sqrt(width / new_width)


def rule_of_thumb_learning_rate(batch_tokens: float, width: int) -> float:
    """6e-4 * sqrt(B / 0.5M) * sqrt(768 / d): GPT-3 125M's rate, moved by the square-root rule and by 1 / sqrt(d).

    Checked against the same table's 6.7B (d = 4096, 2M tokens, 1.2e-4) it is 4 times too high: two rules of thumb.
    """
    rate = adam_learning_rate(GPT3_LEARNING_RATE, batch_tokens=GPT3_BATCH_TOKENS, new_batch_tokens=batch_tokens)
    return learning_rate_for_width(rate, width=GPT3_WIDTH, new_width=width)

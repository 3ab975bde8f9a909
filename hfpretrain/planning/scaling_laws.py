"""Published laws between size, data, compute, batch and learning rate, each with its unit, source and measured range.

Units everywhere: losses in nats per token, sizes in parameters, data and batches in tokens, compute in FLOPs, which is
6 * parameters * tokens as in the papers. A law is an interpolation of its authors' runs: outside the range that its
docstring names it is a guess, and the laws for one quantity differ by factors of 2 to 4. Show several, as a range.

What is marked "from memory" was not compared with the paper again; the other constants were read in the paper's source
or in a text that quotes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hfpretrain.planning.budget import Figure, over_training, tokens_per_parameter

# --- loss as a function of size and data ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossFit:
    """L = E + A / N^a + B / D^b, in nats per token: N parameters trained on D tokens (Hoffmann et al. 2022).

    Attributes:
        irreducible: E, the loss of infinite size and data on that text.
        size_scale, size_exponent: A and a.
        data_scale, data_exponent: B and b.
        source: where the five numbers are printed.
    """

    irreducible: float
    size_scale: float
    size_exponent: float
    data_scale: float
    data_exponent: float
    source: str

    @property
    def optimal_exponents(self) -> tuple[float, float]:
        """(of N, of D) in N* ~ C^(b / (a + b)), D* ~ C^(a / (a + b)); they add up to 1."""
        both = self.size_exponent + self.data_exponent
        return self.data_exponent / both, self.size_exponent / both


# All three describe the same runs, on MassiveText: 70M to 16B parameters, 5B to 500B tokens (range from memory).
# "N* ~ C^0.45, D* ~ C^0.55" follows from the two rounded exponents of HOFFMANN_PRINTED alone: .28 / .62 = .4516. The
# same fit with four digits (TeX source of the paper) gives .2849 / .6241 = .4565, the paper's own "0.46", and the
# corrected one .3658 / .7136 = .5126: size and data grow almost alike, as with the paper's other methods (from memory).
HOFFMANN_PRINTED = LossFit(1.69, 406.4, 0.34, 410.7, 0.28, "Hoffmann et al. 2022, arXiv:2203.15556, as printed")
HOFFMANN_TEX = LossFit(1.6934, 406.4, 0.3392, 410.7, 0.2849, "Hoffmann et al. 2022, arXiv:2203.15556, TeX source")
BESIROGLU = LossFit(1.8172, 482.01, 0.3478, 2085.43, 0.3658, "Besiroglu et al. 2024, arXiv:2404.10102")
LOSS_FITS = {"hoffmann_printed": HOFFMANN_PRINTED, "hoffmann_tex": HOFFMANN_TEX, "besiroglu": BESIROGLU}

# The runs behind the fits have no more tokens per parameter than this; beyond it the loss is an extrapolation.
MAX_FITTED_TOKENS_PER_PARAMETER = 341


@dataclass(frozen=True)
class Allocation:
    """A size and the tokens it is trained on."""

    parameters: float
    tokens: float

    @property
    def training_flops(self) -> float:
        """6 N D."""
        return 6.0 * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.parameters

    @property
    def extrapolates(self) -> bool:
        """Whether D / N is beyond that of every run which the loss was fitted to."""
        return self.tokens_per_parameter > MAX_FITTED_TOKENS_PER_PARAMETER


def loss(parameters: float, tokens: float, fit: LossFit = BESIROGLU) -> float:
    """Expected loss in nats per token: E + A / N^a + B / D^b."""
    _positive(parameters=parameters, tokens=tokens)
    return fit.irreducible + fit.size_scale / parameters**fit.size_exponent + fit.data_scale / tokens**fit.data_exponent


def compute_optimal(training_flops: float, fit: LossFit = BESIROGLU) -> Allocation:
    """The N and D with the lowest loss for C = 6 N D FLOPs.

    N* = G (C / 6)^(b / (a + b)), D* = (C / 6) / N*, G = (a A / (b B))^(1 / (a + b)) (Hoffmann et al. 2022).
    """
    _positive(training_flops=training_flops)
    a, b = fit.size_exponent, fit.data_exponent
    balance = (a * fit.size_scale / (b * fit.data_scale)) ** (1 / (a + b))
    parameters = balance * (training_flops / 6) ** (b / (a + b))
    return Allocation(parameters, training_flops / 6 / parameters)


def optimal_tokens(parameters: float, fit: LossFit = BESIROGLU) -> float:
    """The D for which N parameters are compute-optimal: a A / N^a = b B / D^b, solved for D."""
    _positive(parameters=parameters)
    a, b = fit.size_exponent, fit.data_exponent
    return (b * fit.data_scale * parameters**a / (a * fit.size_scale)) ** (1 / b)


def tokens_for_loss(target_loss: float, parameters: float, fit: LossFit = BESIROGLU) -> float:
    """Tokens after which N parameters reach a loss: D = (B / (L - E - A / N^a))^(1 / b).

    Raises:
        ValueError: no amount of data brings this size so low.
    """
    _positive(parameters=parameters)
    floor = fit.irreducible + fit.size_scale / parameters**fit.size_exponent
    if target_loss <= floor:
        raise ValueError(f"{parameters:.3g} parameters never get below {floor:.4f} nats; asked for {target_loss:.4f}")
    return float((fit.data_scale / (target_loss - floor)) ** (1 / fit.data_exponent))


def optimal_for_loss(target_loss: float, fit: LossFit = BESIROGLU) -> Allocation:
    """The cheapest training to a loss: on the optimal line A / N^a is b / (a + b) of what is above E."""
    return _split(target_loss, fit.size_exponent / (fit.size_exponent + fit.data_exponent), fit)


# --- the whole life of a model --------------------------------------------------------------------------------


def lifetime_flops(parameters: float, tokens: float, inference_tokens: float) -> float:
    """Training and inference in FLOPs: 6 N D + 2 N n_infer (Sardana et al. 2024, arXiv:2401.00448).

    Both count the same FLOP. Inference reaches a smaller share of a device's peak, so its money is more than this.
    """
    return 6.0 * parameters * tokens + 2.0 * parameters * inference_tokens


def lifetime_optimal(target_loss: float, inference_tokens: float, fit: LossFit = BESIROGLU) -> Allocation:
    """The N and D that reach a loss at the least 6 N D + 2 N n_infer FLOPs (Sardana et al. 2024).

    Along L(N, D) = l the exact first-order condition is (a A / N^a) 6 D = (b B / D^b) (6 D + 2 n_infer). With y the
    share of l - E that is left to the data term, its two sides cross once for y in (0, a / (a + b)], so y is bisected:
    unlike N, it does not cancel when n_infer is huge. Look at `Allocation.extrapolates` before believing the result.
    """
    if inference_tokens < 0:
        raise ValueError(f"inference_tokens cannot be negative; got {inference_tokens}")
    a, b = fit.size_exponent, fit.data_exponent
    low, high = 0.0, a / (a + b)
    for _ in range(200):  # ends at neighbouring floating-point numbers
        middle = (low + high) / 2
        tokens = _split(target_loss, middle, fit).tokens
        if a * (1 - middle) > b * middle * (1 + inference_tokens / (3 * tokens)):
            low = middle
        else:
            high = middle
    return _split(target_loss, high, fit)


def first_order_residual(point: Allocation, inference_tokens: float, fit: LossFit = BESIROGLU) -> float:
    """How far a point is from the condition of `lifetime_optimal`: left side over right side, minus 1."""
    size_term = fit.size_exponent * fit.size_scale / point.parameters**fit.size_exponent
    data_term = fit.data_exponent * fit.data_scale / point.tokens**fit.data_exponent
    return size_term * 6 * point.tokens / (data_term * (6 * point.tokens + 2 * inference_tokens)) - 1


def _split(target_loss: float, data_share: float, fit: LossFit) -> Allocation:
    """The point of loss l where the data term B / D^b is this share of l - E, and the size term the rest."""
    excess = target_loss - fit.irreducible
    if excess <= 0:
        raise ValueError(f"no model gets below {fit.irreducible} nats under this fit; asked for {target_loss}")
    parameters = (fit.size_scale / ((1 - data_share) * excess)) ** (1 / fit.size_exponent)
    return Allocation(parameters, (fit.data_scale / (data_share * excess)) ** (1 / fit.data_exponent))


# --- batch: steps against tokens ------------------------------------------------------------------------------


def noise_scale(gradient_variance: float, squared_gradient_norm: float) -> float:
    """B_simple = tr(Sigma) / |G|^2, in the unit of which Sigma is the covariance (McCandlish et al. 2018, 1812.06162).

    A diagnostic: Merrill et al. 2025 (arXiv:2505.23971) find it orders of magnitude below the critical batch they
    measure on OLMo 1B and 7B.
    """
    _positive(squared_gradient_norm=squared_gradient_norm)
    return gradient_variance / squared_gradient_norm


def steps_ratio(batch_tokens: float, critical_batch_tokens: float) -> float:
    """S / S_min = 1 + B_crit / B: steps to a loss over those of an infinite batch (McCandlish et al. 2018)."""
    _positive(batch_tokens=batch_tokens, critical_batch_tokens=critical_batch_tokens)
    return 1.0 + critical_batch_tokens / batch_tokens


def tokens_ratio(batch_tokens: float, critical_batch_tokens: float) -> float:
    """E / E_min = 1 + B / B_crit: tokens to a loss, over those of a tiny batch (McCandlish et al. 2018).

    (S / S_min - 1) (E / E_min - 1) = 1; both are 2 at B = B_crit = E_min / S_min.
    """
    _positive(batch_tokens=batch_tokens, critical_batch_tokens=critical_batch_tokens)
    return 1.0 + batch_tokens / critical_batch_tokens


def kaplan_critical_batch_tokens(loss_nats: float) -> float:
    """B_crit = 2e8 / L^(1 / 0.21) tokens (Kaplan et al. 2020, arXiv:2001.08361, eq. 1.4).

    L on WebText2 with GPT-2's tokenizer, about 2.4 to 6 nats there (range from memory); it grows while the loss falls.
    """
    _positive(loss_nats=loss_nats)
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
        _positive(parameters=parameters)
        return float(93.20 * (parameters / 1e6) ** 0.47) * _ZHANG_ROW_TOKENS
    assert tokens is not None
    _positive(tokens=tokens)
    return float(22.91 * (tokens / 1e6) ** 0.47) * _ZHANG_ROW_TOKENS


def zhang_critical_batch_tokens_at_fixed_data(parameters: float) -> float:
    """621.34 (N / 1e6)^0.087 sequences of 512 tokens, D the same for all sizes (Zhang et al. 2024): almost flat."""
    _positive(parameters=parameters)
    return float(621.34 * (parameters / 1e6) ** 0.087) * _ZHANG_ROW_TOKENS


@dataclass(frozen=True)
class PowerLaw:
    """y = scale * x^exponent."""

    scale: float
    exponent: float

    def __call__(self, x: float) -> float:
        _positive(x=x)
        return float(self.scale * x**self.exponent)


def power_law_through(points: Sequence[tuple[float, float]], exponent: float | None = 0.5) -> PowerLaw:
    """The power law nearest to measured (x, y) in logarithms, e.g. (parameters, critical batch tokens) of small models.

    Args:
        exponent: kept at this value, by default the 0.5 that is quoted for B* against N (the second of our two source
            documents, without a reference; Zhang et al. 2024 measure 0.47); None fits it, from at least two sizes.
    """
    for x, y in points:
        _positive(x=x, y=y)
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
    _positive(training_flops=training_flops)
    return float(0.2920 * training_flops**0.3271)


def step_law_batch_tokens(tokens: float) -> float:
    """Best batch in tokens: 0.58 D^0.571, whatever the size (Step Law, arXiv:2503.04715).

    Measured with 60M to 1B parameters and 2B to 100B tokens (range from memory).
    """
    _positive(tokens=tokens)
    return float(0.58 * tokens**0.571)


# --- peak learning rate --------------------------------------------------------------------------------------------


def deepseek_learning_rate(training_flops: float) -> float:
    """Best peak learning rate of AdamW: 0.3118 C^-0.1250; C and range as in `deepseek_batch_tokens`."""
    _positive(training_flops=training_flops)
    return float(0.3118 * training_flops**-0.1250)


def step_law_learning_rate(parameters: float, tokens: float) -> float:
    """Best peak learning rate of AdamW: 1.79 N^-0.713 D^0.307, N without the vocabulary; range as for its batch."""
    _positive(parameters=parameters, tokens=tokens)
    return float(1.79 * parameters**-0.713 * tokens**0.307)


def adam_learning_rate(learning_rate: float, *, batch_tokens: float, new_batch_tokens: float) -> float:
    """Square-root rule for Adam: lr * sqrt(new / old) (Malladi et al. 2022). A rule of thumb, below the critical batch.

    The mean of B gradients has a standard deviation ~ 1 / sqrt(B), and Adam divides by the gradients' own size.
    """
    _positive(batch_tokens=batch_tokens, new_batch_tokens=new_batch_tokens)
    return learning_rate * math.sqrt(new_batch_tokens / batch_tokens)


def sgd_learning_rate(learning_rate: float, *, batch_tokens: float, new_batch_tokens: float) -> float:
    """Linear rule for SGD: lr * new / old. A rule of thumb, below the critical batch; wrong for Adam."""
    _positive(batch_tokens=batch_tokens, new_batch_tokens=new_batch_tokens)
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
    _positive(width=width, new_width=new_width)
    return learning_rate * math.sqrt(width / new_width)


# --- all of it for one run ----------------------------------------------------------------------------------------


def law_figures(
    *,
    parameters: float,
    tokens: float,
    batch_tokens: float,
    inference_tokens: float | None = None,
    critical_batch_points: Sequence[tuple[float, float]] | None = None,
) -> list[Figure]:
    """What these laws say of a run: its loss, better sizes, and a range for batch and learning rate."""
    N, D, C = parameters, tokens, 6.0 * parameters * tokens
    expected = loss(N, D)
    figures = [
        Figure("tokens_per_parameter", tokens_per_parameter(N, D), "tokens/parameter", "D / N"),
        Figure("over_training", over_training(N, D), "times", "D / N / 20", "Hoffmann 2022, rounded"),
        Figure("expected_loss", expected, "nats/token", "E + A/N^a + B/D^b on their text", BESIROGLU.source),
    ]
    for name, fit in LOSS_FITS.items():
        best = compute_optimal(C, fit)
        formula = "N* = G (C/6)^(b/(a+b))"
        figures.append(Figure(f"optimal_parameters_{name}", best.parameters, "parameters", formula, fit.source))
        figures.append(Figure(f"optimal_tokens_{name}", best.tokens, "tokens", "D* = C / 6 / N*", fit.source))
    if inference_tokens is not None:
        life, best = lifetime_flops(N, D, inference_tokens), lifetime_optimal(expected, inference_tokens)
        ratio = lifetime_flops(best.parameters, best.tokens, inference_tokens) / life
        formula = "least 6 N D + 2 N n_infer at expected_loss" + ("; EXTRAPOLATED" if best.extrapolates else "")
        source = "Sardana 2024"
        figures += [
            Figure("lifetime_flops", life, "FLOPs", "6 N D + 2 N n_infer of this run", source),
            Figure("lifetime_optimal_parameters", best.parameters, "parameters", formula, source),
            Figure("lifetime_optimal_tokens", best.tokens, "tokens", formula, source),
            Figure("lifetime_flops_ratio", ratio, "times", "that optimum's FLOPs over this run's", source),
        ]
    critical = {
        "kaplan": (kaplan_critical_batch_tokens(expected), "2e8 / L^(1/0.21), L expected_loss", "Kaplan 2020"),
        "zhang": (zhang_critical_batch_tokens(tokens=D), "22.91 (D/1e6)^0.47 rows of 512", "Zhang 2024"),
    }
    if critical_batch_points:
        law = power_law_through(critical_batch_points)
        critical["points"] = (law(N), f"{law.scale:.4g} N^0.5", "the given points")
    for name, (critical_tokens, formula, source) in critical.items():
        steps, needed = steps_ratio(batch_tokens, critical_tokens), tokens_ratio(batch_tokens, critical_tokens)
        figures.append(Figure(f"critical_batch_{name}", critical_tokens, "tokens", formula, source))
        figures.append(Figure(f"steps_ratio_{name}", steps, "times", "S/Smin = 1 + Bcrit/B", "McCandlish 2018"))
        figures.append(Figure(f"tokens_ratio_{name}", needed, "times", "E/Emin = 1 + B/Bcrit", "McCandlish 2018"))
    deepseek, step_law = "DeepSeek LLM 2024", "Step Law 2025"
    rate, formula = step_law_learning_rate(N, D), "1.79 N^-0.713 D^0.307; its N has no vocabulary"
    return [
        *figures,
        Figure("best_batch_deepseek", deepseek_batch_tokens(C), "tokens", "0.2920 C^0.3271", deepseek),
        Figure("best_batch_step_law", step_law_batch_tokens(D), "tokens", "0.58 D^0.571", step_law),
        Figure("learning_rate_deepseek", deepseek_learning_rate(C), "of AdamW", "0.3118 C^-0.1250", deepseek),
        Figure("learning_rate_step_law", rate, "of AdamW", formula, step_law),
    ]


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0; got {value}")

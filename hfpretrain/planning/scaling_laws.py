"""Published laws between size, data, loss and compute, and the size that is cheapest over a model's life.

Losses are in nats per token, sizes in parameters, data in tokens, compute in FLOPs, which is 6 * parameters * tokens as
in the papers. A law is an interpolation of its authors' runs: outside their range it is a guess. Those for the batch
and the learning rate are in `planning.batch_laws`.

What is marked "from memory" was not compared with the paper again; the other constants were read in the paper's source
or in a text that quotes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfpretrain.planning.figures import positive

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


# These describe the same runs, on MassiveText: 70M to 16B parameters, 5B to 500B tokens (range from memory).
# "N* ~ C^0.45, D* ~ C^0.55" follows from the two rounded exponents of HOFFMANN_PRINTED alone: .28 / .62 = .4516. The
# same fit with four digits (TeX source of the paper) gives .2849 / .6241 = .4565, the paper's own "0.46", and the
# corrected one .3658 / .7136 = .5126: size and data grow almost alike, as with the paper's other methods (from memory).
HOFFMANN_PRINTED = LossFit(1.69, 406.4, 0.34, 410.7, 0.28, "Hoffmann et al. 2022, arXiv:2203.15556, as printed")
HOFFMANN_TEX = LossFit(1.6934, 406.4, 0.3392, 410.7, 0.2849, "Hoffmann et al. 2022, arXiv:2203.15556, TeX source")
BESIROGLU = LossFit(1.8172, 482.01, 0.3478, 2085.43, 0.3658, "Besiroglu et al. 2024, arXiv:2404.10102")
# What Sardana et al. 2024 (arXiv:2401.00448, appendix A) compute their figures with: Hoffmann's fit with three digits.
SARDANA = LossFit(1.69, 406.4, 0.336, 410.7, 0.283, "Sardana et al. 2024, arXiv:2401.00448, appendix A")
LOSS_FITS = {"hoffmann_printed": HOFFMANN_PRINTED, "hoffmann_tex": HOFFMANN_TEX, "besiroglu": BESIROGLU}

FITTED_PARAMETERS = (70e6, 16e9)
FITTED_TOKENS = (5e9, 500e9)
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
    positive(parameters=parameters, tokens=tokens)
    return fit.irreducible + fit.size_scale / parameters**fit.size_exponent + fit.data_scale / tokens**fit.data_exponent


def compute_optimal(training_flops: float, fit: LossFit = BESIROGLU) -> Allocation:
    """The N and D with the lowest loss for C = 6 N D FLOPs.

    N* = G (C / 6)^(b / (a + b)), D* = (C / 6) / N*, G = (a A / (b B))^(1 / (a + b)) (Hoffmann et al. 2022).
    """
    positive(training_flops=training_flops)
    a, b = fit.size_exponent, fit.data_exponent
    balance = (a * fit.size_scale / (b * fit.data_scale)) ** (1 / (a + b))
    parameters = balance * (training_flops / 6) ** (b / (a + b))
    return Allocation(parameters, training_flops / 6 / parameters)


def optimal_tokens(parameters: float, fit: LossFit = BESIROGLU) -> float:
    """The D for which N parameters are compute-optimal: a A / N^a = b B / D^b, solved for D."""
    positive(parameters=parameters)
    a, b = fit.size_exponent, fit.data_exponent
    return (b * fit.data_scale * parameters**a / (a * fit.size_scale)) ** (1 / b)


def tokens_for_loss(target_loss: float, parameters: float, fit: LossFit = BESIROGLU) -> float:
    """Tokens after which N parameters reach a loss: D = (B / (L - E - A / N^a))^(1 / b).

    Raises:
        ValueError: no amount of data brings this size so low.
    """
    positive(parameters=parameters)
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

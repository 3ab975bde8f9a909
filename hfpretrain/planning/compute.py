"""What training costs in floating-point operations, hours and money.

N is a number of parameters, D one of tokens. What a token costs in detail is in `planning.flops`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hfpretrain.planning.figures import Figure, positive
from hfpretrain.planning.flops import TokenCost

_COUNTED = "hfpretrain/model_counts.py"

# Hoffmann et al. 2022 (arXiv:2203.15556), rounded: what "Chinchilla-optimal" stands for. Not a constant of nature: the
# three fits in `scaling_laws` give 18 to 93 between 1e21 and 6e23 FLOPs.
CHINCHILLA_TOKENS_PER_PARAMETER = 20


def layer_matrix_parameters(
    width: int, *, ffn_width: float | None = None, ffn_matrices: int = 3, key_value_share: float = 1.0
) -> float:
    """Weights of one transformer layer's matrices: (2 + 2 kv) d^2 of attention and ffn_matrices * d * f.

    12 d^2 with full key-value heads and f = 8/3 d in three matrices (gate, up, down; the default), or f = 4 d in two;
    with three at f = 4 d it would be 16 d^2. These are parameters: a token costs one multiplication and one addition
    with each, so the forward pass is 24 d^2 FLOPs a layer, twice the "12 d^2 FLOPs" one reads. 2 N D is right.
    """
    ffn_width = 8 * width / 3 if ffn_width is None else ffn_width
    return (2 + 2 * key_value_share) * width**2 + ffn_matrices * width * ffn_width


@dataclass(frozen=True)
class TrainingFlops:
    """The three matrix products of training; each multiplies every weight with every token once, 2 N D FLOPs.

    A layer Y = X W with X of T x d1 and W of d1 x d2 takes 2 T d1 d2. Without attention scores, which depend on the
    length: see `flops.flops_per_token`. So 6 N D is exact for the matrices and a lower bound for the model.
    """

    forward: float
    backward_activations: float
    backward_weights: float

    @property
    def total(self) -> float:
        """6 N D."""
        return self.forward + self.backward_activations + self.backward_weights


def training_flops(parameters: float, tokens: float) -> TrainingFlops:
    """C = 6 N D as 2 N D + 2 N D + 2 N D. The batch does not appear in it."""
    each = 2.0 * parameters * tokens
    return TrainingFlops(forward=each, backward_activations=each, backward_weights=each)


def device_hours(flops: float, *, peak_flops: float, mfu: float) -> float:
    """Hours of one device: FLOPs / (peak FLOP/s * MFU) / 3600; divide by the number of devices for the clock."""
    positive(peak_flops=peak_flops, mfu=mfu)
    return flops / (peak_flops * mfu) / 3600


def cost(device_hours: float, price_per_device_hour: float) -> float:
    """In the currency of the price."""
    return device_hours * price_per_device_hour


def tokens_per_parameter(parameters: float, tokens: float) -> float:
    """D / N."""
    positive(parameters=parameters)
    return tokens / parameters


def over_training(parameters: float, tokens: float) -> float:
    """D / N over 20: LLaMA-2 7B on 2T tokens 14.3, LLaMA-3 8B on 15T 93.75."""
    return tokens_per_parameter(parameters, tokens) / CHINCHILLA_TOKENS_PER_PARAMETER


def parameter_figures(
    parameters: int, parts: Mapping[str, tuple[int, int, float]] | None = None, *, tied: bool = False
) -> list[Figure]:
    """Parameters in all, and by role where the model is known.

    Args:
        parts: role -> (parameters, those in matrix products, multiplications of a token with them).
    """
    figures = [Figure("parameters", parameters, "parameters", "all, tied ones once, idle experts too")]
    if not parts:
        return figures
    notes = {"head": "the output matrix" + (", which is the input embedding too" if tied else "")}
    for role, (count, _, _) in parts.items():
        formula = notes.get(role, "by what the forward pass does with them")
        figures.append(Figure(f"{role}_parameters", count, "parameters", formula, _COUNTED))
    multiplied, active = sum(part[1] for part in parts.values()), sum(part[2] for part in parts.values())
    formula = "weights in matrix products: no input embedding, no norm"
    figures.append(Figure("multiplied_parameters", multiplied, "parameters", formula, _COUNTED))
    formula = "those that one token meets: of experts the chosen ones; the N of the exact 6 N D"
    return [*figures, Figure("active_parameters", _whole(active), "parameters", formula, _COUNTED)]


def token_figures(cost: TokenCost) -> list[Figure]:
    """FLOPs of one token by layer kind, forward, and in training."""
    unit = "FLOPs/token"
    figures = [
        Figure(f"forward_{role}", flops, unit, "2 * active weights", _COUNTED) for role, flops in cost.matrices.items()
    ]
    for window, flops in cost.attention.items():
        name = "forward_attention_scores" + ("" if window is None else f"_window_{window}")
        figures.append(Figure(name, flops, unit, "4 * heads * width * attended positions", "planning/flops.py"))
    if cost.mixing:
        figures.append(Figure("forward_mixing", cost.mixing, unit, "other products of activations", _COUNTED))
    return [
        *figures,
        Figure("forward_token", cost.forward, unit, "sum of these", _COUNTED),
        Figure("training_token", cost.training, unit, "3 * forward_token", "two gradients of every product"),
        Figure("training_token_full_attention", cost.training_full_attention, unit, "attended = L", "PaLM, appendix B"),
    ]


def compute_figures(
    *,
    parameters: float,
    total_tokens: int,
    world_size: int,
    peak_flops: float,
    mfu: float,
    cost_of_token: TokenCost | None = None,
    gradient_checkpointing: bool = False,
    price_per_device_hour: float | None = None,
) -> list[Figure]:
    """FLOPs, hours and money of a run; the hours are of the exact FLOPs where the model is counted, else of 6 N D.

    Args:
        parameters: N of 6 N D: all of a dense model, of experts those that a token meets.
        mfu: as `recipes/pretrain.py` logs it: recomputation is no useful work.
    """
    flops = training_flops(parameters, total_tokens)
    backward = flops.backward_activations + flops.backward_weights
    figures = [
        Figure("forward_flops", flops.forward, "FLOPs", "2 N D", "a multiply-add of every weight and token"),
        Figure("backward_flops", backward, "FLOPs", "2 N D + 2 N D", "gradients of activations, and of weights"),
        Figure("training_flops", flops.total, "FLOPs", "C = 6 N D; the batch is not in it", "Hoffmann 2022"),
    ]
    work, again = flops.total, flops.forward
    if cost_of_token is not None:
        work, again = cost_of_token.training * total_tokens, cost_of_token.recomputed * total_tokens
        exact = 3 * cost_of_token.weights * total_tokens
        formula = "6 D * active weights: forward 2, backward 2 + 2"
        figures.append(Figure("matrix_flops", exact, "FLOPs", formula, _COUNTED))
        formula = "D * training_token: with attention; the hours are of this"
        figures.append(Figure("counted_flops", work, "FLOPs", formula, "planning/flops.py"))
    if gradient_checkpointing:
        formula = "a second forward pass of the layers: 8 N D in place of 6"
        figures.append(Figure("recomputed_flops", again, "FLOPs", formula, "gradient_checkpointing"))
        formula = "mfu * (FLOPs + recomputed) / FLOPs: what the device really does of its peak"
        figures.append(
            Figure("hardware_utilisation", mfu * (work + again) / work, "share", formula, "PaLM, appendix B")
        )
    hours = device_hours(work, peak_flops=peak_flops, mfu=mfu)
    formula = f"FLOPs / ({peak_flops / 1e12:g} TFLOP/s * {mfu:g} MFU) / 3600"
    figures.append(Figure("device_hours", hours, "hours", formula, "the maker's bf16 peak"))
    figures.append(Figure("clock_hours", hours / world_size, "hours", "device_hours / W"))
    if price_per_device_hour is not None:
        formula = "device_hours * price_per_device_hour"
        figures.append(Figure("cost", cost(hours, price_per_device_hour), "currency", formula))
    return figures


def _whole(value: float) -> float:
    """An int where it is one."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value

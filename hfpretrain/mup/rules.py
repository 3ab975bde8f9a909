"""muP as one table: what a parameter's initialisation and Adam settings become when the width grows.

Under AdamW the training of a tensor W = c * V (multiplier c; V drawn with standard deviation s, learning rate e, decay
d, epsilon q) is that of W itself with c * s, c * e, d / c, q / c: Yang et al. 2022, "Tensor Programs V" (arXiv:
2203.03466), on the symmetry of parametrisations. So every multiplier of the usual tables is folded into initialisation
and parameter groups here, and the forward pass stays the architecture's own. Rows below are table 3 of that paper in
this multiplier-free form, as exponents: a value is multiplied by (own fan-in / base fan-in) ** exponent, by (width /
base width) ** exponent where there is no fan-in, and epsilon always by a power of the width ratio.

Why epsilon follows the width: Adam forgets the size of a gradient except beside epsilon. The head's weights are
Theta(1/n) (output rule), so what flows back into the network is Theta(1/n) per coordinate, and a hidden layer hands on
what it gets. Entries of a gradient are (backward signal) x (forward value):
- input, hidden, vector: Theta(1/n) x Theta(1), exponent -1;
- output: the signal arrives at a number of coordinates that does not grow. For the head it is the loss's own,
  Theta(1). For a router, a multi-query projection or a low rank it is a sum over n coordinates of Theta(1/n) terms:
  n^-1/2 while they are independent of one another, Theta(1) once training has aligned them. Exponent 0 is exact for the
  head and the upper end for the others;
- tied_gain: dL/dg_i = x_i * sum_v E_vi (dL/dlogit)_v is Theta(1), exponent 0;
- fixed (no dimension grows): a head's bias gets Theta(1); a gain over the head dimension, shared by all heads, gets a
  sum over heads, n^-1/2 to Theta(1) as above. Exponent 0.

Depth is a second table, multiplied on the first: CompleteP (Dey et al. 2025, "Don't be lazy", arXiv:2505.01618),
table 1 with alpha = 1. With m = layers / base layers, every residual branch is multiplied by 1/m; within the branches
learning rates and decay stay (m^(alpha - 1) = 1), and epsilon is multiplied by 1/m, as their gradients are. Here the
branch's 1/m is folded into the parameters that write into the residual stream, by the same symmetry as above: c = 1/m
gives them init / m, lr / m, decay * m and epsilon (q / m) / c = q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["input", "hidden", "output", "vector", "tied_gain", "fixed"]
WeightDecayMode = Literal["independent", "coupled"]
Place = Literal["writer", "branch", "outside"]
ROLES: tuple[Role, ...] = get_args(Role)
PLACES: tuple[Place, ...] = get_args(Place)
WEIGHT_DECAY_MODES: tuple[WeightDecayMode, ...] = get_args(WeightDecayMode)


@dataclass(frozen=True)
class Rule:
    """Exponents of a role: of the fan-in ratio (init, lr), of the width ratio (eps); `meaning` is for people.

    Of a place all are exponents of the depth ratio.
    """

    init: float
    lr: float
    eps: float
    meaning: str


RULES: dict[Role, Rule] = {
    # Tensor Programs V table 3, "input weights and all biases". u-muP has lr -1/2 for embeddings instead.
    "input": Rule(0.0, 0.0, -1.0, "a fixed number of inputs -> width: embeddings, positions, low rank -> width"),
    # Table 3, "hidden weights": variance 1/fan_in, Adam rate 1/fan_in.
    "hidden": Rule(-0.5, -1.0, -1.0, "width -> width"),
    # Table 3, "output weights": variance 1/fan_in^2, Adam rate 1/fan_in. Routers: each expert's score is a readout.
    "output": Rule(-1.0, -1.0, 0.0, "width -> a fixed number: untied head, router, fixed key-value heads, low rank"),
    # As biases in table 3; gains and everything else that is not contracted multiplies coordinate by coordinate.
    "vector": Rule(0.0, 0.0, -1.0, "no contraction: gains, biases, depthwise convolutions, state-space constants"),
    # Table 8 (for tied embeddings) keeps the shared tensor and multiplies its input by 1/fan_in: folded into the gain.
    "tied_gain": Rule(-1.0, -1.0, 0.0, "final norm before a tied head: holds the readout's 1/width"),
    "fixed": Rule(0.0, 0.0, 0.0, "no dimension grows with the width"),
}
# CompleteP table 1, alpha = 1, with the branches' multiplier in the writers.
DEPTH_RULES: dict[Place, Rule] = {
    "writer": Rule(-1.0, -1.0, 0.0, "the last linear map of a residual branch, with its bias, or the gain behind it"),
    "branch": Rule(0.0, 0.0, -1.0, "all else in a residual branch: its norm, gates, routers, first projections"),
    "outside": Rule(0.0, 0.0, 0.0, "before or behind the layers: embeddings, final norm, head"),
}


@dataclass(frozen=True)
class Multipliers:
    """What a parameter's own values are multiplied with; all are 1.0 at the base width.

    Attributes:
        init: on the model's own initial values (on the effective gain for tied_gain).
        lr: on the learning rate.
        weight_decay: on the weight decay of parameters that decay at all.
        eps: on Adam's epsilon.
    """

    init: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


def multipliers(
    role: Role,
    *,
    fan_in_ratio: float,
    width_ratio: float,
    weight_decay_mode: WeightDecayMode = "independent",
    own_init_exponent: float = 0.0,
    forward_exponent: float = 0.0,
) -> Multipliers:
    """The multipliers of one parameter.

    Args:
        role: its row in `RULES`.
        fan_in_ratio: its fan-in over that of the base model; the width ratio where there is no fan-in.
        width_ratio: width over base width, of what goes into the head.
        weight_decay_mode: `independent` keeps lr * weight_decay, which is what a step takes away from a weight,
            independent of the width (Kosson et al. 2025, arXiv:2510.19093: transfer needs it); `coupled` leaves it.
        own_init_exponent: power of the width that the architecture's own initialisation already has (-1/2 for one that
            divides by sqrt(fan_in)); taken off, so that nothing is scaled twice.
        forward_exponent: power b of the width by which the architecture multiplies its token embeddings (1/2 for
            Gemma), or what goes into this matrix. The matrix takes n^-b of it in init and lr; with a tied head, the
            final gain takes the rest. Hidden weights take nothing: what they feed may count on the power.
    """
    rule = RULES[role]
    b = forward_exponent
    shift = {"input": -b, "output": -b, "fixed": -b, "tied_gain": b}.get(role, 0.0)
    init = fan_in_ratio ** (rule.init + shift - own_init_exponent)
    lr = fan_in_ratio ** (rule.lr + shift)
    decay = 1.0 / lr if weight_decay_mode == "independent" else 1.0
    # A tensor that is smaller by n^-b has gradients that are larger by n^b.
    return Multipliers(init=init, lr=lr, weight_decay=decay, eps=width_ratio ** (rule.eps - shift))


def at_depth(
    own: Multipliers,
    place: Place,
    *,
    depth_ratio: float,
    own_init_exponent: float = 0.0,
    forward_exponent: float = 0.0,
) -> Multipliers:
    """The multipliers of one parameter at another depth as well.

    Args:
        own: those of its width.
        place: its row in `DEPTH_RULES`.
        depth_ratio: layers over those of the base model.
        own_init_exponent: power of the depth that the architecture's own initialisation has (-1/2 for GPT-2, which
            divides by sqrt(2 * layers)); taken off, so that nothing is scaled twice.
        forward_exponent: power of the depth by which the architecture multiplies its branches itself (-1/2 for
            MiniCPM3); the writers take the rest of the 1/m.

    Weight decay goes through the fold in both modes: it is divided by what the learning rate is multiplied with.
    """
    rule = DEPTH_RULES[place]
    rest = forward_exponent if place == "writer" else 0.0
    lr = depth_ratio ** (rule.lr - rest)
    return Multipliers(
        init=own.init * depth_ratio ** (rule.init - rest - own_init_exponent),
        lr=own.lr * lr,
        weight_decay=own.weight_decay / lr,
        eps=own.eps * depth_ratio ** (rule.eps + rest),
    )


def is_exact(value: float) -> bool:
    """Whether a multiplier changes nothing."""
    return math.isclose(value, 1.0, rel_tol=1e-12)

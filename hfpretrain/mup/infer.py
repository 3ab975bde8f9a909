"""From a configuration to its muP spec: build the base model and one of twice its width, and look.

Both are real models and must fit into memory, on every rank; the run's own width is only built without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from transformers import PreTrainedConfig, PreTrainedModel

from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.model import name_template
from hfpretrain.mup.depth import across_depth
from hfpretrain.mup.layers import at_both_depths
from hfpretrain.mup.measure import (
    FinalGain,
    Spread,
    exponent,
    fed_exponents,
    final_gain,
    forward_exponent,
    initial_spreads,
)
from hfpretrain.mup.probe import is_tied, probe_model, probe_tokens
from hfpretrain.mup.roles import Placed, Shape, infinite_axes, place_all
from hfpretrain.mup.rules import WEIGHT_DECAY_MODES, Place, Role, WeightDecayMode, multipliers
from hfpretrain.mup.spec import MupSpec, Scaling, by_template
from hfpretrain.mup.uses import Uses, watch_uses
from hfpretrain.mup.width import hidden_size, scale_width

MATRICES: tuple[Role, ...] = ("input", "hidden", "output")


@dataclass(frozen=True)
class Law:
    """How the architecture itself initialises a parameter.

    Attributes:
        exponent: power of the width in its standard deviation.
        std: that standard deviation at the base width; None where it is no matrix, or not random.
        error: relative standard error of `std`.
    """

    exponent: float
    std: float | None
    error: float


def infer(
    config: PreTrainedConfig,
    *,
    base_width: int | None = None,
    base_config: PreTrainedConfig | None = None,
    base_depth: int | None = None,
    overrides: Mapping[str, Role] | None = None,
    depth_overrides: Mapping[str, Place] | None = None,
    weight_decay_mode: WeightDecayMode = "independent",
) -> MupSpec:
    """The multipliers that make `config` train like its base width.

    Args:
        config: the model to train.
        base_width: hidden size of the model that learning rates were tuned on; all other widths follow in proportion,
            head dimension, depth, vocabulary, experts and low ranks stay.
        base_config: that model's configuration, in place of base_width, where the proportions are other ones.
        base_depth: its number of layers, beside one of the two; without it the depth must be the same and no rule for
            depth is applied. See `hfpretrain.mup.depth`.
        overrides: regular expression over whole parameter names -> role, for what cannot be placed.
        depth_overrides: regular expression -> place in its residual branch, for what `depth_laws` cannot place.
        weight_decay_mode: see `rules.multipliers`.

    Raises:
        ConfigError: not exactly one of base_width and base_config; base sizes that are no whole numbers; parameters of
            unclear role; an initialisation that follows no known power of the width; a tied head without a final gain;
            with base_depth, what `depth_laws` refuses.
    """
    refuse(_argument_problems(base_width, base_config, weight_decay_mode))
    base = (
        base_config if base_config is not None else scale_width(config, Fraction(base_width or 0, hidden_size(config)))
    )
    base, shallow = at_both_depths(config, base, base_depth, depth_overrides)
    seen = study(base)
    spec = infer_from(seen, config, overrides=overrides, weight_decay_mode=weight_decay_mode)
    if shallow is None:
        return spec
    return across_depth(spec, seen.small, probe_model(shallow), overrides=depth_overrides or {})


@dataclass(frozen=True)
class Study:
    """What the base model and one of twice its width show; the specs of all widths come from it.

    Attributes:
        small, double: the two models; their weights are those of some seed.
        uses: of the small model's parameters in a forward pass.
        narrow, wide: initial values of their parameters, over several seeds.
        embedding_exponent: power of the width by which token embeddings are multiplied; None: not measured.
        fed_exponents: parameter -> the power by which what goes into its product is, see `measure.fed_exponents`.
    """

    small: PreTrainedModel
    double: PreTrainedModel
    uses: Mapping[str, Uses]
    narrow: Mapping[str, Spread]
    wide: Mapping[str, Spread]
    embedding_exponent: float | None
    fed_exponents: Mapping[str, float]


def study(base: PreTrainedConfig) -> Study:
    """Build and measure; raises as `infer` does where a model cannot be built."""
    small, double = probe_model(base), probe_model(scale_width(base, 2))
    _shapes({"base": small, "twice the base": double})
    names = [name for name, _ in small.named_parameters()]
    try:
        uses = watch_uses(small, probe_tokens(small.config))
    except Exception as error:  # anything may go wrong inside an architecture's forward pass
        what = f"{base.model_type} cannot run at width {hidden_size(base)}: {type(error).__name__}: {error}"
        remedy = "another base width, or name the base sizes yourself: base_config"
        raise ConfigError([Problem(what, f"width {hidden_size(base)}", "base width", remedy)]) from error
    return Study(
        small=small,
        double=double,
        uses=uses,
        embedding_exponent=forward_exponent(small, double),
        fed_exponents=fed_exponents(small, double, uses),
        narrow=initial_spreads(small, names),  # last: it leaves other weights
        wide=initial_spreads(double, names),
    )


def infer_from(
    seen: Study,
    config: PreTrainedConfig,
    *,
    overrides: Mapping[str, Role] | None = None,
    weight_decay_mode: WeightDecayMode = "independent",
) -> MupSpec:
    """`infer` where the base model has been studied already: the run's own width is only built without memory."""
    small = seen.small
    width, base_width = hidden_size(config), hidden_size(small.config)
    shapes = _shapes({"base": small, "twice the base": seen.double, "this": probe_model(config, device="meta")})
    placed, problems = place_all(small, shapes, seen.uses, overrides if overrides is not None else {})
    gain = _final_gain(small, placed, problems)
    laws = _own_initialisation(seen, placed, problems)
    refuse(problems)
    embedding = next(n for n, p in small.named_parameters() if p is small.get_input_embeddings().weight)
    head = next((n for n, p in small.named_parameters() if p is small.get_output_embeddings().weight), None)
    b = dict(seen.fed_exponents) | {embedding: seen.embedding_exponent or 0.0}
    if gain is not None:
        b |= dict.fromkeys(gain.names, b[embedding] - seen.fed_exponents.get(embedding, 0.0))
    scalings = {
        name: _scaling(
            name,
            placed[name],
            laws[name],
            base_shape=shapes[name][0],
            shape=shapes[name][-1],
            width_ratio=width / base_width,
            weight_decay_mode=weight_decay_mode,
            forward_exponent=b.get(name, 0.0),
            gain=gain,
        )
        for name in shapes
    }
    return MupSpec(
        width=width,
        base_width=base_width,
        weight_decay_mode=weight_decay_mode,
        tied=is_tied(small),
        head=None if is_tied(small) else head,
        parameters=by_template(scalings),
        notes=_notes(seen, placed, shapes),
    )


def _notes(seen: Study, placed: Mapping[str, Placed], shapes: Mapping[str, tuple[Shape, ...]]) -> tuple[str, ...]:
    vocabulary = seen.small.config.get_text_config().vocab_size
    notes = [note for name, where in placed.items() if (note := _unscaled(name, shapes[name], where, vocabulary))]
    if seen.embedding_exponent is None:
        notes.append("whether embeddings are multiplied by a power of the width on their way in could not be measured")
    for name, power in seen.fed_exponents.items():
        taken = "not taken out" if placed[name].role == "hidden" else "taken out of it"
        notes.append(f"what goes into {name_template(name)} is multiplied by width^{power:g}: {taken}")
    return tuple(dict.fromkeys(notes))


def _scaling(
    name: str,
    where: Placed,
    law: Law,
    *,
    base_shape: Shape,
    shape: Shape,
    width_ratio: float,
    weight_decay_mode: WeightDecayMode,
    forward_exponent: float,
    gain: FinalGain | None,
) -> Scaling:
    holds_readout = gain is not None and name in gain.names
    role: Role = "tied_gain" if holds_readout else where.role
    ratio = _fan_in_ratio(base_shape, shape, where.fan_in) if where.fan_in else width_ratio
    return Scaling(
        role=role,
        shape=shape,
        base_shape=base_shape,
        fan_in_ratio=ratio,
        multipliers=multipliers(
            role,
            fan_in_ratio=ratio,
            width_ratio=width_ratio,
            weight_decay_mode=weight_decay_mode,
            own_init_exponent=law.exponent,
            forward_exponent=forward_exponent,
        ),
        own_std=None if law.std is None else law.std * ratio**law.exponent,
        own_std_error=law.error,
        one_plus=gain is not None and name == gain.one_plus,
        why="final norm, doubles what goes into the head" if holds_readout else where.why,
    )


def _argument_problems(base_width: int | None, base_config: PreTrainedConfig | None, mode: str) -> list[Problem]:
    problems = []
    if (base_width is None) == (base_config is None):
        what, given = "muP needs one base model", f"base_width={base_width}, base_config={base_config is not None}"
        problems.append(Problem(what, given, "muP arguments", "give exactly one of base_width and base_config"))
    if base_width is not None and base_width < 1:
        problems.append(Problem("the base width is no width", str(base_width), "base_width", "a whole number above 0"))
    if mode not in WEIGHT_DECAY_MODES:
        what, remedy = "unknown weight decay mode", f"one of {', '.join(WEIGHT_DECAY_MODES)}"
        problems.append(Problem(what, mode, "muP weight decay", remedy))
    return problems


def _shapes(models: Mapping[str, PreTrainedModel]) -> dict[str, tuple[Shape, ...]]:
    """Name -> its shape in each model; refused where the models have not the same parameters."""
    each = {label: {n: tuple(p.shape) for n, p in model.named_parameters()} for label, model in models.items()}
    first_label, first = next(iter(each.items()))
    for label, shapes in each.items():
        differing = [
            n for n in {**first, **shapes} if len(first.get(n, ())) != len(shapes.get(n, ())) or n not in first
        ]
        if differing:
            what = f"the model at {label} width has not the parameters of the one at {first_label} width"
            remedy = "a base_config that differs in widths only: the same depth, experts and options"
            raise ConfigError([Problem(what, ", ".join(differing[:6]), "base model", remedy)])
    return {name: tuple(shapes[name] for shapes in each.values()) for name in first}


def _fan_in_ratio(base: Shape, shape: Shape, axes: tuple[int, ...]) -> float:
    ratio = Fraction(1)
    for axis in axes:
        ratio *= Fraction(shape[axis], base[axis])
    return float(ratio)


def _final_gain(model: PreTrainedModel, placed: Mapping[str, Placed], problems: list[Problem]) -> FinalGain | None:
    if not is_tied(model):
        return None
    gain = final_gain(model, [name for name, where in placed.items() if where.role == "vector"])
    if gain is None:
        what = "the head is tied to the embedding, and no gain before it could hold the readout's 1/width"
        remedy = "tie_word_embeddings: false in config_overrides"
        problems.append(Problem(what, "tie_word_embeddings: true", "configuration", remedy))
    return gain


def _own_initialisation(seen: Study, placed: Mapping[str, Placed], problems: list[Problem]) -> dict[str, Law]:
    """Name -> its law, measured over all layers of a kind, unless they differ among themselves (by depth, say)."""
    narrow, wide = seen.narrow, seen.wide
    kinds: dict[str, list[str]] = {}
    for name in placed:
        kinds.setdefault(name_template(name), []).append(name)
    laws: dict[str, Law] = {}
    for template, members in kinds.items():
        base, twice = Spread.of(narrow[name] for name in members), Spread.of(wide[name] for name in members)
        is_matrix = placed[members[0]].role in MATRICES
        # The spread of a vector around a mean (a gain around 1, a pattern) is no size that a rule is about.
        a = exponent(base, twice) if is_matrix or abs(base.mean) < base.std else 0.0
        if a is None and is_matrix:
            problems.append(_no_power(template, base, twice))
        alike = all(abs(narrow[name].std - base.std) <= (0.01 + 5 * narrow[name].error) * base.std for name in members)
        for name in members:
            own = base if alike else narrow[name]
            laws[name] = Law(a or 0.0, own.std if is_matrix and own.std else None, own.error)
    return laws


def _no_power(template: str, base: Spread, twice: Spread) -> Problem:
    what = f"the initial size of {template} follows no power of the width that is known here"
    given = f"standard deviation {base.std:.4g} at the base, {twice.std:.4g} at twice its width"
    remedy = "a wider base, or an initialisation that does (initializer_range or the like in config_overrides)"
    return Problem(what, given, "the architecture", remedy)


def _unscaled(name: str, sizes: tuple[Shape, ...], where: Placed, vocabulary: int) -> str:
    """A note on a matrix dimension that is as large as those that grow but does not grow; "" where there is none."""
    base, growing = sizes[0], infinite_axes(sizes)
    if where.role not in MATRICES or "embedding" in where.why or not growing:
        return ""
    largest = max(base[axis] for axis in growing)
    fixed = [size for axis, size in enumerate(base) if axis not in growing and size >= largest and size != vocabulary]
    if not fixed:
        return ""
    return f"{name_template(name)} has a dimension of {max(fixed)} that does not grow with the width"

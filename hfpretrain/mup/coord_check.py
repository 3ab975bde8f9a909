"""Coordinate check (Yang et al. 2022, appendix D.1): do activations keep their size when the width grows?

A few widths of one architecture take the same few Adam steps on the same tokens. Under muP the size of a coordinate of
every hidden activation, and of what training has changed about it, does not depend on the width; what has no dimension
that grows (logits, router scores) must not grow. It shows the scaling at these widths and steps, not that the best
learning rate transfers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpretrain.model import name_template
from hfpretrain.mup.activations import Activation, activations
from hfpretrain.mup.apply import apply
from hfpretrain.mup.infer import Study, infer_from, study
from hfpretrain.mup.measure import doubled, is_twice
from hfpretrain.mup.probe import probe_model, probe_tokens
from hfpretrain.mup.slopes import Sizes, Slope, mean_sizes, sizes_of, slope_of
from hfpretrain.mup.spec import MupSpec
from hfpretrain.mup.width import hidden_size, scale_width

# A few steps of it are a tenth of weights drawn with 0.02. At larger ones the smallest width leaves its first, linear
# phase, which the widest does not, and slopes of a limit that is not reached yet are measured.
LEARNING_RATE = 5e-4
ROWS, TOKENS = 4, 32
EPS = 1e-12  # at tiny gradients the default of 1e-8 would be part of what is measured


@dataclass(frozen=True)
class CoordCheck:
    """The result: `slopes` in the order of the forward pass; `fault` names the steepest that is not flat, or is ""."""

    widths: tuple[int, ...]
    steps: int
    seeds: int
    lr: float
    standard: bool
    tied: bool
    slopes: tuple[Slope, ...]
    fault: str

    @property
    def verdict(self) -> str:
        return "not flat" if self.fault else "flat"

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        rows = [("activation", "at start", "size", "change", "", "roles")]
        for s in self.slopes:
            mark = ("flat" if s.grows else "bounded") if s.flat else "NOT FLAT"
            mark = mark if s.measured else "too noisy"
            rows.append((s.kind, f"{s.at_start:+.2f}", f"{s.size:+.2f}", f"{s.change:+.2f}", mark, " ".join(s.roles)))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(f"{row[i]:{'<' if i in (0, 4) else '>'}{widths[i]}}" for i in range(5)) for row in rows]
        table = "\n".join(f"{line}  {row[5]}" for line, row in zip(lines, rows, strict=True))
        return f"{table}\n{self.verdict}" + (f": {self.fault}" if self.fault else "")


def coord_check(
    config: PreTrainedConfig,
    *,
    widths: Sequence[int],
    steps: int = 4,
    seeds: int = 1,
    lr: float = LEARNING_RATE,
    standard: bool = False,
    overrides: dict[str, Any] | None = None,
    seen: Study | None = None,
    rows: int = ROWS,
    tokens: int = TOKENS,
) -> CoordCheck:
    """Train `config` at each of `widths` and measure activations.

    Args:
        widths: hidden sizes; the smallest is the base, where muP and the standard parametrisation are the same.
        standard: the standard parametrisation, one learning rate for all: it should fail.
        overrides: see `infer`.
        seen: of the model at the smallest width, where it has been studied already.
        rows, tokens: size of the batch. What its tokens ask for independently of one another falls with 1/sqrt(width);
            the fewer there are, the sooner what is left of a change shows.

    Raises:
        ConfigError: a width that this architecture cannot have, or what `infer` refuses.
    """
    own = hidden_size(config)
    seen = study(scale_width(config, Fraction(min(widths), own))) if seen is None else seen
    records: dict[str, list[Sizes]] = defaultdict(list)
    spec: MupSpec | None = None
    for width in sorted(widths):
        scaled = scale_width(config, Fraction(width, own))
        spec = infer_from(seen, scaled, overrides=overrides)
        for seed in range(seeds):
            model = probe_model(scaled, seed=seed)
            if not standard:
                apply(model, spec)
            batch = probe_tokens(scaled, rows=rows, tokens=tokens, seed=seed)
            for kind, of_kind in _train(model, None if standard else spec, seen, batch, steps, width, lr).items():
                records[kind].append(of_kind)
    assert spec is not None
    slopes: dict[str, Slope] = {}
    for kind, sizes in records.items():
        if len(sizes) == len(widths) * seeds:
            slopes[kind] = slope_of(kind, sizes, _roles(kind, spec), slopes)
    return CoordCheck(
        tuple(sorted(widths)), steps, seeds, lr, standard, spec.tied, tuple(slopes.values()), _fault(slopes.values())
    )


def _fault(slopes: Iterable[Slope]) -> str:
    bad = [slope for slope in slopes if not slope.flat]
    if not bad:
        return ""
    worst = max(bad, key=lambda s: max(s.steepness))
    roles = ", ".join(worst.roles) or "none of its own"
    return f"{worst.kind} (roles: {roles}), slope {worst.size:+.2f} in size and {worst.change:+.2f} in change"


def _roles(kind: str, spec: MupSpec) -> tuple[str, ...]:
    return tuple(sorted({s.role for name, s in spec.parameters.items() if name_template(name).startswith(f"{kind}.")}))


def _factors(
    model: PreTrainedModel, spec: MupSpec, seen: Study, tokens: Tensor, before: Mapping[str, Activation]
) -> dict[str, float]:
    """Module name -> a factor that muP puts into its output for what follows to take out: not for it to answer for.

    The gain before a tied head holds the readout's 1/width; whatever doubles with it, up to the head, has it too. And
    where token embeddings are multiplied by a power of the width, what counts is what they are when they reach the
    first block: a power that comes later is missing here (CTRL), one that a norm takes out again is too much (PLBart).
    """
    factors: dict[str, float] = {}
    scalings = {name: spec.of(name) for name, _ in model.named_parameters()}
    if gains := [name for name, scaling in scalings.items() if scaling.role == "tied_gain"]:
        with doubled(model, gains, next((name for name in gains if scalings[name].one_plus), None)):
            twice = activations(model, tokens)
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        up_to_head = itertools.takewhile(lambda name: name != head, before)
        factor = scalings[gains[0]].multipliers.init
        factors |= {name: factor for name in up_to_head if is_twice(twice[name].output, before[name].output)}
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    if name in before and seen.embedding_exponent is not None:
        rate = scalings[next(n for n, p in model.named_parameters() if p is embedding.weight)].multipliers.lr
        factor = rate * _own_gain(model, tokens) / _own_gain(seen.small, tokens)
        factors |= {n: factor for n, found in before.items() if torch.equal(found.output, before[name].output)}
    return factors


def _own_gain(model: PreTrainedModel, tokens: Tensor) -> float:
    """What the embedding module multiplies its rows with."""
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    with torch.no_grad():
        return float(embedding(tokens).norm() / embedding.weight[tokens].norm())


def _groups(model: PreTrainedModel, spec: MupSpec | None, lr: float) -> list[dict[str, Any]]:
    """One group per parameter, without weight decay."""
    groups = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate, eps = (1.0, 1.0) if spec is None else (spec.of(name).multipliers.lr, spec.of(name).multipliers.eps)
            groups.append({"params": [parameter], "lr": lr * rate, "eps": EPS * eps})
    return groups


def _train(
    model: PreTrainedModel, spec: MupSpec | None, seen: Study, tokens: Tensor, steps: int, width: int, lr: float
) -> dict[str, Sizes]:
    optimizer = torch.optim.AdamW(_groups(model, spec, lr), lr=lr, weight_decay=0.0)
    before = activations(model, tokens)
    factors = {} if spec is None else _factors(model, spec, seen, tokens, before)
    for _ in range(steps):
        logits = model(input_ids=tokens).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = activations(model, tokens)
    kinds: dict[str, list[Sizes]] = defaultdict(list)
    for name, start in before.items():
        if name in after and after[name].output.shape == start.output.shape:  # an expert may get other tokens now
            kinds[name_template(name)].append(sizes_of(start, after[name], width, factors.get(name, 1.0)))
    return {kind: mean_sizes(layers) for kind, layers in kinds.items()}

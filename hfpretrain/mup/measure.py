"""What an architecture does by itself with its width, measured: initial sizes, embedding scale, the gain at the head.

Some initialise with 1/sqrt(width) (Mamba's projections), some multiply their embeddings by sqrt(width) (Gemma). A rule
put on top of that would count twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfpretrain.initialisation import initialiser
from hfpretrain.mup.probe import probe_tokens
from hfpretrain.mup.uses import Uses, watch_uses

EXPONENTS = (0.0, -0.5, -1.0, 0.5)  # powers of the width that an initialisation may have
ENOUGH_NUMBERS = 4096  # standard deviations of fewer are measured over several seeds
MAX_SEEDS = 8


@dataclass
class Spread:
    """Initial values of one parameter over all seeds: how many, their sum and sum of squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        values = values.detach().double()
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())

    @classmethod
    def of(cls, parts: Iterable[Spread]) -> Spread:
        """Several taken together."""
        rows = [(part.count, part.total, part.squares) for part in parts]
        count, total, squares = (sum(column) for column in zip(*rows, strict=True))
        return cls(int(count), total, squares)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        variance = self.squares / self.count - self.mean**2
        return math.sqrt(variance) if variance > 1e-12 * self.mean**2 else 0.0

    @property
    def error(self) -> float:
        """Relative standard error of `std` for normal numbers; uniform ones have less."""
        return 1 / math.sqrt(2 * self.count)


def initial_spreads(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Spread]:
    """Spread of the named parameters' initial values; re-initialises the model where one seed gives too few numbers."""
    parameters = dict(model.named_parameters())
    spreads = {name: Spread() for name in names}
    draw = initialiser(model)
    for seed in range(1, MAX_SEEDS + 1):
        for name, spread in spreads.items():
            if spread.count < ENOUGH_NUMBERS:
                spread.add(parameters[name])
        if all(spread.count >= ENOUGH_NUMBERS or not spread.std for spread in spreads.values()):
            break
        draw(seed)
    return spreads


def exponent(base: Spread, double: Spread) -> float | None:
    """The power of the width that initial values have, from a model and one of twice its width; None: none of ours."""
    if not base.std or not double.std:
        return 0.0 if base.std == double.std else None
    measured = math.log2(double.std / base.std)
    nearest = min(EXPONENTS, key=lambda a: abs(a - measured))
    allowed = 0.05 + 4 * math.hypot(base.error, double.error) / math.log(2)
    return nearest if abs(nearest - measured) <= allowed else None


def embedding_gain(model: PreTrainedModel) -> float | None:
    """Change of what goes into the first repeated block per change of the embeddings; None where none is seen."""
    embedding, tokens = cast(nn.Embedding, model.get_input_embeddings()), probe_tokens(model.config)
    blocks = [child[0] for child in model.modules() if isinstance(child, nn.ModuleList) and len(child)]
    entered: list[Tensor] = []

    def note(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        floats = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()
        ]
        if floats and not entered:
            entered.append(floats[0].detach().clone())

    def run() -> Tensor | None:
        entered.clear()
        model(input_ids=tokens)
        return entered[0] if entered else None

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        with torch.no_grad():
            before = run()
            weight = embedding.weight
            saved = weight.clone()
            change = 0.01 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            weight += change
            after = run()
            weight.copy_(saved)
    finally:
        for handle in handles:
            handle.remove()
    if before is None or after is None or before.shape[:2] != tokens.shape:
        return None
    return float((after - before).norm() / change[tokens].norm()) or None


def forward_exponent(base: PreTrainedModel, double: PreTrainedModel) -> float | None:
    """The power of the width, 0 or 1/2, by which token embeddings are multiplied on their way in; None: neither."""
    gains = embedding_gain(base), embedding_gain(double)
    if gains[0] is None or gains[1] is None:
        return None
    measured = math.log2(gains[1] / gains[0])
    nearest = min((0.0, 0.5), key=lambda b: abs(b - measured))
    return nearest if abs(nearest - measured) < 0.12 else None


def fed_exponents(base: PreTrainedModel, double: PreTrainedModel, at_base: Mapping[str, Uses]) -> dict[str, float]:
    """Parameter -> power of the width, 1/2 or -1/2, by which the architecture multiplies what goes into its product.

    Some multiply a normalised low rank by sqrt(width / rank) (LongCat's), some normalise to length 1 in place of
    sqrt(width) (nGPT's). It is told from what the weights do by being exact, and by not depending on them: with all
    contracted weights twice as large, the size of what goes in stays the same.

    Args:
        at_base: what `watch_uses` saw of `base`.
    """
    tokens = probe_tokens(double.config)
    at_double = watch_uses(double, tokens)
    with torch.no_grad():
        for name, parameter in double.named_parameters():
            if at_double[name].products or at_double[name].looked_up:
                parameter.mul_(2)
        at_larger = watch_uses(double, tokens)
        for name, parameter in double.named_parameters():
            if at_double[name].products or at_double[name].looked_up:
                parameter.div_(2)
    found = {}
    for name in at_base:
        sizes = [sum(seen[name].fed) / max(len(seen[name].fed), 1) for seen in (at_base, at_double, at_larger)]
        if min(sizes) > 0 and abs(sizes[2] / sizes[1] - 1) < 0.01:
            for power in (0.5, -0.5):
                if abs(sizes[1] / sizes[0] / 2**power - 1) < 0.02:
                    found[name] = power
    return found


@dataclass(frozen=True)
class FinalGain:
    """The parameters whose scale is that of what goes into the head.

    Attributes:
        names: of one module's gain and, where it has one, bias.
        one_plus: the name of a gain that is used as 1 + weight; None where the weight is the gain.
    """

    names: tuple[str, ...]
    one_plus: str | None


def final_gain(model: PreTrainedModel, vectors: Sequence[str]) -> FinalGain | None:
    """The module of vectors only that doubles the head's input when its effective gain and bias double.

    The model's weights are as before afterwards.
    """
    by_module: dict[str, list[str]] = {}
    for name in vectors:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    own = {path: [n for n, _ in model.get_submodule(path).named_parameters(recurse=False)] for path in by_module}
    candidates = [path for path in by_module if len(own[path]) == len(by_module[path])]
    # Last and outside of layers first: there it is on all architectures that we have seen.
    candidates.sort(key=lambda path: any(part.isdigit() for part in path.split(".")))
    outside = [path for path in candidates if not any(part.isdigit() for part in path.split("."))]
    for path in [*reversed(outside), *reversed(candidates[len(outside) :])]:
        names = tuple(by_module[path])
        for one_plus in (None, *(name for name in names if name == f"{path}.weight")):
            if _doubles(model, names, one_plus):
                return FinalGain(names, one_plus)
    return None


@contextmanager
def doubled(model: PreTrainedModel, names: Sequence[str], one_plus: str | None) -> Iterator[None]:
    """The model with these gains and biases at twice their effective size, and as it was afterwards."""
    parameters = dict(model.named_parameters())
    saved = {name: parameters[name].detach().clone() for name in names}
    try:
        with torch.no_grad():
            for name in names:
                parameters[name].mul_(2).add_(1.0 if name == one_plus else 0.0)
        yield
    finally:
        with torch.no_grad():
            for name in names:
                parameters[name].copy_(saved[name])


def is_twice(twice: Tensor, once: Tensor) -> bool:
    """Whether one is the other's double up to rounding."""
    return torch.allclose(twice, 2 * once, rtol=1e-4, atol=1e-5 * float(once.abs().max()))


def _doubles(model: PreTrainedModel, names: Sequence[str], one_plus: str | None) -> bool:
    tokens = probe_tokens(model.config)
    parameters = dict(model.named_parameters())
    saved = {name: parameters[name].detach().clone() for name in names}
    seen: list[Tensor] = []
    head = cast(nn.Module, model.get_output_embeddings())
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    generator = torch.Generator().manual_seed(2)
    try:
        with torch.no_grad():
            for name in names:  # a bias of zero would double whatever is done with it
                parameters[name].add_(0.1 * torch.randn(saved[name].shape, generator=generator))
            model(input_ids=tokens)
            with doubled(model, names, one_plus):
                model(input_ids=tokens)
    finally:
        handle.remove()
        with torch.no_grad():
            for name in names:
                parameters[name].copy_(saved[name])
    return len(seen) == 2 and is_twice(seen[1], seen[0])

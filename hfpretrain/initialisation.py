"""Initial weights that depend on the seed and the module's name only.

transformers initialises a model by walking its modules, children first, and drawing from one random stream. The weights
of a module then depend on everything drawn before it, on the device, and on whether the parameters are partitioned
(ZeRO-3 draws on rank 0 only, in another order). Here every module has a stream of its own, seeded by its name, and the
drawing is always done on the CPU in fp32, on a twin of the model that holds no memory: its tensors live on the meta
device, and only those a module's initialisation touches are made real while it runs. The result is then copied into the
model, gathered first where it is partitioned. One seed gives one model at every ZeRO stage and world size.

Which tensors a module's initialisation touches is measured, not assumed: `_init_weights` is run once on the meta
tensors while every torch operation is watched. GPT-2, for one, draws `c_proj.weight` a second time from the attention
module above it; with the tensor partitioned away, that draw would be lost in silence.

torch's CPU generator takes 32 bits of a seed: two of 1000 modules share a stream with probability 1e-4, which does no
harm unless they also have the same shape.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions, no_init_weights
from transformers.modeling_utils import set_zero3_state
from transformers.pytorch_utils import Conv1D

_OVERWRITES = ("fill_", "zero_", "copy_")  # in-place operations whose result owes nothing to the old value
_UNWRITTEN = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class InitStep:
    """The initialisation of one module of a meta twin.

    Attributes:
        name: the module's name; "" for the model itself.
        run: draws the module's weights in place, from the default CPU generator.
        touches: names of all parameters and buffers that `run` reads or writes, in the module or anywhere else.
    """

    name: str
    run: Callable[[], None]
    touches: frozenset[str]


def initialise(model: PreTrainedModel, *, seed: int) -> None:
    """Give every parameter and buffer of `model` its initial value, in place; ties are left to the caller.

    `model` should have been built under `transformers.initialization.no_init_weights`, so that nothing is drawn twice.
    Works on plain and on ZeRO-3 partitioned parameters; under ZeRO-3 every rank must call it. The memory on the CPU is
    that of the largest set of tensors one module touches. Leaves torch's random state as it was.

    Raises RuntimeError for a parameter that nothing ever writes: its content would be whatever was in memory.
    """
    initialiser(model)(seed)


def initialiser(model: PreTrainedModel) -> Callable[[int], None]:
    """seed -> `initialise(model, seed=seed)`; for many seeds, what must be found out about the model is found once."""
    twin, written = _meta_twin(model)
    steps = _init_steps(twin)
    tied = model.all_tied_weights_keys  # tied name -> name of the tensor it will be replaced with
    target = {name: tensor for name, tensor in _tensors(model).items() if name not in tied}
    covered = written.union(*(step.touches for step in steps))
    if lost := [name for name, _ in model.named_parameters() if name not in covered and name not in tied]:
        raise RuntimeError(
            f"{type(model).__name__} never initialises {', '.join(lost[:8])} ({len(lost)} in all): neither its "
            "constructor nor its _init_weights writes them. Initialise them in _init_weights."
        )
    return partial(_draw, twin, steps, target)


def _draw(twin: PreTrainedModel, steps: list[InitStep], target: Mapping[str, Tensor], seed: int) -> None:
    last_use = {name: index for index, step in enumerate(steps) for name in step.touches}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), guard_torch_init_functions():
        for index, step in enumerate(steps):
            if not step.touches.isdisjoint(target):
                _make_real(twin, step.touches, target)
                torch.default_generator.manual_seed(module_seed(seed, step.name))
                step.run()
            for name in sorted(step.touches):
                if last_use[name] == index:
                    _release(twin, name, target.get(name))


def drawn_parameters(model: PreTrainedModel) -> set[str]:
    """Names of the parameters whose initial values are random numbers, not constants or a fixed pattern."""
    twin, _ = _meta_twin(model)
    with _Watch(_tensors(twin)) as watch, torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        for _, _, run in _modules_in_order(twin):
            run()
    return watch.drawn()


def module_seed(seed: int, name: str) -> int:
    """A stable 63-bit hash of (seed, module name): the same in every process and every version of Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big") >> 1


class _Watch(TorchDispatchMode):
    """Sees every torch operation: which named tensors it touched, wrote, or filled with random numbers."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__()
        self.name_of = {_storage(tensor): name for name, tensor in named.items()}
        self.touched: set[str] = set()
        self.written: set[int] = set()
        self.random: set[int] = set()
        self._keep: list[Any] = []  # storages are known by address: none may be freed and its address used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._keep += [tensor.untyped_storage() for tensor in inputs + outputs]
        self.touched |= {self.name_of[_storage(t)] for t in inputs if _storage(t) in self.name_of}
        operation = func.overloadpacket.__name__
        results = {_storage(tensor) for tensor in outputs}
        if operation not in _UNWRITTEN and not func.is_view:
            self.written |= results
        sources = inputs
        if operation in _OVERWRITES and inputs[0].untyped_storage().nbytes() == inputs[0].nbytes:
            sources = inputs[1:]
            self.random -= results
        if torch.Tag.nondeterministic_seeded in func.tags or any(_storage(t) in self.random for t in sources):
            self.random |= results
        return out

    def drawn(self) -> set[str]:
        return {name for storage, name in self.name_of.items() if storage in self.random}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _meta_twin(model: PreTrainedModel) -> tuple[PreTrainedModel, set[str]]:
    """The same architecture without memory, in fp32 and untied, and the names its constructor gives a value to."""
    config = copy.deepcopy(model.config)
    with ExitStack() as stack:
        watch = stack.enter_context(_Watch({}))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(no_init_weights())
        stack.enter_context(set_zero3_state())  # this one is not to be partitioned
        twin = type(model)._from_config(config, dtype=torch.float32)
    return twin, {name for name, tensor in _tensors(twin).items() if _storage(tensor) in watch.written}


def _modules_in_order(twin: PreTrainedModel) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
    """(name, module, its initialisation): children first, each by the `_init_weights` of the model it belongs to."""
    seen: set[int] = set()

    def walk(
        module: nn.Module, name: str, owner: PreTrainedModel
    ) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name, owner)
        yield name, module, lambda: owner._init_weights(module)

    return walk(twin, "", twin)


def _init_steps(twin: PreTrainedModel) -> list[InitStep]:
    """The steps that touch anything, in order. Torch's `reset_parameters` stands in where transformers does nothing."""
    steps = []
    touched_so_far: set[str] = set()
    for name, module, run in _modules_in_order(twin):
        touches = _touches(twin, name, run)
        own = {f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)}
        reset = _own_reset(module)
        if reset and own - touches - touched_so_far:

            def run(first: Callable[[], Any] = reset, then: Callable[[], Any] = run) -> None:
                first()
                then()

            touches = _touches(twin, name, run)
        touched_so_far |= touches
        if touches:
            steps.append(InitStep(name=name, run=run, touches=frozenset(touches)))
    return steps


def _own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """What a module's constructor does to its weights, where that can be done again."""
    if isinstance(module, Conv1D):  # transformers' own has no reset_parameters; OpenAI GPT relies on its constructor
        return lambda: (nn.init.normal_(module.weight, std=0.02), nn.init.zeros_(module.bias))
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _touches(twin: PreTrainedModel, name: str, run: Callable[[], None]) -> set[str]:
    everything = _tensors(twin)
    try:
        with _Watch(everything) as watch, torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            run()
    except (RuntimeError, NotImplementedError):
        # It asks for values, which meta tensors do not have: assume it touches all that is below it.
        return {key for key in everything if not name or key.startswith(f"{name}.")}
    return watch.touched


def _slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary (parameters or buffers of its module) that holds a named tensor, and its key there."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if key in module._parameters else module._buffers), key


def _make_real(twin: PreTrainedModel, names: frozenset[str], target: Mapping[str, Tensor]) -> None:
    """Give these tensors of the twin memory on the CPU, with the model's present values (the constructor's)."""
    for name in sorted(names):
        holder, key = _slot(twin, name)
        meta = holder[key]
        if meta.device.type != "meta":
            continue
        real = torch.empty_like(meta, device="cpu")
        if name in target:
            with gathered(target[name], write=False):
                real.copy_(target[name])
        holder[key] = nn.Parameter(real, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else real


def _release(twin: PreTrainedModel, name: str, target: Tensor | None) -> None:
    """Copy a finished tensor into the model and give its memory back."""
    holder, key = _slot(twin, name)
    if holder[key].device.type == "meta":
        return
    if target is not None:
        with gathered(target, write=True):
            target.copy_(holder[key])
    real = holder[key]
    meta = torch.empty_like(real, device="meta")
    holder[key] = nn.Parameter(meta, requires_grad=real.requires_grad) if isinstance(real, nn.Parameter) else meta


@contextmanager
def gathered(tensor: Tensor, *, write: bool) -> Iterator[None]:
    """The whole of a ZeRO-3 partitioned parameter, on every rank; what rank 0 writes is kept. No-op for plain ones."""
    if not hasattr(tensor, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0 if write else None):
        yield

"""Does a run fit? Memory of one rank by component, the largest micro-batch, and the optimizers side by side.

`placement` says what is held of a model, a measured pass (`hfpretrain.activation_memory`) what a micro-batch adds;
`hfpretrain.memory_estimate` brings them together for a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hfpretrain.errors import Problem
from hfpretrain.planning.budget import Figure
from hfpretrain.planning.optimizer_state import KINDS, Tensor, state_bytes
from hfpretrain.planning.placement import Held, Model, Placement, held

__all__ = ["Activations", "Fit", "MemoryEstimate", "Placement", "device_bytes", "optimizer_figures"]

# Left on a device for what is not counted: CUDA's context, NCCL's buffers, fragmentation of torch's allocator.
_TIGHT_SHARE = 0.1
_MOST_ROWS = 1 << 20

# GB (1e9 bytes) on the makers' data sheets, by the words of `flops.PEAK_FLOPS`; of several sizes the smallest. The
# driver shows a few percent more.
DEVICE_GB: dict[str, float] = {
    "V100": 16, "A100": 40, "A800": 40, "A40": 48, "A30": 24, "A10": 24, "A10G": 24, "H100": 80, "H100 PCIe": 80,
    "H100 NVL": 94, "H800": 80, "H200": 141, "H200 NVL": 141, "GH200": 96, "H20": 96, "B200": 180, "GB200": 186,
    "L4": 24, "L40": 48, "L40S": 48, "RTX 6000 Ada": 48, "RTX 3090": 24, "RTX 4090": 24, "RTX 4090 D": 24,
    "MI250X": 64, "MI300X": 192, "MI325X": 256,
}  # fmt: skip

WHAT = {
    "weights": ("b N, at ZeRO 3 b ceil(n / W) of each parameter", "weights"),
    "gathered": ("whole weights: small ones always, of a module at a time", "deepspeed zero/stage3.py"),
    "gradients": ("of micro-batches before, or this rank's part", "deepspeed zero/*, torch DDP"),
    "master_weights": ("4 N, or 4 N / W", "deepspeed zero/*, fp16/unfused_optimizer.py"),
    "optimizer_state": ("see optimizer_state_*", "planning/optimizer_state.py"),
    "buffers": ("the model's own, such as rotary tables", "measured"),
    "communication": ("buckets in which gradients are reduced", "deepspeed reduce_bucket_size, torch DDP"),
    "activations": ("kept for the backward pass, and made in it", "a pass without memory"),
    "loss": ("the head's scores, or the logits, and their gradients", "a pass without memory"),
    "update": ("gradients in float32 and flat, while the optimizer steps", "deepspeed zero/*"),
}


@dataclass(frozen=True)
class Activations:
    """What a micro-batch of `rows` allocates: `activation_memory.PassMemory` of it, as plain numbers.

    Attributes:
        points: (bytes alive, gradient values made so far, bytes of the loss among those alive).
        layers: bytes kept by each layer until its backward pass.
    """

    rows: int
    points: tuple[tuple[int, int, int], ...]
    saved: int = 0
    layers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank.

    Attributes:
        activations: None where no pass was measured.
        measure: rows -> the same for another micro-batch; None where that is not possible.
        left_out: what is not counted, one line each.
    """

    model: Model
    placement: Placement
    optimizer: str
    micro_batches: int
    activations: Activations | None
    measure: Callable[[int], Activations] | None = None
    left_out: tuple[str, ...] = ()

    @property
    def held(self) -> Held:
        return held(self.model, self.placement, optimizer=self.optimizer, micro_batches=self.micro_batches)

    @property
    def static_bytes(self) -> int:
        """On the device between two steps."""
        return sum(self.held.device.values())

    @property
    def host_bytes(self) -> int:
        """In host memory, for this rank."""
        return sum(self.held.host.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.components().values())

    def components(self) -> dict[str, int]:
        """Component -> bytes on the device at the moment when most are in use."""
        own = self.held
        moments = [_add(own.device, {"gradients": own.end_of_backward}), _add(own.device, {"update": own.update})]
        points = self.activations.points if self.activations is not None else ((0, self.model.values, 0),)
        for live, done, of_loss in points:
            extra = {
                "gathered": own.gathered,
                "communication": own.communication if done else 0,
                "gradients": own.gradients_before + own.gradient_bytes * done + (own.gradients_kept if done else 0),
                "activations": live - of_loss,
                "loss": of_loss,
            }
            moments.append(_add(own.device, extra))
        return max(moments, key=lambda moment: sum(moment.values()))

    def figures(self) -> list[Figure]:
        """Components at the peak, their sum, and what the host holds."""
        parts = self.components()
        figures = []
        for name, (formula, source) in WHAT.items():
            if parts.get(name) or name in ("weights", "gradients", "optimizer_state"):
                figures.append(Figure(f"memory_{name}", parts.get(name, 0), "bytes", formula, source))
        rows = "" if self.activations is None else f" at {self.activations.rows} rows"
        figures.append(Figure("memory_peak", self.peak_bytes, "bytes", f"their sum, on one rank{rows}"))
        if self.host_bytes:
            figures.append(
                Figure("host_memory", self.host_bytes, "bytes", "offloaded, of one rank", "deepspeed zero/*")
            )
        return figures

    def optimizer_figures(self) -> list[Figure]:
        return optimizer_figures(self.model, self.placement)

    def with_rows(self, rows: int) -> MemoryEstimate:
        """The same run with another micro-batch; measured, not extrapolated."""
        if self.measure is None:
            raise ValueError("this estimate has no measured pass, so it cannot tell what other rows take")
        return replace(self, activations=self.measure(rows))

    def largest_micro_batch(self, device_bytes: int) -> int | None:
        """Rows of the largest micro-batch that fits, 0 where none does; None where no pass was measured.

        Memory is nearly affine in the rows, so a line through two measured passes finds the neighbourhood of the
        limit; the answer itself is measured: it fits, and one row more does not.
        """
        if self.activations is None or self.measure is None:
            return None
        known: dict[int, int] = {self.activations.rows: self.peak_bytes}

        def peak(rows: int) -> int:
            if rows not in known:
                known[rows] = self.with_rows(rows).peak_bytes
            return known[rows]

        if peak(1) > device_bytes:
            return 0
        low, high, guess = 1, _MOST_ROWS, 2
        while high - low > 1:
            if peak(guess) <= device_bytes:
                low = guess
            else:
                high = guess
            nearest = sorted(known, key=lambda rows: abs(known[rows] - device_bytes))[:2]
            guess = largest_on_line([(rows, known[rows]) for rows in nearest], device_bytes, default=2 * low)
            guess = min(max(guess, low + 1), high - 1)
            if guess in known:
                guess = (low + high) // 2 if high < _MOST_ROWS else 2 * low
        return low

    def fits(self, device_bytes: int) -> Fit:
        """Whether it fits into this much device memory, with what margin."""
        return Fit(self, device_bytes, self.peak_bytes, self.largest_micro_batch(device_bytes))


@dataclass(frozen=True)
class Fit:
    """The verdict on an estimate and a device."""

    estimate: MemoryEstimate
    device_bytes: int
    peak_bytes: int
    largest_micro_batch: int | None

    @property
    def margin_bytes(self) -> int:
        return self.device_bytes - self.peak_bytes

    @property
    def verdict(self) -> str:
        """ "fits", "tight" (less than a tenth of the device is left for what is not counted) or "too large"."""
        if self.margin_bytes < 0:
            return "too large"
        return "tight" if self.margin_bytes < _TIGHT_SHARE * self.device_bytes else "fits"

    def __str__(self) -> str:
        text = f"{self.verdict}: {_gib(self.peak_bytes)} at the peak of {_gib(self.device_bytes)}"
        if self.largest_micro_batch is not None:
            text += f"; at most {self.largest_micro_batch} rows at once"
        return text

    def figures(self) -> list[Figure]:
        figures = [Figure("memory_margin", self.margin_bytes, "bytes", "device memory - memory_peak")]
        if self.largest_micro_batch is not None:
            formula = "most rows whose peak is below device memory, each pass measured"
            figures.append(Figure("largest_micro_batch", self.largest_micro_batch, "rows", formula))
        return figures

    def problem(self, source: str = "arguments") -> Problem:
        """What to change where it is too large."""
        e = self.estimate
        parts = sorted(e.components().items(), key=lambda item: -item[1])[:3]
        what = (
            f"one rank would need {_gib(self.peak_bytes)} of the device's {_gib(self.device_bytes)}, most of it "
            + ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in parts)
        )
        rows = "" if e.activations is None else f"per_device_train_batch_size={e.activations.rows}, "
        stage = "no DeepSpeed" if e.placement.zero_stage is None else f"ZeRO {e.placement.zero_stage}"
        if self.largest_micro_batch:
            remedy = f"per_device_train_batch_size of at most {self.largest_micro_batch}"
        else:
            remedy = "gradient_checkpointing, a shorter sequence_length"
        stages = [s for s in (2, 3) if s > (e.placement.zero_stage or 0)]
        better = {s: replace(e, placement=replace(e.placement, zero_stage=s)).peak_bytes for s in stages}
        remedy += "".join(f", or ZeRO {s} ({_gib(size)})" for s, size in better.items() if size < self.device_bytes)
        return Problem(what, f"{rows}{stage}, {e.placement.world_size} ranks", source, remedy)


def largest_on_line(points: Sequence[tuple[int, int]], device_bytes: int, *, default: int) -> int:
    """Rows at which the line bytes = static + per_row * rows through two points (rows, bytes) reaches the device.

    `default` where it does not rise.
    """
    if len(points) < 2:
        return default
    (rows, size), (other_rows, other_size) = sorted(points)[:2]
    per_row = (other_size - size) / (other_rows - rows)
    if per_row <= 0:
        return default
    return int(rows + (device_bytes - size) // per_row)


def optimizer_figures(model: Model | int, placement: Placement) -> list[Figure]:
    """Bytes of state of each kind of optimizer on one rank; a number of parameters stands for one matrix of no shape.

    ZeRO 1 to 3 hand an optimizer flat partitions, so Adafactor has nothing to factor there; Muon's share of hidden
    matrices is taken over from the model (DeepSpeed has a Muon of its own for them).
    """
    figures = []
    for kind in KINDS:
        if isinstance(model, int):
            from hfpretrain.planning.placement import Parameter

            model = Model((Parameter((model,)),))
        size = _state(kind.name, model, placement)
        formula = f"{size / max(model.values, 1):.3g} bytes a parameter on this rank"
        figures.append(Figure(f"optimizer_state_{kind.name}", size, "bytes", formula, kind.source))
    return figures


def _state(kind: str, model: Model, placement: Placement) -> int:
    tensors = [p.as_tensor() for p in model.trained]
    if placement.sharded:
        w = placement.world_size
        parts: dict[tuple[bool, bool], int] = {}
        for tensor in tensors:
            key = (tensor.hidden, tensor.embedding)
            parts[key] = parts.get(key, 0) + -(-tensor.values // w)
        if kind == "muon":  # flat, but still one momentum only
            return sum(4 * n if hidden else 8 * n for (hidden, _), n in parts.items())
        tensors = [Tensor((n,), embedding=embedding) for (_, embedding), n in parts.items()]
    return state_bytes(kind, tensors)


def device_bytes(name: str) -> int | None:
    """Memory of a device by a word of `flops.PEAK_FLOPS`; None where it is not known."""
    matches = [word for word in DEVICE_GB if word.lower() == name.lower()]
    return int(DEVICE_GB[matches[0]] * 1e9) if matches else None


def _add(base: Mapping[str, int], extra: Mapping[str, int]) -> dict[str, int]:
    return {name: base.get(name, 0) + extra.get(name, 0) for name in (*base, *(k for k in extra if k not in base))}


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"

"""What published laws say of one run: loss, better sizes, batch and learning rate, and how far each law reaches."""

from __future__ import annotations

from collections.abc import Sequence

from hfpretrain.planning import batch_laws as batch
from hfpretrain.planning import scaling_laws as laws
from hfpretrain.planning.compute import over_training, tokens_per_parameter
from hfpretrain.planning.figures import Figure


def size_figures(*, parameters: float, tokens: float, inference_tokens: float | None = None) -> list[Figure]:
    """Expected loss, compute-optimal sizes under three fits, and the cheapest size over the model's life."""
    N, D = parameters, tokens
    fit = laws.BESIROGLU
    expected = laws.loss(N, D, fit)
    figures = [
        Figure("tokens_per_parameter", tokens_per_parameter(N, D), "tokens/parameter", "D / N"),
        Figure("over_training", over_training(N, D), "times", "D / N / 20", "Hoffmann 2022, rounded"),
        Figure("expected_loss", expected, "nats/token", "E + A/N^a + B/D^b on their text", fit.source),
    ]
    for name, other in laws.LOSS_FITS.items():
        best = laws.compute_optimal(6.0 * N * D, other)
        formula = "N* = G (C/6)^(b/(a+b))"
        figures.append(Figure(f"optimal_parameters_{name}", best.parameters, "parameters", formula, other.source))
        figures.append(Figure(f"optimal_tokens_{name}", best.tokens, "tokens", "D* = C / 6 / N*", other.source))
    if inference_tokens is not None:
        figures += _lifetime(N, D, inference_tokens, expected)
    return figures


def _lifetime(parameters: float, tokens: float, inference_tokens: float, expected: float) -> list[Figure]:
    life = laws.lifetime_flops(parameters, tokens, inference_tokens)
    best = laws.lifetime_optimal(expected, inference_tokens)
    ratio = laws.lifetime_flops(best.parameters, best.tokens, inference_tokens) / life
    formula = "least 6 N D + 2 N n_infer at expected_loss" + ("; EXTRAPOLATED" if best.extrapolates else "")
    source = "Sardana 2024, with the fit of Besiroglu 2024"
    return [
        Figure("lifetime_flops", life, "FLOPs", "6 N D + 2 N n_infer of this run", "Sardana 2024"),
        Figure("lifetime_optimal_parameters", best.parameters, "parameters", formula, source),
        Figure("lifetime_optimal_tokens", best.tokens, "tokens", formula, source),
        Figure("lifetime_flops_ratio", ratio, "times", "that optimum's FLOPs over this run's", source),
    ]


def batch_figures(
    *,
    parameters: float,
    tokens: float,
    batch_tokens: float,
    noise_scale_points: Sequence[tuple[float, float]] | None = None,
    inner_flops: float | None = None,
) -> list[Figure]:
    """Critical batches, each with what this batch costs in steps and tokens if it is right; best batches of two laws.

    Args:
        inner_flops: DeepSeek's C, training FLOPs without embedding and head, with attention; None: 6 N D in its place.
    """
    expected = laws.loss(parameters, tokens)
    critical = {
        "kaplan": (batch.kaplan_critical_batch_tokens(expected), "2e8 / L^(1/0.21), L expected_loss", "Kaplan 2020"),
        "zhang": (batch.zhang_critical_batch_tokens(tokens=tokens), "22.91 (D/1e6)^0.47 rows of 512", "Zhang 2024"),
    }
    if noise_scale_points:
        law = batch.power_law_through(noise_scale_points)
        critical["points"] = (law(parameters), f"{law.scale:.4g} N^0.5", "the given points")
    figures = []
    for name, (size, formula, source) in critical.items():
        steps, needed = batch.steps_ratio(batch_tokens, size), batch.tokens_ratio(batch_tokens, size)
        figures += [
            Figure(f"critical_batch_{name}", size, "tokens", formula, source),
            Figure(f"steps_ratio_{name}", steps, "times", "S/Smin = 1 + Bcrit/B", "McCandlish 2018"),
            Figure(f"tokens_ratio_{name}", needed, "times", "E/Emin = 1 + B/Bcrit", "McCandlish 2018"),
        ]
    flops, name = (6.0 * parameters * tokens, "6 N D") if inner_flops is None else (inner_flops, "FLOPs of the layers")
    deepseek = batch.deepseek_batch_tokens(flops)
    return [
        *figures,
        Figure("best_batch_deepseek", deepseek, "tokens", f"0.2920 C^0.3271, C {name}", "DeepSeek LLM 2024"),
        Figure("best_batch_step_law", batch.step_law_batch_tokens(tokens), "tokens", "0.58 D^0.571", "Step Law 2025"),
    ]


def rate_figures(
    *,
    parameters: float,
    tokens: float,
    batch_tokens: float,
    learning_rate: float,
    width: int | None = None,
    mup_base_width: int | None = None,
    inner_parameters: float | None = None,
    inner_flops: float | None = None,
) -> list[Figure]:
    """This run's peak learning rate beside what laws and rules of thumb give for AdamW, and their range.

    Args:
        width: hidden size; None leaves the rules of thumb out.
        inner_parameters, inner_flops: what the two laws count, without embedding and head; None: N and 6 N D.
    """
    flops, size = inner_flops or 6.0 * parameters * tokens, inner_parameters or parameters
    of_law = "0.3118 C^-0.1250, C " + ("6 N D" if inner_flops is None else "FLOPs of the layers")
    of_step_law = "1.79 N^-0.713 D^0.307, N without vocabulary" + (
        ": not known here" if inner_parameters is None else ""
    )
    found = {
        "deepseek": (batch.deepseek_learning_rate(flops), of_law, "DeepSeek LLM 2024"),
        "step_law": (batch.step_law_learning_rate(size, tokens), of_step_law, "Step Law 2025"),
    }
    if width is not None:
        formula = "6e-4 sqrt(B / 0.5M) sqrt(768 / d)"
        rate = batch.rule_of_thumb_learning_rate(batch_tokens, width)
        found["rules_of_thumb"] = (rate, formula, "GPT-3 125M; Malladi 2022; folk rule of 1/sqrt(d)")
    rates = [rate for rate, _, _ in found.values()]
    figures = [Figure("learning_rate", learning_rate, "of AdamW", "as given, or pretrain.py's default", "this run")]
    figures += [Figure(f"learning_rate_{name}", *rest) for name, rest in _with_unit(found).items()]
    figures += [
        Figure("learning_rate_lowest", min(rates), "of AdamW", "of the estimates above; a range, no value"),
        Figure("learning_rate_highest", max(rates), "of AdamW", "of the estimates above; a range, no value"),
    ]
    if width is not None and mup_base_width is not None:
        formula = "base width / width: hidden matrices; the rate itself is that of the base"
        ratio = mup_base_width / width
        figures.append(Figure("mup_hidden_learning_rate", ratio, "of learning_rate", formula, "Yang 2022"))
    return figures


def _with_unit(found: dict[str, tuple[float, str, str]]) -> dict[str, tuple[float, str, str, str]]:
    return {name: (value, "of AdamW", formula, source) for name, (value, formula, source) in found.items()}


def law_notes(
    *, parameters: float, tokens: float, rates: Sequence[Figure], inference_tokens: float | None = None
) -> list[str]:
    """Which of the figures above lie outside of what their laws were fitted to, and a learning rate outside of all.

    Args:
        rates: those of `rate_figures`.
    """
    N, D = parameters, tokens
    expected, flops = laws.loss(N, D), 6.0 * N * D
    ratio = (0.0, float(laws.MAX_FITTED_TOKENS_PER_PARAMETER))
    measures = [
        ("expected_loss", "parameters", N, laws.FITTED_PARAMETERS),
        ("expected_loss", "tokens", D, laws.FITTED_TOKENS),
        ("expected_loss", "tokens/parameter", D / N, ratio),
        ("critical_batch_kaplan", "nats", expected, batch.KAPLAN_NATS),
        ("critical_batch_zhang", "parameters", N, batch.ZHANG_PARAMETERS),
        ("deepseek", "FLOPs", flops, batch.DEEPSEEK_FLOPS),
        ("step_law", "parameters", N, batch.STEP_LAW_PARAMETERS),
        ("step_law", "tokens", D, batch.STEP_LAW_TOKENS),
    ]
    if inference_tokens is not None:
        best = laws.lifetime_optimal(expected, inference_tokens)
        measures.append(("lifetime_optimal", "tokens/parameter", best.tokens_per_parameter, ratio))
    outside: dict[str, list[str]] = {}
    for name, unit, value, (low, high) in measures:
        if not low <= value <= high:
            outside.setdefault(name, []).append(f"{value:.3g} {unit}, fitted from {low:.3g} to {high:.3g}")
    notes = [f"{name} extrapolates: {'; '.join(found)}" for name, found in outside.items()]
    by_name = {figure.name: figure.value for figure in rates}
    mine, low, high = (by_name[f"learning_rate{end}"] for end in ("", "_lowest", "_highest"))
    if not low <= mine <= high:
        notes.append(f"learning_rate {mine:g} is outside of the estimates, {low:.2g} to {high:.2g}")
    return notes

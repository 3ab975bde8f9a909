"""Everything that a comparison found, as one JSON-able mapping: choices, fingerprints, figures, nats of documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import PurePath
from typing import Any

import numpy as np

from hfpretrain.bpb import compare
from hfpretrain.bpb.corpus import Corpus
from hfpretrain.bpb.fidelity import Encoded
from hfpretrain.bpb.models import ModelCard
from hfpretrain.bpb.score import Scores

BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class Scored:
    """One model on the corpus that was scored.

    Attributes:
        encoded: of all documents that were read, those left out included.
        scores: of the documents that were kept.
    """

    card: ModelCard
    encoded: Encoded
    scores: Scores


def labels(names: Sequence[str]) -> list[str]:
    """The shortest ends of the names, in whole path parts, that tell them apart: runs/a/last -> a/last."""
    parts = [PurePath(name).parts for name in names]
    for count in range(1, max(map(len, parts), default=0) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(names):
            return ends
    return list(names)


def lossy_documents(names: Sequence[str], encoded: Sequence[Encoded], ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Id of each document that some tokenizer loses part of -> label of the model -> what is lost."""
    found: dict[str, dict[str, str]] = {}
    for label, one in zip(labels(names), encoded, strict=True):
        for identity, reason in zip(ids, one.lossy, strict=True):
            if reason:
                found.setdefault(identity, {})[label] = reason
    return found


def comparison(
    corpus: Corpus,
    models: Sequence[Scored],
    *,
    choices: Mapping[str, Any],
    lossy: Mapping[str, Mapping[str, str]],
    coders: Mapping[str, int],
) -> dict[str, Any]:
    """All figures.

    Args:
        corpus: the documents that were scored.
        lossy: see `lossy_documents`; whether they were left out is among the choices.
        coders: bytes of the corpus after each compressor.
    """
    names = labels([model.card.name for model in models])
    nats = {name: model.scores.nats for name, model in zip(names, models, strict=True)}
    total_bytes = int(corpus.text_bytes.sum())
    pairs = []
    for first, second in combinations(names, 2):
        pair = compare.paired(nats[first], nats[second], corpus.text_bytes, seed=BOOTSTRAP_SEED)
        pairs.append({"first": first, "second": second, "decided": pair.decided} | asdict(pair))
    records = {name: _record(model, corpus) for name, model in zip(names, models, strict=True)}
    return {
        "choices": dict(choices) | {"bootstrap_draws": compare.DRAWS, "bootstrap_seed": BOOTSTRAP_SEED},
        "data": {
            "fingerprint": corpus.fingerprint,
            "documents": len(corpus),
            "text_bytes": total_bytes,
            "largest_share": float(corpus.text_bytes.max() / total_bytes),
            "warnings": compare.warnings_about(corpus.text_bytes),
            "lossy": {identity: dict(reasons) for identity, reasons in lossy.items()},
        },
        "models": records,
        "pairs": pairs,
        "disagreements": _disagreements(records),
        "reference": {name: {"bytes": size, "bpb": 8 * size / total_bytes} for name, size in coders.items()},
        "documents": [
            {
                "id": corpus.ids[number],
                "domain": corpus.domains[number],
                "text_bytes": int(corpus.text_bytes[number]),
                "nats": {name: float(nats[name][number]) for name in names},
                "tokens": {name: int(m.scores.tokens[number]) for name, m in zip(names, models, strict=True)},
            }
            for number in range(len(corpus))
        ],
    }


def _record(model: Scored, corpus: Corpus) -> dict[str, Any]:
    card, scores, encoded = model.card, model.scores, model.encoded
    total, domains = compare.totals(scores.nats, scores.tokens, corpus.text_bytes, corpus.domains)
    uniform = compare.uniform_bound(total.tokens, total.text_bytes, scores.vocabulary)
    arrays = {"nats", "tokens", "notes"}
    return {
        "name": card.name,
        **_figures(total),
        "interval": asdict(compare.interval(scores.nats, corpus.text_bytes, seed=BOOTSTRAP_SEED)),
        "byte_perplexity": 2.0**total.bpb,
        "mean_of_documents": compare.mean_of_documents(scores.nats, corpus.text_bytes),
        "uniform_bound": uniform,
        "domains": {name: _figures(domain) for name, domain in domains.items()},
        "scoring": {key: value for key, value in vars(scores).items() if key not in arrays},
        "mean_context_bytes": scores.mean_context / total.tokens_per_byte if total.tokens else math.nan,
        "prefix_why": card.prefix_why,
        "fingerprint": card.fingerprint,
        "lossy_documents": sum(map(bool, encoded.lossy)),
        "unknown_tokens": int(np.sum(encoded.unknown_tokens)),
        "special_tokens": int(np.sum(encoded.special_tokens)),
        "notes": [*card.notes, *scores.notes, *compare.sanity(total.bpb, uniform)],
    }


def _figures(total: compare.Total) -> dict[str, Any]:
    derived = {name: getattr(total, name) for name in ("bpb", "nats_per_token", "tokens_per_byte")}
    return derived | asdict(total)


def _disagreements(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Pairs that loss per token would put in the other order: what bits per byte are for."""
    found = []
    for one, other in combinations(records, 2):
        better, worse = sorted((one, other), key=lambda name: float(records[name]["bpb"]))
        a, b = records[better], records[worse]
        if a["nats_per_token"] > b["nats_per_token"]:
            found.append(
                f"{better} predicts the text better ({a['bpb']:.4f} against {b['bpb']:.4f} bits per byte) though its "
                f"loss per token is higher ({a['nats_per_token']:.3f} against {b['nats_per_token']:.3f} nats): its "
                f"tokens are longer ({1 / a['tokens_per_byte']:.2f} against {1 / b['tokens_per_byte']:.2f} bytes)"
            )
    return found

"""Bits per byte as a metric for `evaluate`: of a whole corpus, from the nats of each document."""

import math

import datasets
import evaluate
import numpy as np

from hfpretrain.bpb.compare import bits_per_byte

_DESCRIPTION = """
Bits per byte of a corpus: sum of nats / (ln 2 * sum of UTF-8 bytes of the original texts). Comparable over tokenizers,
unlike loss per token. It is a ratio of sums, not a mean of documents.
"""
_INPUTS = """
Args:
    predictions: nats of each document, -ln p summed over all its tokens.
    references: the original texts (strings), never what a tokenizer decodes; or their UTF-8 lengths (integers).
Returns:
    bpb: bits per byte; NaN where there is no byte.
    byte_perplexity: 2 ** bpb.
    nats, text_bytes, documents: the sums.
"""


class BitsPerByte(evaluate.Metric):
    """See the description; offline, from a folder: `evaluate.load("hfpretrain/bpb/metric")`."""

    def _info(self) -> evaluate.MetricInfo:
        nats = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": nats, "references": datasets.Value("string")}),
                datasets.Features({"predictions": nats, "references": datasets.Value("int64")}),
            ],
        )

    def _compute(self, predictions: list[float], references: list[str] | list[int]) -> dict[str, float]:
        nats = np.asarray(predictions, dtype=np.float64)
        text_bytes = np.array([len(item.encode()) if isinstance(item, str) else item for item in references], np.int64)
        bad = np.flatnonzero(~np.isfinite(nats) | (nats < 0) | (text_bytes < 0))
        if len(bad):
            given = f"{nats[bad[0]]} nats, {text_bytes[bad[0]]} bytes"
            raise ValueError(f"document {bad[0]}: {given}; expected nats of 0 or more and a length of 0 or more")
        bpb = bits_per_byte(nats, text_bytes)
        return {
            "bpb": bpb,
            "byte_perplexity": 2.0**bpb,
            "nats": math.fsum(nats),
            "text_bytes": int(text_bytes.sum()),
            "documents": len(nats),
        }

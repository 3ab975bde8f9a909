"""hfpretrain: pretraining of any Hugging Face causal language model, right before fast."""

__version__ = "0.1.0"

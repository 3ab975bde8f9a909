"""From a name to a model that can be scored: which weights, which tokenizer, which token documents begin with.

A name is a folder (a finished run, a checkpoint of one that still runs, what `save_pretrained` wrote), a hub name, or a
.gguf file where transformers can read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from hfpretrain.bpb.score import Scorer, vocabulary_size
from hfpretrain.errors import ConfigError, Problem, refuse
from hfpretrain.loss import FusedLoss

DTYPES = ("float32", "bfloat16", "float16", "float64")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "*.gguf", "*.safetensors.index.json", "*.bin.index.json")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "tekken*.json"),
)


@dataclass(frozen=True)
class ModelCard:
    """What is known about a model without its weights in memory.

    Attributes:
        name: as the user gave it.
        prefix_id: what documents begin with; None: nothing.
        prefix_why: how that was decided.
        vocabulary: entries of its embedding.
        fingerprint: hash over the contents of weights, configuration and tokenizer files, not over their paths.
        notes: what a reader of its figures should know.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    prefix_id: int | None
    prefix_why: str
    vocabulary: int
    fingerprint: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LoadedModel(ModelCard):
    """A card and the model, in eval mode, in the dtype that was asked for."""

    model: PreTrainedModel

    @cached_property
    def scorer(self) -> Scorer:
        """Measured once, however often the model scores. Raises ConfigError: the model sees what follows."""
        fused = FusedLoss(self.model)
        verdict = fused.verify()
        refuse([verdict.problem(type(self.model).__name__)] if verdict.path == "refused" else [])
        return Scorer.of(fused, self.model, self.model.device)


def read_card(name: str, *, prefix: str = "trained") -> ModelCard:
    """Tokenizer, prefix and fingerprint of a model: all that can be wrong about it but its weights.

    Args:
        prefix: "trained": the start token that run.json records, in the folder or the one above, else BOS, else EOS;
            "bos", "eos"; "none"; or a token id.

    Raises:
        ConfigError: nothing of that name, no tokenizer in it, a tokenizer with more ids than the model, no such token.
    """
    place = _Place.of(name)
    try:
        config = AutoConfig.from_pretrained(place.folder, **place.gguf)
    except Exception as error:
        remedy = "a folder with a config.json, a hub name that can be reached, or a .gguf file (pip install gguf)"
        raise _problem(f"no model can be read here: {_first_line(error)}", name, remedy) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.folder, **place.gguf)
    except Exception as error:
        what = f"there is no tokenizer beside the model: {_first_line(error)}"
        remedy = "save the one it was trained with there: AutoTokenizer.from_pretrained(IT).save_pretrained(FOLDER)"
        raise _problem(what, name, remedy) from error
    vocabulary = vocabulary_size(config)
    problems, notes = _vocabularies(name, tokenizer, vocabulary)
    try:
        prefix_id, why = choose_prefix(prefix, tokenizer, _run_record(place.folder), vocabulary=vocabulary, name=name)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    refuse(problems)
    return ModelCard(name, tokenizer, config, prefix_id, why, vocabulary, place.fingerprint(), notes)


def load(
    name: str, *, dtype: str = "float32", prefix: str = "trained", device: torch.device | str = "cpu"
) -> LoadedModel:
    """A model with its tokenizer, ready to score.

    Args:
        dtype: of the weights: float32, bfloat16, float16 or float64. Probabilities are float32 at least.
        prefix: see `read_card`.

    Raises:
        ConfigError: see `read_card`; a dtype that is none of these; weights that are missing.
    """
    if dtype not in DTYPES:
        raise _problem("no such dtype", dtype, f"one of {', '.join(DTYPES)}", source="dtype")
    card = read_card(name, prefix=prefix)
    place = _Place.of(name)
    kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype), "output_loading_info": True, **place.gguf}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(place.folder, **kwargs)
    except Exception as error:
        raise _problem(
            f"its weights cannot be loaded: {_first_line(error)}", name, "a causal language model"
        ) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        what = f"{len(missing)} weights of {type(model).__name__} are missing and would be drawn at random"
        raise _problem(what, f"{name}: {', '.join(missing[:5])}", "a complete checkpoint of this architecture")
    model.config.use_cache = False
    model.eval().requires_grad_(False).to(device)
    return LoadedModel(**vars(card), model=model)


def choose_prefix(
    asked: str, tokenizer: Any, record: dict[str, Any] | None, *, vocabulary: int, name: str
) -> tuple[int | None, str]:
    """(token id that documents begin with, why that one); see `read_card`.

    Raises:
        ConfigError: the tokenizer has no such token, or the model has no such id.
    """
    tokens = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    if asked == "none":
        return None, "none, as asked: first tokens are charged a uniform code"
    if asked == "trained" and record is not None and record.get("start_id") is not None:
        chosen, why = int(record["start_id"]), "the start token of its training, from run.json"
    elif asked == "trained":
        kind = next((kind for kind in ("bos", "eos") if tokens[kind] is not None), None)
        if kind is None:
            what = "nothing says what documents began with: no start_id in run.json, no BOS, no EOS"
            raise _problem(what, name, "a token id, or none", source="prefix")
        chosen, why = int(tokens[kind]), f"{kind.upper()} of the tokenizer (no run.json tells another)"
    elif asked in tokens:
        if tokens[asked] is None:
            raise _problem(f"the tokenizer has no {asked.upper()} token", name, "a token id, or none", source="prefix")
        chosen, why = int(tokens[asked]), f"{asked.upper()} of the tokenizer, as asked"
    elif asked.isdecimal():
        chosen, why = int(asked), "as asked"
    else:
        what = "this is no prefix"
        raise _problem(what, asked, "trained, bos, eos, none or a token id", source="prefix")
    if chosen >= vocabulary:
        what = f"the model has no token {chosen} to begin documents with"
        raise _problem(what, name, f"an id below {vocabulary}", source="prefix")
    return chosen, f"{tokenizer.convert_ids_to_tokens(chosen)!r}: {why}"


@dataclass(frozen=True)
class _Place:
    """Where a model lies: a folder or hub name, and the file in it if it is a GGUF."""

    folder: str
    file: str | None

    @classmethod
    def of(cls, name: str) -> _Place:
        path = Path(name)
        return cls(str(path.parent), path.name) if path.suffix == ".gguf" and path.is_file() else cls(name, None)

    @property
    def gguf(self) -> dict[str, str]:
        return {} if self.file is None else {"gguf_file": self.file}

    def fingerprint(self) -> str:
        if self.file is not None:
            return _content([Path(self.folder) / self.file])
        folder = Path(self.folder)
        if not folder.is_dir():
            folder = Path(str(cached_file(self.folder, "config.json"))).parent
        found = {path for pattern in ("config.json", *_WEIGHTS, *_TOKENIZER) for path in folder.glob(pattern)}
        return _content(sorted(found))


def _content(files: Iterable[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _run_record(folder: str) -> dict[str, Any] | None:
    """run.json of a run's folder, or of the one that a checkpoint lies in."""
    for path in (Path(folder) / "run.json", Path(folder).resolve().parent / "run.json"):
        if path.is_file():
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return record
    return None


def _vocabularies(name: str, tokenizer: Any, vocabulary: int) -> tuple[list[Problem], tuple[str, ...]]:
    """Plain tokens beyond the model's embedding are another model's tokenizer; special ones no text can make."""
    special = {int(n) for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = {int(n) for n in tokenizer.get_vocab().values() if int(n) >= vocabulary}
    if plain := beyond - special:
        what = f"the tokenizer has {len(plain):,} tokens that the model has no embedding for"
        given = f"{name}: largest id {max(plain)}, vocabulary {vocabulary:,}"
        return [Problem(what, given, "models", "the tokenizer that the model was trained with")], ()
    if beyond:
        return [], (f"{len(beyond)} special tokens of its tokenizer are beyond its vocabulary of {vocabulary:,}",)
    return [], ()


def _problem(what: str, given: str, remedy: str, *, source: str = "models") -> ConfigError:
    return ConfigError([Problem(what, given, source, remedy)])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]

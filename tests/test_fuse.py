"""The loss on a model: right on every family by measurement, undone without a trace, refused where it is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from hfpretrain.errors import ConfigError
from hfpretrain.loss import IGNORE_INDEX, FusedLoss, fuse_loss, shift_labels
from hfpretrain.small_models import tiny_config
from loss_architectures import by_hand, examine, relative

FAMILIES = {
    "plain": ["llama", "mistral", "qwen2", "olmo2", "phi3", "stablelm", "starcoder2", "gpt_neox", "ernie4_5"],
    "tied": ["gpt2", "gemma", "opt", "bloom", "falcon", "mpt", "qwen3", "smollm3", "mamba", "codegen"],
    "bias": ["phi", "gptj", "bert", "roberta", "git", "big_bird"],
    "experts": ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss", "jamba"],
    "encoder-decoder": ["bart", "marian", "blenderbot"],
    "capped or scaled": ["gemma2", "recurrent_gemma", "cohere", "cohere2", "falcon_h1", "granite"],
}
UNUSUAL = {"llama": {}, "gemma2": {"final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 6.0}}


@pytest.mark.parametrize("model_type", [name for family in FAMILIES.values() for name in family])
def test_at_the_head_on_every_family(model_type: str) -> None:
    """Loss and gradient of all parameters, z-loss and router loss included, against float64 on the model's logits."""
    row = examine(model_type)
    assert row.path == "fused", row
    assert row.difference < 2e-6


def _model(model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    config = tiny_config(model_type)
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def _batch(rows: int = 2, tokens: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 5:9] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


def _gradients(model: nn.Module) -> list[Tensor | None]:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def _agrees(model: PreTrainedModel, fused: FusedLoss, path: str = "fused") -> None:
    """Whole model, z-loss of weight 1e-2, against the model's own logits in float64."""
    assert fused.verdict.path == path, fused.verdict
    batch = _batch()
    model.train()
    made = model(**batch).loss
    made.backward()
    ours = _gradients(model)
    expected = by_hand(model(input_ids=batch["input_ids"]).logits, batch["labels"])
    expected.backward()
    assert made.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative(ours, _gradients(model)) < 2e-6


@pytest.mark.parametrize(
    ("model_type", "change", "found"),
    [
        ("gemma2", {"final_logit_softcapping": 0.3}, "capped at 0.3"),
        ("granite", {"logits_scaling": 6.0}, "scaled by 0.166667"),
        ("cohere", {"logit_scale": 3.0}, "scaled by 3"),
        ("falcon_h1", {"lm_head_multiplier": 0.25}, "scaled by 0.25"),
        ("llama", {"tie_word_embeddings": True}, "as they are"),
    ],
)
def test_what_the_configuration_does_to_the_logits_is_found(model_type: str, change: dict, found: str) -> None:
    model = _model(model_type, **change)
    fused = fuse_loss(model, z_loss_weight=1e-2)
    assert str(fused.verdict.transform) == found
    _agrees(model, fused)


def _postprocessed(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A model that does something of its own to its logits, as remote code may."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        outputs.logits = change(outputs.logits)
        return outputs

    model.forward = forward
    return model


def test_a_padded_vocabulary_is_cut_where_the_model_cuts_it() -> None:
    masked = torch.tensor([0.0] * 100 + [torch.finfo(torch.float32).min] * 156)
    for change in (lambda logits: logits[..., :100], lambda logits: logits + masked):
        model = _postprocessed(_model(), change)
        fused = FusedLoss(model, z_loss_weight=1e-2)
        assert fused.verify().transform.vocabulary == 100
        batch = {name: tensor.clamp(max=99) for name, tensor in _batch().items()}
        loss = model(**batch).loss
        expected = by_hand(model(input_ids=batch["input_ids"]).logits, batch["labels"])
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        ours = torch.autograd.grad(loss, list(model.parameters()))
        assert relative(ours, torch.autograd.grad(expected, list(model.parameters()))) < 2e-6
        assert not ours[-1][100:].any()


def test_what_is_no_scale_nor_cap_takes_the_logits_path() -> None:
    model = _postprocessed(_model(), lambda logits: logits + 0.1 * logits.sin())
    fused = fuse_loss(model, z_loss_weight=1e-2)
    assert "neither scale nor softcap" in fused.verdict.reason
    _agrees(model, fused, path="logits")


def test_parameters_behind_the_head_take_the_logits_path() -> None:
    """A learnt scale looks like a constant one, but its own gradient would be lost."""
    model = _model()
    model.learnt = nn.Parameter(torch.tensor(2.0))
    fused = fuse_loss(_postprocessed(model, lambda logits: logits * model.learnt), z_loss_weight=1e-2)
    assert "parameters stand between" in fused.verdict.reason
    _agrees(model, fused, path="logits")


def test_a_head_that_is_more_than_its_matrix_takes_the_logits_path() -> None:
    class Doubling(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return 2.0 * super().forward(hidden)

    model = _model()
    model.lm_head.__class__ = Doubling
    fused = fuse_loss(model, z_loss_weight=1e-2)
    assert "differs from its own" in fused.verdict.reason
    _agrees(model, fused, path="logits")
    assert examine("dory").path == "logits"  # its head has a learnt scale per token


def test_a_gradient_that_is_not_that_of_the_logits_is_noticed() -> None:
    """Same logits, another gradient: a comparison of values alone would pass this."""
    model = _postprocessed(_model(), lambda logits: logits.detach() + 0.5 * (logits - logits.detach()))
    assert fuse_loss(model).verdict.path == "logits"


def test_what_is_no_causal_model_is_refused() -> None:
    seeing = _model("bert", is_decoder=False)
    with pytest.raises(ConfigError, match=r"depend on tokens that follow[\s\S]*is_decoder"):
        fuse_loss(seeing)
    assert "forward" not in seeing.__dict__  # nothing is left behind
    assert examine("cpmant").path == "refused"


def test_another_loss_of_the_model_itself_is_said() -> None:
    model = _model()
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits.flatten(0, 1), shift_labels(labels).flatten(), label_smoothing=0.5
    )
    assert "own loss is another" not in str(fuse_loss(_model()).verdict)
    model.lm_head.weight.data.mul_(20)  # far from uniform, so that smoothing costs something
    assert "own loss is another" in str(fuse_loss(model).verdict)


def test_remove_leaves_no_trace_and_a_second_one_replaces_the_first() -> None:
    model = _model()
    before = dict(model.__dict__)
    batch = _batch()
    own = model(**batch).loss.item()
    fuse_loss(model, z_loss_weight=0.5)
    fused = fuse_loss(model, z_loss_weight=0.0)
    assert model(**batch).loss.item() == pytest.approx(own, rel=1e-6)
    assert model(input_ids=batch["input_ids"]).logits.shape == (2, 24, 256)  # without labels it is the model's own
    fused.remove()
    assert type(model.lm_head) is nn.Linear
    assert model.__dict__ == before
    assert model(**batch).logits.shape == (2, 24, 256)


def test_saved_and_copied_models_are_whole(tmp_path: Path) -> None:
    model = _model()
    fuse_loss(model, z_loss_weight=1e-2)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock.lm_head) is nn.Linear
    assert stock.config.architectures == ["LlamaForCausalLM"]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    batch = _batch()
    assert model(**batch).cross_entropy.item() / 42 == pytest.approx(torch.tensor(256.0).log().item())
    copied.eval()
    assert copied(**batch).loss.item() == pytest.approx(stock(**batch).loss.item(), rel=1e-6)


def test_z_loss_is_no_part_of_evaluation_and_weight_zero_changes_nothing() -> None:
    batch, losses = _batch(), {}
    for weight in (0.0, 0.3):
        model = _model()
        fuse_loss(model, z_loss_weight=weight)
        for train in (True, False):
            losses[weight, train] = model.train(train)(**batch)
    assert losses[0.3, False].loss.item() == losses[0.0, False].loss.item() == losses[0.0, True].loss.item()
    both = losses[0.3, True]
    expected = (both.cross_entropy + 0.3 * both.z_square) / both.target_tokens
    assert both.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert both.loss.item() > losses[0.3, False].loss.item() + 0.1


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = _model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _agrees(model, fuse_loss(model, z_loss_weight=1e-2))


@pytest.mark.parametrize("frozen", ["head", "trunk"])
def test_frozen_parts(frozen: str) -> None:
    model = _model()
    (model.lm_head if frozen == "head" else model.model).requires_grad_(False)
    _agrees(model, fuse_loss(model, z_loss_weight=1e-2))


def test_compiled() -> None:
    model = _model()
    fused = FusedLoss(model, z_loss_weight=1e-2)
    compiled = torch.compile(model, backend="aot_eager")
    assert fused.verify(compiled).path == "fused"
    batch = _batch()
    model.train()
    compiled(**batch).loss.backward()
    made = _gradients(model)
    model(**batch).loss.backward()
    assert relative(made, _gradients(model)) < 1e-6


def test_half_precision_models_are_verified_in_float32() -> None:
    model = _model().bfloat16()
    fused = fuse_loss(model, z_loss_weight=1e-2)
    assert fused.verdict.path == "fused"
    assert fused.verdict.difference < 1e-5
    model(**_batch()).loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = _model()
        assert fuse_loss(mixed).verdict.path == "fused"
        output = mixed(**_batch())
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    assert mixed.lm_head.weight.grad.dtype == torch.float32


def test_router_loss_weighs_the_same_however_a_batch_is_cut() -> None:
    """Its balancing loss is not a sum over rows, so cutting changes it; its weight per token must not change."""
    model = _model("mixtral", output_router_logits=True)
    fuse_loss(model, z_loss_weight=0.0)
    batch, total = _batch(rows=4), 4 * 23 - 4
    parts = [{name: tensor[start : start + 2] for name, tensor in batch.items()} for start in (0, 2)]
    outputs = [model(**part, num_items_in_batch=total) for part in parts]
    for part, output in zip(parts, outputs, strict=True):
        plain = model(input_ids=part["input_ids"], output_router_logits=True)
        assert output.router.item() == pytest.approx(
            float(model.config.router_aux_loss_coef * plain.aux_loss * output.target_tokens), rel=1e-5
        )
    whole = sum(float((output.cross_entropy + output.router) / total) for output in outputs)
    assert sum(output.loss.item() for output in outputs) == pytest.approx(whole, rel=1e-6)


def test_a_stock_trainer_is_token_exact_under_accumulation(tmp_path: Path) -> None:
    """One batch of four rows and four batches of one row give the same update, rows with few labels included."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(index))
            labels = ids.clone()
            labels[: 5 * index + 1] = IGNORE_INDEX
            return {"input_ids": ids, "labels": labels}

    trained = []
    for rows, accumulation in ((4, 1), (1, 4)):
        model = _model()
        fuse_loss(model, z_loss_weight=1e-2)
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        trained.append((model.state_dict(), trainer.evaluate()["eval_loss"]))
    (whole, whole_loss), (cut, cut_loss) = trained
    assert all(torch.allclose(whole[name], cut[name], atol=1e-5) for name in whole)
    assert any(not torch.equal(whole[name], value) for name, value in _model().state_dict().items())
    assert whole_loss == pytest.approx(cut_loss, rel=1e-4)


def test_every_family_of_the_table_is_there() -> None:
    """At least 25 families, and the file in docs speaks of all of them."""
    table = (Path(__file__).parents[1] / "docs" / "loss_architectures.md").read_text()
    names = {name for family in FAMILIES.values() for name in family}
    assert len(names) >= 25
    assert all(f"| {name} | fused |" in table for name in names)

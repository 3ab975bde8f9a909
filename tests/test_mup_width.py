"""All widths together, and nothing else: head dimension, ranks, depth, vocabulary and experts stay."""

from fractions import Fraction

import pytest
from transformers import CONFIG_MAPPING

from hfpretrain.errors import ConfigError
from hfpretrain.mup.width import hidden_size, scale_width


def changed(config, ratio):
    before, after = config.to_dict(), scale_width(config, ratio).to_dict()
    return {name: value for name, value in after.items() if before[name] != value}


def test_llama_by_hand():
    config = CONFIG_MAPPING["llama"](
        hidden_size=768, num_attention_heads=12, num_key_value_heads=4, intermediate_size=3072
    )
    assert config.head_dim == 64
    assert changed(config, Fraction(1, 4)) == {
        "hidden_size": 192,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 768,
    }


def test_one_key_value_head_stays_one():
    config = CONFIG_MAPPING["llama"](
        hidden_size=64, num_attention_heads=4, num_key_value_heads=1, intermediate_size=128
    )
    assert changed(config, 2) == {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}


def test_experts_and_low_ranks_stay():
    config = CONFIG_MAPPING["deepseek_v3"](hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    assert set(changed(config, 2)) == {
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
    }


def test_a_step_rank_that_follows_the_width_does_so_and_another_stays():
    automatic = CONFIG_MAPPING["mamba"](hidden_size=64)
    assert automatic.time_step_rank == 4
    assert changed(automatic, 2)["time_step_rank"] == 8
    assert "time_step_rank" not in changed(CONFIG_MAPPING["mamba"](hidden_size=64, time_step_rank=7), 2)


def test_only_the_text_part_of_a_composite_model():
    config = CONFIG_MAPPING["gemma3"]()
    scaled = scale_width(config, 2)
    assert scaled.text_config.hidden_size == 2 * config.text_config.hidden_size
    assert scaled.vision_config.to_dict() == config.vision_config.to_dict()


def test_parts_of_the_text_model_are_scaled_and_models_beside_it_are_not():
    """DBRX keeps the sizes of its layers in sub-configurations, GIT an image encoder."""
    scaled = scale_width(CONFIG_MAPPING["dbrx"](d_model=64, n_heads=4, ffn_config={"ffn_hidden_size": 96}), 2)
    assert (scaled.d_model, scaled.n_heads, scaled.ffn_config.ffn_hidden_size) == (128, 8, 192)
    assert scaled.attn_config.kv_n_heads == 1
    config = CONFIG_MAPPING["git"](hidden_size=64, num_attention_heads=4, intermediate_size=96)
    scaled = scale_width(config, 2)
    assert (scaled.hidden_size, scaled.intermediate_size) == (128, 192)
    assert scaled.vision_config.to_dict() == config.vision_config.to_dict()


def test_mamba_heads_by_either_name():
    small = CONFIG_MAPPING["mamba2"](hidden_size=64, num_heads=8, head_dim=16)
    assert scale_width(small, 2).num_heads == 16
    small = CONFIG_MAPPING["zamba2"](hidden_size=64, n_mamba_heads=8, num_attention_heads=4, num_key_value_heads=4)
    assert scale_width(small, 2).n_mamba_heads == 16


def test_a_model_of_several_widths_is_refused():
    with pytest.raises(ConfigError, match="BltConfig has no hidden_size"):
        scale_width(CONFIG_MAPPING["blt"](), 2)


def test_an_encoder_decoder_whose_text_configuration_is_a_copy():
    config = CONFIG_MAPPING["bart"](
        d_model=64, decoder_attention_heads=4, decoder_ffn_dim=128, is_encoder_decoder=False
    )
    scaled = scale_width(config, 2)
    assert (hidden_size(scaled), scaled.decoder_ffn_dim, scaled.decoder_attention_heads) == (128, 256, 8)


def test_widths_that_are_no_whole_numbers_are_all_named():
    config = CONFIG_MAPPING["llama"](
        hidden_size=96, num_attention_heads=6, num_key_value_heads=6, intermediate_size=256
    )
    with pytest.raises(ConfigError) as refused:
        scale_width(config, Fraction(40, 96))
    text = str(refused.value)
    assert "num_attention_heads=6 * 5/12" in text
    assert "intermediate_size=256 * 5/12" in text
    assert "a multiple of 48; or name the base sizes" in text
    assert changed(config, Fraction(48, 96))["intermediate_size"] == 128

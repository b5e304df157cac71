"""The configuration of an encoder with a decoder: where a caller's fields go, what is refused, and what is saved."""

import copy
import json
import logging

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
)

from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForConditionalGeneration, NLQSeq2SeqConfig
from modeling_nlq.training.loading import load_config


HALF = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
HALF |= {"max_position_embeddings": 32}
HALVES = {"encoder": HALF, "decoder": {**HALF, "num_hidden_layers": 2, "max_position_embeddings": 24}}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    NLQForConditionalGeneration(NLQSeq2SeqConfig(**HALVES, **TOKENS)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    NLQForCausalLM(NLQConfig(**HALF)).save_pretrained(folder)
    return folder


WAYS = {
    "constructor": lambda folder, **given: NLQSeq2SeqConfig(**{**HALVES, **given}),
    "for_model": lambda folder, **given: AutoConfig.for_model("nlq_seq2seq", **{**HALVES, **given}),
    "from_pretrained": AutoConfig.from_pretrained,
    "model": lambda folder, **given: AutoModelForSeq2SeqLM.from_pretrained(folder, **given).config,
    "load_config": lambda folder, **given: load_config(str(folder), given),
}
LOADING = {name: WAYS[name] for name in ("from_pretrained", "model", "load_config")}


@pytest.mark.parametrize("way", WAYS)
def test_a_field_of_the_halves_reaches_both(way, saved):
    given = {
        "attention_activation": "sigmoid",
        "use_cache": False,
        "per_layer_config": {0: {"attention_activation": "relu"}},
    }
    config = WAYS[way](saved, **given)
    for half in (config.encoder, config.decoder):
        assert [layer.attention_activation for layer in half.per_layer_config][:2] == ["relu", "sigmoid"]
        assert half.use_cache is False
    assert not {*given} & {*vars(config)}


@pytest.mark.parametrize("way", LOADING)
def test_a_field_of_one_half_leaves_the_others_as_saved(way, saved):
    config = LOADING[way](saved, encoder={"residual_dropout": 0.5}, residual_dropout=0.25)
    assert (config.encoder.residual_dropout, config.decoder.residual_dropout) == (0.5, 0.25)
    assert (config.encoder.num_hidden_layers, config.decoder.num_hidden_layers) == (3, 2)


OUTPUT_SETTINGS = [{}, {"output_hidden_states": True}, {"output_attentions": True}, {"use_cache": False}]


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("setting", OUTPUT_SETTINGS)
def test_outputs_are_those_of_bart(setting, given, saved):
    """BART's halves share one configuration. Arguments of a call go before it."""
    sizes = {"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=16, **sizes, attn_implementation="eager"))
    loaded = AutoModelForSeq2SeqLM.from_pretrained(saved, attn_implementation="eager")
    for model in (bart, loaded):
        for name, value in setting.items():
            setattr(model.config, name, value)
    ids, arguments = torch.arange(3, 8)[None], {} if given is None else dict.fromkeys(setting, given)
    returned = [
        {name: len(value) if isinstance(value, tuple) else None for name, value in outputs.items()}
        for outputs in (model.eval()(input_ids=ids, decoder_input_ids=ids, **arguments) for model in (bart, loaded))
    ]
    assert returned[0] == returned[1]


def test_outputs_of_one_half(saved):
    model = AutoModelForSeq2SeqLM.from_pretrained(saved, encoder={"output_hidden_states": True}).eval()
    outputs = model(input_ids=torch.arange(3, 8)[None], decoder_input_ids=torch.arange(3, 8)[None])
    assert len(outputs.encoder_hidden_states) == 4 and outputs.decoder_hidden_states is None


def test_a_whole_half_and_a_width():
    half = NLQConfig(**HALF, is_causal=False, qk_norm="rms")
    config = NLQSeq2SeqConfig(encoder=half, decoder=HALF, layer_norm_eps=1e-3)
    assert config.encoder.qk_norm == "rms" and config.encoder.layer_norm_eps == config.decoder.layer_norm_eps == 1e-3
    wider = load_config("tiny-seq2seq", {"hidden_size": 64})
    assert wider.encoder.hidden_size == wider.decoder.cross_attention_hidden_size == wider.hidden_size == 64
    wider = NLQSeq2SeqConfig.from_dict(wider.to_dict(), hidden_size=32, head_dim=8)
    assert wider.decoder.cross_attention_hidden_size == 32


@pytest.mark.parametrize(
    "given, message",
    [
        ({"atention_activation": "relu"}, "did you mean 'attention_activation'"),
        ({"decoder": {"query_projections": "linear"}}, "NLQConfig has no field 'query_projections'; did you mean"),
        ({"num_layers": 1}, "num_layers=1 cannot be set; set num_hidden_layers"),
        ({"is_causal": True}, "is_causal=True is fixed by the half"),
        ({"add_cross_attention": False}, "add_cross_attention=False is fixed"),
        ({"cross_attention_hidden_size": 16}, "cross_attention_hidden_size=16 is fixed"),
        ({"encoder": {"is_causal": True}}, "encoder: is_causal=True must be False, or left out"),
        ({"decoder": {"add_cross_attention": False}}, "decoder: add_cross_attention=False must be True"),
        ({"decoder": {"cross_attention_hidden_size": 8}}, "cross_attention_hidden_size=8 must be 16, or left out"),
        ({"encoder": {**HALF, "vocab_size": 20}}, r"vocab_size of encoder and decoder, \[20, 64\], must be equal"),
    ],
)
@pytest.mark.parametrize("way", ["constructor", "from_pretrained", "model"])
def test_fields_are_refused_by_name(way, given, message, saved):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        WAYS[way](saved, **given)


def test_a_decoder_refuses_misspelt_fields_while_loading(saved_decoder):
    for auto_class in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="NLQConfig has no field 'atention_activation'; did you mean"):
            auto_class.from_pretrained(saved_decoder, atention_activation="sigmoid")
    given = {"use_bias": True, "sep_token_id": 3, "device_map": "cpu"}
    config, left = AutoConfig.from_pretrained(saved_decoder, **given, return_unused_kwargs=True)
    assert config.use_bias and left.keys() <= {"device_map", "sep_token_id"}


def test_files_saved_before(saved, tmp_path, caplog, monkeypatch):
    """Fields beside the halves were kept, and nothing read them: that stays, and is said."""
    settings = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "residual_dropout": 0.5, "colour": "blue"}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.encoder.residual_dropout == config.decoder.residual_dropout == 0.0
    assert "'residual_dropout'" in caplog.text and "'colour'" in caplog.text


def test_saved_and_loaded_again(saved, tmp_path):
    config, left = AutoConfig.from_pretrained(
        saved, attn_implementation="eager", dtype=torch.bfloat16, trust_remote_code=False, return_unused_kwargs=True
    )
    assert (
        config.dtype == torch.bfloat16 and config.decoder._attn_implementation == "eager" and not {"dtype"} & {*left}
    )
    config = AutoConfig.from_pretrained(saved)
    config.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (saved / "config.json").read_text()
    names = {
        "hidden_size",
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "num_layers",
        "num_hidden_layers",
    }
    assert not names & {*config.to_diff_dict()}
    settings = config.to_dict()
    for again in (copy.deepcopy(config), NLQSeq2SeqConfig(**settings), NLQSeq2SeqConfig.from_dict(settings)):
        assert again.to_diff_dict() == config.to_diff_dict()

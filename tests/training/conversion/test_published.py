"""Configurations published on the Hub: every field is read, and the number of parameters is right."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.family_cases import comparable
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_nlq.training.conversion.draft import nearest_in_family
from modeling_nlq.training.conversion.families import FAMILIES
from modeling_nlq.training.conversion.upcycling import only_adds
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.size import measure


# Name -> the number of parameters, and config.json without what names classes and versions, and lists that its class
# makes itself
PUBLISHED = {
    name: (row["parameters"], row["config"])
    for name, row in json.loads(Path(__file__).with_name("published.json").read_text()).items()
}


@pytest.mark.parametrize("parameters, values", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configuration(parameters, values, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(tmp_path)
    family = FAMILIES[config.model_type]
    assert family.not_read(config) == []
    ours = family.read(config)
    assert measure(ours).total == parameters
    assert ours.eos_token_id == values["eos_token_id"]

    back, plain = nearest_in_family(config.model_type, ours)
    assert only_adds(ours, plain), "a conversion back needs no other numbers"
    extra = {"is_llama_config", "rope_interleaved", "pretraining_tp", "use_mrope", "n_ctx", "task_specific_params"}
    extra |= {"clf_pooling", *(f"{kind}_token" for kind in ("bos", "eos", "mask", "pad"))}
    extra |= {"auto_map", "hidden_dropout", "mlp_bias"} - {field.name for field in dataclasses.fields(config)}
    ours, theirs = (
        {name: each[name] for name in each.keys() - extra} for each in (comparable(back), comparable(config))
    )
    assert ours == theirs


# Name of a shape in `configuration/models` -> the published model
SHIPPED = {
    "llama-160m": "llama-160m",
    "smollm2-135m": "SmolLM2-135M",
    "qwen3-0.6b": "Qwen3-0.6B",
    "pythia-160m": "pythia-160m",
    "olmo2-1b": "OLMo-2-0425-1B",
}


@pytest.mark.parametrize("name, original", SHIPPED.items(), ids=SHIPPED)
def test_shipped_shape_is_that_of_the_original(name, original):
    values = PUBLISHED[original][1]
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert measure(load_config(name)).total == parameters == PUBLISHED[original][0]
    # A recipe sets the token ids, and all shapes have a cache
    free = {"architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "use_cache"}
    parts = ("query_key_value", "attention_output", "mlp")
    ours, theirs = (
        {**each.to_dict(), **{f"{part}_bias": each.has_bias(part) for part in parts}}
        for each in (load_config(name), FAMILIES[config.model_type].read(config))
    )
    assert {key: ours[key] for key in ours.keys() - free} == {key: theirs[key] for key in ours.keys() - free}


@pytest.mark.parametrize("name", ["tiny-llama", *SHIPPED])
def test_variant_has_as_many_parameters(name):
    query = "bottleneck" if name.startswith("qwen3") else "nonlinear"  # its queries are wider than `hidden_size`
    ours, variant = load_config(name), load_config(f"{name}-{query}")
    assert variant.query_projection == query
    free = {"query_projection", "projection_bottleneck_size"}
    assert {key for key, value in variant.to_dict().items() if value != ours.to_dict()[key]} <= free
    assert measure(variant).non_embedding == pytest.approx(
        measure(ours).non_embedding, rel=2e-3 if "tiny" in name else 5e-4
    )

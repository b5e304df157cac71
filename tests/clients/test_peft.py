"""PEFT: adapters by the names of docs/adapters.md are trained, saved, loaded and merged, and hold what they should."""

import copy
import re

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSeq2SeqLM,
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors.torch import load_file
from support.client_cases import CASES, IDS, SIZES, fit, load, logits, run_script, small_model
from support.paths import REPOSITORY
from transformers import GPT2Config

from modeling_nlq import PROJECTIONS, NLQConfig, NLQForCausalLM, NLQForConditionalGeneration, NLQSeq2SeqConfig
from modeling_nlq.training import convert


ADAPTERS = (REPOSITORY / "docs" / "adapters.md").read_text()
# The matrices of one layer that every model has, besides those of the query
COMMON = {"self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"}
LORA = {"task_type": "CAUSAL_LM", "lora_alpha": 16}
MANY_NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
# Logits are of the order of ten, and a merge rounds the sum of two matrices
MERGED = {"atol": 2e-5, "rtol": 0}


def adapted_layers(model) -> set[str]:
    return {name.split("layers.0.")[1] for name in model.base_model.targeted_module_names if "layers.0." in name}


def check_round_trip(folder, config, tmp_path):
    model = load(folder)
    frozen = model.state_dict()
    model = get_peft_model(model, config).eval()
    fit(model)
    after = logits(model)
    assert (after - logits(load(folder))).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")

    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), after, atol=0, rtol=0)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(load(folder)), atol=0, rtol=0)
    merged = model.merge_and_unload()
    assert type(merged) is NLQForCausalLM and merged.state_dict().keys() == frozen.keys()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged")), after, **MERGED)
    return model


def documented_names() -> dict[str, set[str]]:
    """The table of docs/adapters.md: linear layers of each query projection."""
    table = {}
    for kinds, layers in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (none|`[qf].*`) \|$", ADAPTERS, flags=re.MULTILINE):
        layers = {f"self_attn.{name}" for name in re.findall(r"`(.*?)`", layers)}
        table |= dict.fromkeys(re.findall(r"`(\w+)`", kinds), layers)
    return table


@pytest.mark.parametrize("query", PROJECTIONS)
def test_documented_names_adapt_their_layers(query):
    assert documented_names().keys() == PROJECTIONS.keys()
    of_query = documented_names()[query]

    def adapted(target_modules):
        config = NLQConfig(**SIZES, query_projection=query, attention_gate="headwise")
        model = get_peft_model(NLQForCausalLM(config), LoraConfig(target_modules=target_modules, **LORA))
        return adapted_layers(model)

    every = COMMON | of_query
    assert adapted("all-linear") == every | {"self_attn.gate_proj"}
    assert adapted(MANY_NAMES) == every
    assert adapted(["q_proj", "v_proj"]) == {"self_attn.q_proj", "self_attn.v_proj"} & every
    assert adapted(["mlp.fc1"]) == {"mlp.fc1"}
    if "self_attn.q_proj" not in every:
        with pytest.raises(ValueError, match=r"Target modules \{'q_proj'\} not found"):
            adapted(["q_proj"])


@pytest.mark.parametrize("activation, query", CASES)
def test_an_adapter_of_all_layers_is_saved_and_loaded(activation, query, trained, tmp_path):
    check_round_trip(trained(activation, query), LoraConfig(target_modules="all-linear", **LORA), tmp_path)


def test_adapters_of_other_kinds_hold_what_they_should(trained, tmp_path):
    folder = trained("sigmoid", "nonlinear", head_projection=True)
    lora = LoraConfig(target_modules="all-linear", target_parameters=["head_proj.weight"], **LORA)
    model = check_round_trip(folder, lora, tmp_path / "lora")
    assert len(model.base_model.targeted_parameter_names) == SIZES["num_hidden_layers"]
    model = check_round_trip(trained("sigmoid", "nonlinear"), IA3Config(task_type="CAUSAL_LM"), tmp_path / "ia3")
    assert adapted_layers(model) == {"self_attn.k_proj", "self_attn.v_proj", "mlp.fc2"}


REMOTE = """
import sys
import torch
from peft import AutoPeftModelForCausalLM

root, *names = sys.argv[1:]
ids, results = torch.load(f"{root}/ids.pt"), []
for name in names:
    model = AutoPeftModelForCausalLM.from_pretrained(f"{root}/{name}", trust_remote_code=True)
    assert type(model.base_model.model).__module__.startswith("transformers_modules")
    with torch.no_grad():
        results.append(model(input_ids=ids).logits)
    model.merge_and_unload().save_pretrained(f"{root}/merged-{name}")
torch.save(results, f"{root}/logits.pt")
"""


def test_adapters_load_and_merge_by_remote_code(trained, tmp_path):
    expected = {}
    for case in CASES:
        lora = LoraConfig(target_modules="all-linear", init_lora_weights=False, **LORA)
        model = get_peft_model(load(trained(*case)), lora).eval()
        model.save_pretrained(tmp_path / case[0])
        expected[case[0]] = logits(model)
    torch.save(IDS, tmp_path / "ids.pt")
    run_script(REMOTE, tmp_path, *expected, package=False)
    for result, (name, reference) in zip(torch.load(tmp_path / "logits.pt"), expected.items(), strict=True):
        # The package's kernels may have computed the reference
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(load(tmp_path / f"merged-{name}")), reference, **MERGED)


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    root = tmp_path_factory.mktemp("conversions")
    convert(small_model(root / "source", GPT2Config), root / "gpt2")
    for name in ("upcycled", "fresh"):
        convert(root / "gpt2", root / name, upcycle=True)
    return root


def only_f() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules=DUMMY_TARGET_MODULES, modules_to_save=["q_bottleneck"])


def test_an_adapter_of_f_alone_fits_any_conversion_of_the_source(conversions, tmp_path):
    torch.manual_seed(1)
    model = get_peft_model(load(conversions / "upcycled"), only_f())
    frozen = logits(model)
    fit(model, steps=8)
    after = logits(model)
    model.save_pretrained(tmp_path)

    saved = load_file(tmp_path / "adapter_model.safetensors")
    f = {name: value for name, value in load(conversions / "fresh").state_dict().items() if "q_bottleneck" in name}
    assert {name.removeprefix("base_model.model.") for name in saved} == f.keys()
    assert sum(value.numel() for value in saved.values()) == sum(value.numel() for value in f.values())

    fresh = load(conversions / "fresh")
    first = "model.layers.0.self_attn.q_bottleneck.fc1.weight"
    assert not torch.equal(fresh.state_dict()[first], load(conversions / "upcycled").state_dict()[first])
    torch.testing.assert_close(logits(fresh), frozen, atol=0, rtol=0)
    adapted = PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(logits(adapted), after, atol=0, rtol=0)
    assert not torch.equal(after, frozen)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), after, atol=0, rtol=0)


def test_scripts_of_the_page_run(conversions, trained, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(trained("sigmoid", "nonlinear"))
    for name in ("gpt2", "upcycled"):
        (tmp_path / "runs" / name).symlink_to(conversions / name)
    monkeypatch.chdir(tmp_path)
    training, only_f, other_side = re.findall(r"```python\n(.*?)```", ADAPTERS, flags=re.DOTALL)
    names = {}
    exec(compile(training, "adapters.md", "exec"), names)
    after = logits(names["model"].eval())
    torch.testing.assert_close(logits(load("runs/merged")), after, **MERGED)
    assert not torch.allclose(after, logits(load("runs/demo")), atol=1e-4)
    exec(compile(only_f, "adapters.md", "exec"), names)
    assert any(value.grad is not None for value in names["model"].parameters())
    after = logits(names["model"].eval())
    exec(compile(other_side, "adapters.md", "exec"), names)
    torch.testing.assert_close(logits(names["model"]), after, atol=0, rtol=0)


def test_queries_and_values_are_adapted_by_default(trained, pair_folder):
    """As in a Llama; in cross-attention too."""
    for query, layers in (("linear", {"q_proj"}), ("nonlinear", {"q_bottleneck.fc1", "q_bottleneck.fc2"})):
        model = get_peft_model(load(trained("sigmoid", query)), LoraConfig(**LORA))
        assert adapted_layers(model) == {f"self_attn.{name}" for name in (*layers, "v_proj")}
    model = get_peft_model(load_pair(pair_folder), LoraConfig(task_type="SEQ_2_SEQ_LM"))
    names = {
        name.split("layers.0.")[1] for name in model.base_model.targeted_module_names if "decoder.layers.0." in name
    }
    layers = ("q_bottleneck.fc1", "q_bottleneck.fc2", "v_proj")
    assert names == {f"{attention}.{name}" for attention in ("self_attn", "cross_attn") for name in layers}


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    """An encoder with a decoder that has fewer heads of keys and values, and cross-attention by another activation."""
    decoder = {**SIZES, "num_key_value_heads": 1, "cross_attention": {"attention_activation": "sigmoid"}}
    config = NLQSeq2SeqConfig(encoder=SIZES, decoder=decoder, decoder_start_token_id=0, pad_token_id=0)
    torch.manual_seed(0)
    NLQForConditionalGeneration(config).save_pretrained(folder := tmp_path_factory.mktemp("pair"))
    return folder


def load_pair(folder):
    return NLQForConditionalGeneration.from_pretrained(folder)


@torch.no_grad()
def pair_logits(model):
    return model(input_ids=IDS, labels=IDS).logits


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(task_type="SEQ_2_SEQ_LM", lora_alpha=16),
        PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM"),
        PrefixTuningConfig(num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM"),
        PromptEncoderConfig(num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM"),
        LoraConfig(modules_to_save=["lm_head"]),
        LoraConfig(modules_to_save=["embed_tokens"]),
        LoraConfig(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        LoraConfig(trainable_token_indices={"embed_tokens": [3, 4]}),
        TrainableTokensConfig(token_indices=[3, 4]),
    ],
    ids=lambda config: f"{type(config).__name__} {getattr(config, 'modules_to_save', None)}",
)
def test_adapters_of_a_pair_compute_the_same_once_loaded_or_merged(config, pair_folder, tmp_path):
    model = get_peft_model(load_pair(pair_folder), copy.deepcopy(config))
    fit(model)
    before, after = pair_logits(load_pair(pair_folder)), pair_logits(model)
    assert after.shape != before.shape or (after - before).abs().max() > 1e-4
    model.save_pretrained(tmp_path / "adapter")
    if config.task_type:
        loaded = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")
    else:
        loaded = PeftModel.from_pretrained(load_pair(pair_folder), tmp_path / "adapter")
    torch.testing.assert_close(pair_logits(loaded.eval()), after, atol=0, rtol=0)
    if not config.is_prompt_learning:
        assert loaded.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).shape[0] == len(IDS)
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(pair_logits(load_pair(tmp_path / "merged")), after, **MERGED)

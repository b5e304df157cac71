"""PEFT: adapters by the names of docs/adapters.md are trained, saved, loaded and merged, and hold what they should."""

import functools
import re

import peft
import pytest
import torch
from packaging.version import Version
from peft import (
    AdaLoraConfig,
    AutoPeftModelForCausalLM,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors.torch import load_file
from support.client_cases import ALL_CASES, CASES, IDS, SIZES, fit, greedy, load, logits, run_script, small_model
from support.paths import REPOSITORY
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from modeling_nlq import PROJECTIONS, NLQConfig, NLQForCausalLM
from modeling_nlq.integrations_nlq import CACHE_NAME
from modeling_nlq.training import convert


# PEFT hands a cache of its own to `generate`, by the name that it knows, and Transformers checks the version of PEFT
needs_matching_peft = pytest.mark.skipif(
    CACHE_NAME == "cache" and Version(peft.__version__) < Version("0.22"),
    reason="Transformers 5.24 and later need PEFT 0.22 or later for this",
)
ADAPTERS = (REPOSITORY / "docs" / "adapters.md").read_text()
# The matrices of one layer that every model has, besides those of the query
COMMON = {"self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"}
LORA = {"task_type": "CAUSAL_LM", "lora_alpha": 16}
MANY_NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
# Logits are of the order of ten, and a merge rounds the sum of two matrices
MERGED = {"atol": 2e-5, "rtol": 0}


def adapted_layers(model) -> set[str]:
    """The names of the adapted modules within layer 0."""
    return {name.split("layers.0.")[1] for name in model.base_model.targeted_module_names if "layers.0." in name}


def check_round_trip(folder, config, tmp_path, merge=True):
    """Trains an adapter, and compares it with itself after loading and after merging."""
    model = load(folder)
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    model = get_peft_model(model, config).eval()
    fit(model)
    after = logits(model)
    assert (after - logits(load(folder))).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")

    torch.testing.assert_close(logits(PeftModel.from_pretrained(load(folder), tmp_path / "adapter")), after, atol=0, rtol=0)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), after, atol=0, rtol=0)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(load(folder)), atol=0, rtol=0)
    if merge:
        model.merge_adapter()
        torch.testing.assert_close(logits(model), after, **MERGED)
        model.unmerge_adapter()
        torch.testing.assert_close(logits(model), after, **MERGED)
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
def test_names(query):
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


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], "all-linear"], ids=["two_names", "all_linear"])
@pytest.mark.parametrize("activation, query", [*ALL_CASES, *(("sigmoid", q) for q in ("identity", "residual", "bottleneck"))])
def test_lora(activation, query, target_modules, trained, tmp_path):
    check_round_trip(trained(activation, query), LoraConfig(target_modules=target_modules, **LORA), tmp_path)


@pytest.mark.parametrize("target_modules", [None, "all-linear"], ids=["alone", "beside_layers"])
def test_head_projection(target_modules, trained, tmp_path):
    folder = trained("sigmoid", "nonlinear", head_projection=True)
    config = LoraConfig(target_modules=target_modules, target_parameters=["head_proj.weight"], **LORA)
    model = check_round_trip(folder, config, tmp_path)
    assert len(model.base_model.targeted_parameter_names) == SIZES["num_hidden_layers"]


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules="all-linear", use_dora=True, **LORA),
        LoraConfig(target_modules="all-linear", use_rslora=True, **LORA),
        LoraConfig(target_modules="all-linear", bias="lora_only", **LORA),
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"]),
        LNTuningConfig(task_type="CAUSAL_LM", target_modules=["self_attn_norm", "mlp_norm", "norm"]),
    ],
    ids=["dora", "rslora", "biases", "ia3", "norms"],
)
@pytest.mark.parametrize("activation, query", CASES[-1:] + CASES[:1])
def test_other_tuners(activation, query, config, trained, tmp_path):
    # With trained biases the model without its adapter is another one, and PEFT warns
    if getattr(config, "bias", "none") != "none":
        model = get_peft_model(load(trained(activation, query)), config)
        fit(model)
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(load(trained(activation, query)), tmp_path)
        torch.testing.assert_close(logits(again), logits(model), atol=0, rtol=0)
    else:
        check_round_trip(trained(activation, query), config, tmp_path)


def decoded(model, prompts, new_tokens):
    """What `generate` appends to a batch of prompts of different lengths."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts]).long()
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return out[:, longest:].tolist()


@needs_matching_peft
@pytest.mark.parametrize("activation, query", CASES)
def test_prompt_tuning_is_exact(activation, query, trained, tmp_path):
    """Virtual tokens that are the embeddings of four tokens give what these tokens in the text give."""
    folder = trained(activation, query)
    model = get_peft_model(load(folder), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    base, ids = load(folder), IDS[0]
    with torch.no_grad():
        model.prompt_encoder["default"].embedding.weight.copy_(base.get_input_embeddings()(ids[:4]))
    torch.testing.assert_close(logits(model, ids[None, 4:]), logits(base, ids[None]))
    assert decoded(model, [ids[4:9], ids[4:]], 6) == [greedy(base, ids[:9], 6), greedy(base, ids, 6)]
    fit(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path)), logits(model))


@needs_matching_peft
@pytest.mark.parametrize(
    "activation, query, switches",
    [*((*case, {}) for case in CASES[:3]), ("sigmoid", "linear", {"num_key_value_heads": 2})],
)
def test_prefix_tuning_is_exact(activation, query, switches, trained, tmp_path):
    """A prefix that is the keys and values of four tokens gives what these tokens in the text give."""
    folder = trained(activation, query, **switches)
    model = get_peft_model(load(folder), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    base, ids = load(folder), IDS[0]
    with torch.no_grad():
        cache = base(ids[None, :4], use_cache=True).past_key_values
        prefix = torch.cat([torch.cat([layer.keys, layer.values]) for layer in cache.layers])  # (2 layers, heads, 4, head_dim)
        model.prompt_encoder["default"].embedding.weight.copy_(prefix.permute(2, 0, 1, 3).flatten(1))
    torch.testing.assert_close(logits(model, ids[None, 4:]), logits(base, ids[None])[:, 4:], atol=1e-5, rtol=0)
    assert decoded(model, [ids[4:9], ids[4:]], 6) == [greedy(base, ids[:9], 6), greedy(base, ids, 6)]
    fit(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path)), logits(model))


@needs_matching_peft
def test_prefix_tuning_is_refused(trained):
    """A state is no list of keys, so a prefix of keys cannot begin it; and the prefix is a cache."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    hybrid = {"per_layer_config": {1: {"attention_activation": "linear_attention"}}}
    for activation, switches in (("linear_attention", {}), ("softmax", hybrid)):
        model = get_peft_model(NLQForCausalLM(NLQConfig(**SIZES, attention_activation=activation, **switches)), config)
        for call in (model, model.generate):
            with pytest.raises(
                ValueError, match=r"^attention_activation='linear_attention' \(layer \d\) needs a cache"
            ) as error:
                call(input_ids=IDS)
            assert "\n" not in str(error.value)
    model = get_peft_model(NLQForCausalLM(NLQConfig(**SIZES)), config)
    model.get_base_model().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="past_key_values cannot be used with gradient checkpointing"):
        model.train()(input_ids=IDS)


@pytest.mark.parametrize("activation, query", CASES)
def test_several_adapters(activation, query, trained):
    """One batch whose rows use different adapters, and the base."""
    folder = trained(activation, query)
    model = get_peft_model(load(folder), LoraConfig(target_modules="all-linear", init_lora_weights=False, **LORA))
    model.add_adapter("second", LoraConfig(target_modules=["v_proj"], r=4, init_lora_weights=False, **LORA))
    model.eval()
    expected, tokens = [logits(load(folder))[0]], [greedy(load(folder), IDS[0], 4)]
    for name in ("default", "second"):
        model.set_adapter(name)
        expected.append(logits(model)[0])
        tokens.append(greedy(model, IDS[0], 4))
    rows = {"input_ids": IDS[[0, 0, 0]], "adapter_names": ["__base__", "default", "second"]}
    with torch.no_grad():
        torch.testing.assert_close(model(**rows).logits, torch.stack(expected), atol=1e-5, rtol=0)
    mask = torch.ones(3, 12, dtype=torch.long)
    out = model.generate(**rows, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert out[:, 12:].tolist() == tokens
    assert len({str(row) for row in expected}) == 3


@needs_matching_peft
@pytest.mark.parametrize("activation, query", CASES)
def test_adapters_of_transformers(activation, query, trained, tmp_path):
    """`add_adapter` and `load_adapter`, which Transformers has itself."""
    folder = trained(activation, query)
    model = load(folder)
    model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    after = logits(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = load(folder)
    loaded.load_adapter(tmp_path)
    torch.testing.assert_close(logits(loaded), after, atol=0, rtol=0)
    torch.testing.assert_close(logits(load(tmp_path)), after, atol=0, rtol=0)
    loaded.disable_adapters()
    torch.testing.assert_close(logits(loaded), logits(load(folder)), atol=0, rtol=0)


@pytest.mark.parametrize(
    "settings, tied",
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"trainable_token_indices": [301, 302]}, True),
    ],
    ids=["lm_head", "tied", "new_tokens"],
)
def test_tied_and_resized_embeddings(settings, tied, trained, tmp_path):
    folder, ids = trained("softmax", "upcycled"), IDS.clone()
    ids[:, 3] = 301

    def resized():
        torch.manual_seed(0)
        model = load(folder)
        model.resize_token_embeddings(304)
        return model

    model = get_peft_model(resized(), LoraConfig(target_modules=["v_proj"], **LORA, **settings))
    fit(model, ids)
    after = logits(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(resized(), tmp_path / "adapter"), ids), after)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = load(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded, ids), after, **MERGED)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == loaded.config.tie_word_embeddings == tied


HEADS = {
    AutoModelForSequenceClassification: ("SEQ_CLS", {"labels": torch.tensor([0, 1])}),
    AutoModelForTokenClassification: ("TOKEN_CLS", {"labels": IDS % 2}),
    AutoModelForQuestionAnswering: (
        "QUESTION_ANS",
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    ),
}


@pytest.mark.parametrize("auto_class", HEADS, ids=lambda auto_class: auto_class.__name__)
def test_other_heads(auto_class, trained, tmp_path):
    """PEFT trains and saves the new head beside the adapter."""
    task, targets = HEADS[auto_class]
    folder = trained("sigmoid", "nonlinear")
    model = get_peft_model(auto_class.from_pretrained(folder), LoraConfig(task_type=task, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((value for value in model.parameters() if value.requires_grad), lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, **targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(auto_class.from_pretrained(folder), tmp_path)
    for first, second in zip(loaded.eval()(input_ids=IDS).to_tuple(), model.eval()(input_ids=IDS).to_tuple()):
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second, atol=0, rtol=0)


REMOTE = """
import sys
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

root, *folders = sys.argv[1:]
ids = torch.load(f"{root}/ids.pt")
results = []
for index, folder in enumerate(folders):
    adapter = f"{root}/adapter-{index}"
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, trust_remote_code=True)
    base = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(base).__module__.startswith("transformers_modules")
    by_hand = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits
        assert torch.equal(by_hand(input_ids=ids).logits, logits)
        loaded.merge_and_unload().save_pretrained(f"{root}/merged-{index}")
    results.append(logits)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
torch.save(results, f"{root}/logits.pt")
"""


def test_remote_code(trained, tmp_path):
    folders = [trained(*case) for case in CASES]
    expected = []
    for index, folder in enumerate(folders):
        model = get_peft_model(load(folder), LoraConfig(target_modules="all-linear", init_lora_weights=False, **LORA)).eval()
        model.save_pretrained(tmp_path / f"adapter-{index}")
        expected.append(logits(model))
    torch.save(IDS, tmp_path / "ids.pt")
    run_script(REMOTE, tmp_path, *folders, package=False)
    for index, (result, reference) in enumerate(zip(torch.load(tmp_path / "logits.pt"), expected, strict=True)):
        # The package's kernels may have computed the reference
        torch.testing.assert_close(result, reference, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(load(tmp_path / f"merged-{index}")), reference, **MERGED)


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    """A tiny GPT-2, its conversion, and two upcycled models of the same source; all with a tokenizer."""
    root = tmp_path_factory.mktemp("conversions")
    convert(small_model(root / "source", GPT2Config), root / "gpt2")
    for name in ("upcycled", "fresh"):
        convert(root / "gpt2", root / name, upcycle=True)
    return root


def only_f() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules=DUMMY_TARGET_MODULES, modules_to_save=["q_bottleneck"])


def test_adapter_of_f_alone(conversions, tmp_path):
    """It holds all of `f` and nothing else, and fits any conversion of the same source, bit by bit."""
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


@pytest.mark.parametrize("modules_to_save", [None, ["q_bottleneck.output_norm"]], ids=["frozen_gain", "trained_gain"])
def test_lora_inside_f_needs_its_gain(modules_to_save, conversions):
    """What docs/adapters.md says: the gain of a fresh conversion is 0."""
    config = LoraConfig(target_modules=["q_bottleneck.fc1", "q_bottleneck.fc2"], modules_to_save=modules_to_save, **LORA)
    model = get_peft_model(load(conversions / "fresh"), config)
    before = logits(model)
    fit(model, learns=False)
    assert torch.equal(logits(model), before) == (modules_to_save is None)


def test_documented_sizes():
    """Parameters at the shape of GPT-2."""
    with torch.device("meta"):
        source = GPT2LMHeadModel(GPT2Config())
        config = NLQConfig(
            vocab_size=source.config.vocab_size,
            max_position_embeddings=source.config.n_positions,
            query_projection="upcycled",
            use_bias=True,
        )
        models = {
            "the upcycled model": NLQForCausalLM(config),
            "adapter with all of `f`": get_peft_model(NLQForCausalLM(config), only_f()),
            'LoRA of rank 8, `["q_proj", "v_proj"]`': get_peft_model(
                NLQForCausalLM(config), LoraConfig(target_modules=["q_proj", "v_proj"], r=8)
            ),
            'LoRA of rank 8, `"all-linear"`': get_peft_model(
                NLQForCausalLM(config), LoraConfig(target_modules="all-linear", r=8)
            ),
        }
    for name, model in models.items():
        count = sum(value.numel() for value in model.parameters() if value.requires_grad)
        assert f"| {name} | {count:,} | {4 * count / 1e6:.1f} |" in ADAPTERS


def test_documented_scripts(conversions, trained, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    for name, folder in {
        "demo": trained("sigmoid", "nonlinear"),
        "gpt2": conversions / "gpt2",
        "upcycled": conversions / "upcycled",
    }.items():
        (tmp_path / "runs" / name).symlink_to(folder)
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


@pytest.mark.parametrize(
    "method", [LoraConfig, functools.partial(AdaLoraConfig, total_step=9), LoHaConfig, OFTConfig, VeraConfig]
)
def test_default_targets(trained, method):
    """Without `target_modules`, queries and values are adapted, as in a Llama."""
    bottleneck = {"self_attn.q_bottleneck.fc1", "self_attn.q_bottleneck.fc2"}
    for query, expected in (("linear", {"self_attn.q_proj"}), ("nonlinear", bottleneck)):
        model = get_peft_model(load(trained("sigmoid", query)), method())
        assert adapted_layers(model) == expected | {"self_attn.v_proj"}


@pytest.mark.parametrize("mlp_type, last", [("plain", "mlp.fc2"), ("gated", "mlp.down_proj")])
def test_default_targets_of_ia3(mlp_type, last):
    """Keys and values are scaled, and the input of the MLP's last layer; nothing is missing."""
    model = get_peft_model(NLQForCausalLM(NLQConfig(**SIZES, mlp_type=mlp_type)), IA3Config())
    assert adapted_layers(model) == {"self_attn.k_proj", "self_attn.v_proj", last}
    for name in model.base_model.targeted_module_names:
        assert model.base_model.model.get_submodule(name).is_feedforward == name.endswith(last), name

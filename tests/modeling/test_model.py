"""Behaviour that users of Transformers expect of a model: errors, training, caches, heads."""

from functools import partial

import pytest
import torch
from accelerate.utils import send_to_device
from packaging.version import Version
from support.model_cases import GATED_DELTA, PART_SWITCHES, RICH, random_tokens
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
)


pytestmark = pytest.mark.thin(4)


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {**SIZES, "max_position_embeddings": 32}
RICH_KINDS = {name: {"attention_activation": name, **switches} for name, switches in RICH.items()}
COMPILED = {**RICH_KINDS, **PART_SWITCHES, "delta_gated": GATED_DELTA}


def make(activation="softmax", **switches) -> NLQForCausalLM:
    return NLQForCausalLM(NLQConfig(**{**TINY, "attention_activation": activation, **switches})).eval()


@pytest.fixture
def tokens():
    return torch.randint(50, (2, 11))


class TestSilentSoftmax:
    """No way to choose a backend may turn another activation into softmax."""

    BY_NAME = {
        "sdpa": ({"activation": "relu"}, r"attention_activation='relu' \(layer 0, 1\).*nlq_tiled"),
        "flash_attention_2": ({"activation": "relu"}, r"attention_activation='relu' \(layer 0, 1\).*nlq_tiled"),
        "flash_attention_3": ({"attention_sink": "zero"}, "attention_sink='zero'"),
        "flex_attention": ({"activation": "tanh"}, "attention_activation='tanh'.*nlq_tiled"),
        "nlq_tiled": ({}, "attention_activation='softmax'.*sdpa"),
    }

    @pytest.mark.parametrize("name", BY_NAME)
    def test_a_backend_by_name_is_refused(self, name, tokens):
        """When the model is made or later, or assigned to its configuration; layers that differ are named."""
        switches, refused = self.BY_NAME[name]
        message = rf"'{name}' cannot compute .*{refused}"
        model = make(**switches)
        before = model.config._attn_implementation
        for call in (lambda: make(**switches, attn_implementation=name), lambda: model.set_attn_implementation(name)):
            with pytest.raises(ValueError, match=message):
                call()
        assert model.config._attn_implementation == before
        model.config._attn_implementation = name
        with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match=message.replace("0, 1", "0")):
            model(tokens)
        with pytest.raises(ValueError, match=r"attention_activation='tanh' \(layer 1\)"):
            make(per_layer_config={1: {"attention_activation": "tanh"}}, attn_implementation="sdpa")

    def test_the_automatic_choice_computes_the_activation(self):
        with pytest.raises(ValueError, match='"tiled"` is not supported; use one of nlq, eager, sdpa'):
            make(attn_implementation="tiled")
        assert make().config._attn_implementation == make(attention_sink="zero").config._attn_implementation == "sdpa"
        assert make("tanh").config._attn_implementation == "nlq"
        assert make(per_layer_config={1: {"attention_activation": "tanh"}}).config._attn_implementation == "nlq"


# PyTorch cannot trace the gradients of the package `entmax` (entmax 1.3, torch 2.13): the graph breaks there
@pytest.mark.slow
@pytest.mark.parametrize("name", (*RICH, "forget_gate_of_sigmoid", "all_parts", "delta_gated"))
@pytest.mark.filterwarnings("error:.*lru_cache")
def test_compiles_to_one_graph(name, make_model):
    model, tokens = make_model(implementation="nlq", **COMPILED[name]), random_tokens(2, 6)
    torch.compiler.reset()
    # PyTorch 2.8 cannot trace how Transformers' caches read a configuration, that of Llama either
    use_cache, results = Version(torch.__version__) >= Version("2.9"), []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=name != "entmax15")):
        output = function(tokens, labels=tokens, use_cache=use_cache)
        results.append([output.logits, *torch.autograd.grad(output.loss, list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_outputs_equal_those_of_slices_and_embeddings(tokens):
    model = make("sigmoid")
    full = model(tokens).logits
    assert torch.equal(model(tokens, logits_to_keep=3).logits, full[:, -3:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]])
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, full)
    assert isinstance(model(tokens, return_dict=False), tuple)


def test_gradient_checkpointing_refuses_a_cache(tokens):
    """Backward computes each layer again, and would add its keys a second time. Nothing else is repeated."""
    model = make("sigmoid")
    cache = model(tokens, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="no cache with gradient checkpointing"):
        model(tokens, past_key_values=cache)
    assert model(tokens, use_cache=True).past_key_values is None
    assert model.eval()(tokens, past_key_values=cache).past_key_values.get_seq_length() == 22


@pytest.mark.parametrize("activation", RICH)
def test_an_empty_batch_has_no_loss_and_gradients_of_0(activation, tokens):
    model = make(activation, **RICH[activation])
    outputs = model(tokens[:0], labels=tokens[:0])
    assert outputs.logits.shape == (0, 11, 50) and outputs.loss.isnan()  # the mean of nothing, as PyTorch has it
    model(tokens[:0], labels=tokens[:0], num_items_in_batch=7).loss.backward()
    # None is None, which other processes wait for
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize("model_class", [NLQForCausalLM, type("Derived", (NLQForCausalLM,), {})])
def test_a_stock_trainer_smooths_shifted_labels(model_class, tokens, tmp_path):
    """Trainer shifts the labels of model classes that it knows by name only, and would train others to copy."""
    model = model_class(NLQConfig(**TINY))
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.3, report_to="none", use_cpu=True)
    trainer = Trainer(model, arguments)
    assert trainer._loss_shifts_labels  # or it would count the first token among those predicted
    loss = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.3)
    assert torch.allclose(loss, expected)


def separable_task(count=64):
    """The class of a row is whether token 7 occurs in it."""
    inputs = torch.randint(10, 50, (count, 8))
    labels = torch.arange(count) % 2
    inputs[labels == 1, 3] = 7
    return [{"input_ids": row, "labels": label} for row, label in zip(inputs, labels)]


# Model class, fields of its configuration, and what it predicts for a row of `separable_task`
LABELLED = {
    "causal": (NLQForCausalLM, {}, lambda row: {"labels": row["input_ids"]}),
    "tokens": (
        NLQForTokenClassification,
        {"num_labels": 50, "classifier_dropout": 0.0},
        lambda row: {"labels": row["input_ids"]},
    ),
    "classes": (NLQForSequenceClassification, {}, dict),
    "several_classes": (
        NLQForSequenceClassification,
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        lambda row: {"labels": torch.eye(3)[row["labels"]]},
    ),
    "regression": (NLQForSequenceClassification, {"num_labels": 1}, lambda row: {"labels": row["labels"].float()}),
    "answers": (
        NLQForQuestionAnswering,
        {},
        lambda row: dict.fromkeys(("start_positions", "end_positions"), row["labels"]),
    ),
}


@pytest.mark.parametrize("name", LABELLED)
def test_gradient_accumulation_equals_a_larger_batch(name, tmp_path):
    model_class, options, label = LABELLED[name]
    # The last batch of an epoch, and so its last step, is smaller where batches are: heads without a count cannot know
    data = separable_task(32 if name == "answers" else 30)
    data = [{"input_ids": row["input_ids"], **label(row)} for row in data]
    if name in ("causal", "tokens"):
        for row in data[::3]:  # rows with fewer labels must weigh less
            row["labels"] = row["labels"].clone().index_fill_(0, torch.arange(5), -100)
    settings = {"max_steps": 4, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "report_to": "none"}
    results = []
    for batch_size, accumulation in ((8, 1), (2, 4)) if name == "answers" else ((12, 1), (4, 3)):
        torch.manual_seed(0)
        model = model_class(NLQConfig(**TINY, pad_token_id=0, **options))
        sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments = TrainingArguments(str(tmp_path), **settings, **sizes, save_strategy="no", use_cpu=True)
        Trainer(model, arguments, train_dataset=data).train()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*results, atol=1e-6)


SOFTMAX, LINEAR, SIGMOID = ({"attention_activation": name} for name in ("softmax", "linear_attention", "sigmoid"))
# Layers that differ from the first in what they get beside their input
HYBRIDS = {
    "softmax_and_sigmoid": {**SOFTMAX, "per_layer_config": {1: SIGMOID}},
    "sigmoid_and_softmax": {**SIGMOID, "per_layer_config": {1: SOFTMAX}},
    "linear_and_softmax": {**LINEAR, "per_layer_config": {1: SOFTMAX}},
    "softmax_and_linear": {**SOFTMAX, "per_layer_config": {1: LINEAR}},
    "full_and_window": {"per_layer_config": {1: {"sliding_window": 3}}},
    "window_and_full": {"sliding_window": 3, "per_layer_config": {1: {"sliding_window": None}}},
    "rotary_second": {"position_embedding": "rope", "per_layer_config": {0: {"position_embedding": "none"}}},
    "canon_second": {"per_layer_config": {1: {"canon": "ABCD"}}},
    "forget_gate": {"forget_gate": "learned"},
    "values": {"value_residual": "learned"},
}


@pytest.mark.parametrize("kept", [None, ("attention_mask", "position_embeddings"), ("position_embeddings",)])
@pytest.mark.parametrize("implementation", ["nlq", "eager"])
@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_layers_called_with_the_arguments_of_the_first_equal_the_model(name, implementation, kept, make_model):
    """As layer-wise quantizers do, which keep these arguments, or some of them; other programs copy or move them."""
    tokens, mask, caught = random_tokens(2, 9), None, []
    if kept is None or "attention_mask" in kept:
        mask = torch.ones_like(tokens)
        mask[1, :3] = 0
    model = make_model(implementation=implementation, **HYBRIDS[name])
    layers = model.model.layers
    hook = layers[0].register_forward_pre_hook(lambda _, *arguments: caught.append(arguments), with_kwargs=True)
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    hook.remove()
    for move in (tuple, partial(send_to_device, device="cpu"), partial(_apply_to_tensors, torch.clone)):
        (states, *others), keywords = move(caught[0])
        keywords = {key: value for key, value in keywords.items() if kept is None or key in kept}
        for layer in layers:
            output = layer(states, *others, **keywords)
            if name == "values" and layer is layers[0]:
                with pytest.raises(ValueError, match=r"first_values=None \(layer 1\): give what"):
                    layers[1](output[0], *others, **keywords)
                others = output[1:]
            states = output[0] if isinstance(output, tuple) else output
        found, rows = model.lm_head(model.model.norm(states)), slice(None) if mask is None else mask.bool()
        assert torch.equal(found[rows], expected[rows])


@pytest.mark.parametrize("name", PART_SWITCHES)
def test_forward_on_meta_reads_no_number(name):
    """No number is read, as in programs that estimate memory."""
    with torch.device("meta"):
        model = make(**PART_SWITCHES[name])
        tokens = torch.ones(2, 9, dtype=torch.long)
        assert model(tokens).logits.shape == (2, 9, 50)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "linear_attention"])
@pytest.mark.parametrize("rows, length", [(1, 12), (3, 12), (2, 11)])
def test_mask_is_checked_after_tokens_of_a_static_cache(tokens, activation, rows, length):
    """A static cache holds its length in a tensor."""
    model = make(activation)
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(tokens, attention_mask=torch.ones_like(tokens), cache=cache)
    with pytest.raises(ValueError, match=r"must be \(batch, key\)=\(2, 12\), cached positions included"):
        model(tokens[:, :1], attention_mask=torch.ones(rows, length).long(), cache=cache)
    model(tokens[:, :1], attention_mask=torch.ones(2, 16).long(), cache=cache)


@pytest.mark.parametrize("part", [{"forget_gate": "learned"}, {"selective_attention": True}])
def test_cached_keys_without_the_states_of_a_part_are_refused(tokens, part):
    """PEFT's prefix tuning fills a cache with keys alone."""
    model = make(position_embedding="none", **part)
    cache, size = DynamicCache(config=model.config), (2, model.config.num_key_value_heads, 3, model.config.head_dim)
    for layer in range(model.config.num_hidden_layers):
        cache.update(torch.randn(size), torch.randn(size), layer)
    with pytest.raises(ValueError, match="layer 0: cached keys lack states of parts; use neither prefix tuning nor"):
        model(tokens, attention_mask=torch.ones(2, 14), cache=cache)


def test_calls_are_refused_by_name(tokens):
    model, flex, relu = make(), make(attn_implementation="flex_attention"), make("relu")
    mask, short = torch.ones_like(tokens), torch.zeros(1, 3).long()
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 11, 11, device="cpu")
    full = {"past_key_values": model(torch.zeros(1, 32).long()).past_key_values}
    one_of_both = "exactly one of input_ids and inputs_embeds"
    beyond = "position 32 is beyond the learned ones: max_position_embeddings=32"
    for each, inputs, message in (
        (model, {}, one_of_both),
        (model, {"input_ids": tokens, "inputs_embeds": torch.zeros(2, 11, 32)}, one_of_both),
        (model, {"input_ids": tokens, "is_causal": False}, "is_causal=False"),
        *(
            (model, {"input_ids": tokens, "attention_mask": wrong}, message)
            for wrong, message in (
                (torch.zeros(11), r"must be \(batch, key\) or"),
                (torch.zeros(2, 11, 11), r"must be \(batch, key\) or"),
                (block_mask, "takes no BlockMask"),
                (mask[:, :9], r"must be \(batch, key\)=\(2, 11\)"),
                (mask[:1], r"must be \(batch, key\)=\(2, 11\)"),
            )
        ),
        (
            model,
            {"input_ids": tokens, "attention_mask": mask, "past_key_values": model(tokens).past_key_values},
            r"must be \(batch, key\)=\(2, 22\), cached positions included",
        ),
        *(
            (relu, {"input_ids": tokens[:1], name: torch.tensor([0, 5, 11])}, f"{name}: packed documents are found by")
            for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
        ),
        (model, {"input_ids": torch.zeros(1, 33).long()}, beyond),
        (model, {"input_ids": short, "position_ids": torch.tensor([[30, 31, 32]])}, beyond),
        (model, {"input_ids": short[:, :1], **full}, beyond),
        (
            flex,
            {"input_ids": tokens, "past_key_values": StaticCache(config=flex.config, max_cache_len=16)},
            "'flex_attention' takes no static cache",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            each(**inputs)
    # Padding takes no position
    model(torch.zeros(1, 40).long(), attention_mask=torch.arange(40)[None] >= 8)
    make(position_embedding="rope")(torch.zeros(1, 40).long())

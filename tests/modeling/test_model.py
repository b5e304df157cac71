"""Behaviour that users of Transformers expect of a model: errors, training, caches, heads."""

import pytest
import torch
from packaging.version import Version
from support.grids import slow_except
from support.model_cases import PART_SWITCHES, RICH, random_tokens
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DataCollatorWithFlattening, StaticCache, Trainer, TrainingArguments

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
)
from modeling_nlq.masking_nlq import make_visibility


pytestmark = pytest.mark.thin(4)


TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


RICH_KINDS = {name: {"attention_activation": name, **switches} for name, switches in RICH.items()}
COMPILED_PARTS = ("forget_gate_of_sigmoid", "all_parts")


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

    @pytest.mark.parametrize("activation", ["softmax", "relu"])
    def test_unknown_backends_say_so(self, activation):
        with pytest.raises(ValueError, match='"tiled"` is not supported; use one of nlq, eager, sdpa'):
            make(activation, attn_implementation="tiled")

    def test_the_automatic_choice_computes_the_activation(self):
        assert make().config._attn_implementation == make(attention_sink="zero").config._attn_implementation == "sdpa"
        assert make("tanh").config._attn_implementation == "nlq"
        assert make(per_layer_config={1: {"attention_activation": "tanh"}}).config._attn_implementation == "nlq"


def test_visibility_is_linear_in_length():
    length = 1_000_000  # a mask of length x length booleans would take a terabyte
    mask = torch.ones(1, length, dtype=torch.long)
    mask[0, :10] = 0
    visibility = make_visibility(length, length, 0, torch.device("cpu"), mask)
    assert visibility.visible_count[0, [0, 9, 10, length - 1]].tolist() == [0, 0, 1, length - 10]


# PyTorch cannot trace the gradients of the package `entmax` (entmax 1.3, torch 2.13): the graph breaks there
@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except((*RICH, *COMPILED_PARTS), ("squared", "forget_gate_of_sigmoid")))
@pytest.mark.filterwarnings("error:.*lru_cache")
def test_compiles_to_one_graph(name, make_model):
    model, tokens = make_model(implementation="nlq", **{**RICH_KINDS, **PART_SWITCHES}[name]), random_tokens(2, 6)
    torch.compiler.reset()
    # PyTorch 2.8 cannot trace how Transformers' caches read a configuration, that of Llama either
    use_cache, results = Version(torch.__version__) >= Version("2.9"), []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=name != "entmax15")):
        output = function(tokens, labels=tokens, use_cache=use_cache)
        results.append([output.logits, *torch.autograd.grad(output.loss, list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_outputs_have_their_shapes_and_equal_those_of_slices(tokens):
    model = make("sigmoid")
    outputs = model(tokens, output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, 4, 11, 11)] * 2
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, 11, 32)] * 3
    full = model(tokens).logits
    assert torch.allclose(outputs.logits, full, atol=1e-5)  # the weights come from another backend
    assert torch.equal(model(tokens, logits_to_keep=3).logits, full[:, -3:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]])
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, full)
    assert isinstance(model(tokens, return_dict=False), tuple)


def test_two_inputs_or_none_are_refused(tokens):
    model = make()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(tokens, inputs_embeds=torch.zeros(2, 11, 32))
    with pytest.raises(ValueError, match="is_causal=False"):
        model(tokens, is_causal=False)


def test_gradient_checkpointing_refuses_a_cache(tokens):
    """Backward computes each layer again, and would add its keys a second time. Nothing else is repeated."""
    model = make("sigmoid")
    cache = model(tokens, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="no cache with gradient checkpointing"):
        model(tokens, past_key_values=cache)
    assert model(tokens, use_cache=True).past_key_values is None
    with torch.no_grad():
        first = model(tokens[:, :5], use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=first.past_key_values)
        torch.testing.assert_close(
            torch.cat([first.logits, rest.logits], dim=1), model(tokens, use_cache=False).logits
        )
    assert model.eval()(tokens, past_key_values=cache).past_key_values.get_seq_length() == 22


@pytest.mark.parametrize("activation", RICH)
def test_an_empty_batch_has_no_loss_and_gradients_of_0(activation, tokens):
    model = make(activation, **RICH[activation])
    outputs = model(tokens[:0], labels=tokens[:0])
    assert outputs.logits.shape == (0, 11, 50) and outputs.loss.isnan()  # the mean of nothing, as PyTorch has it
    model(tokens[:0], labels=tokens[:0], num_items_in_batch=7).loss.backward()
    # None is None, which other processes wait for
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


class Derived(NLQForCausalLM):
    pass


@pytest.mark.parametrize("model_class", [NLQForCausalLM, Derived])
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


@pytest.mark.parametrize("activation", RICH)
def test_padding_free_batches_equal_their_documents(activation):
    """A batch of `DataCollatorWithFlattening` equals its documents one by one."""
    model = make(activation, **RICH[activation])
    documents = [torch.randint(50, (length,)) for length in (5, 1, 9)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([{"input_ids": document} for document in documents])
    outputs = model(**batch)
    assert outputs.past_key_values is None
    separate = torch.cat([model(document[None]).logits[0] for document in documents])
    assert torch.allclose(outputs.logits[0], separate, atol=1e-5)


def test_document_boundaries_need_positions():
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        with pytest.raises(ValueError, match=f"{name}: packed documents are found by their position_ids"):
            make("relu")(torch.ones(1, 11).long(), **{name: torch.tensor([0, 5, 11])})


PADDED = torch.tensor([[0, 0, *[1] * 9], [1] * 11])
BLOCK_MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 11, 11, device="cpu")
BAD_MASKS = [
    (torch.zeros(11), r"must be \(batch, key\) or"),
    (torch.zeros(2, 11, 11), r"must be \(batch, key\) or"),
    (BLOCK_MASK, "takes no BlockMask"),
    (PADDED[:, :9], r"must be \(batch, key\)=\(2, 11\)"),
    (PADDED[:1], r"must be \(batch, key\)=\(2, 11\)"),
]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mask, message", BAD_MASKS, ids=[str(index) for index in range(len(BAD_MASKS))])
def test_masks_of_another_shape_are_refused(implementation, mask, message, tokens):
    model = make(attn_implementation=implementation)
    with pytest.raises(ValueError, match=message):
        model(tokens, attention_mask=mask)
    past = model(tokens).past_key_values
    with pytest.raises(ValueError, match=r"must be \(batch, key\)=\(2, 22\), cached positions included"):
        model(tokens, attention_mask=PADDED, past_key_values=past)


def test_positions_beyond_the_learned_ones_are_refused():
    model = make()
    short, past = torch.zeros(1, 3, dtype=torch.long), model(torch.zeros(1, 32, dtype=torch.long)).past_key_values
    calls = (
        {"input_ids": torch.zeros(1, 33, dtype=torch.long)},
        {"input_ids": short, "position_ids": torch.tensor([[30, 31, 32]])},
        {"input_ids": short[:, :1], "past_key_values": past},
    )
    for inputs in calls:
        with pytest.raises(ValueError, match="position 32 is beyond the learned ones: max_position_embeddings=32"):
            model(**inputs)
    # Padding takes no position
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, :8] = 0
    model(torch.zeros(1, 40, dtype=torch.long), attention_mask=mask)
    make(position_embedding="rope")(torch.zeros(1, 40, dtype=torch.long))


@pytest.mark.parametrize("activation", RICH)
def test_stock_trainer_decays_exactly_the_matrices(activation, tmp_path):
    model = make(activation, **RICH[activation])
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    decayed = set(trainer.get_decay_parameter_names(model))
    assert decayed == {
        name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.ndim >= 2
    }


def separable_task(count=64):
    """The class of a row is whether token 7 occurs in it."""
    inputs = torch.randint(10, 50, (count, 8))
    labels = torch.arange(count) % 2
    inputs[labels == 1, 3] = 7
    return [{"input_ids": row, "labels": label} for row, label in zip(inputs, labels)]


SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification"}


@pytest.mark.parametrize(
    "model_class, options",
    [
        (NLQForCausalLM, {}),
        (NLQForTokenClassification, {"num_labels": 50, "classifier_dropout": 0.0}),
        (NLQForSequenceClassification, {}),
        (NLQForSequenceClassification, SEVERAL),
        (NLQForSequenceClassification, {"num_labels": 1}),
        (NLQForQuestionAnswering, {}),
    ],
    ids=["causal", "tokens", "classes", "several_classes", "regression", "answers"],
)
def test_gradient_accumulation_equals_a_larger_batch(model_class, options, tmp_path):
    # The last batch of an epoch, and so its last step, is smaller where batches are: heads without a count cannot know
    data = separable_task(32 if model_class is NLQForQuestionAnswering else 30)
    if options is SEVERAL:
        data = [{**row, "labels": torch.eye(3)[row["labels"]]} for row in data]
    elif options.get("num_labels") == 1:
        data = [{**row, "labels": row["labels"].float()} for row in data]
    elif model_class in (NLQForCausalLM, NLQForTokenClassification):
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in data]
        for row in data[::3]:  # rows with fewer labels must weigh less
            row["labels"] = row["labels"].clone().index_fill_(0, torch.arange(5), -100)
    elif model_class is NLQForQuestionAnswering:
        data = [
            {"input_ids": row["input_ids"], "start_positions": row["labels"], "end_positions": row["labels"]}
            for row in data
        ]
    results = []
    for batch_size, accumulation in ((12, 1), (4, 3)) if len(data) == 30 else ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = model_class(NLQConfig(**TINY, pad_token_id=0, **options))
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=data).train()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*results, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("last", [0, 7], ids=["end-of-text-is-padding", "other-token"])
def test_classifier_reads_the_last_token(side, last):
    model = NLQForSequenceClassification(NLQConfig(**TINY, pad_token_id=0, num_labels=3)).eval()
    rows = [torch.tensor([4, 0, 5, last]), torch.tensor([3, 9, last]), torch.tensor([last])]
    tokens, mask = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
        for rows in (rows, [torch.ones_like(row) for row in rows])
    )
    expected = torch.stack([model.score(model.model(row[None]).last_hidden_state)[0, -1] for row in rows])
    embeddings = model.get_input_embeddings()(tokens)
    calls = [{"input_ids": tokens, "attention_mask": mask}, {"inputs_embeds": embeddings, "attention_mask": mask}]
    if last:
        labels = torch.tensor([0, 2, 1])
        loss = model(**calls[0], labels=labels).loss
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(expected, labels))
    model.config.pad_token_id = None  # the mask says enough
    for call in calls:
        torch.testing.assert_close(model(**call).logits, expected)
    with pytest.raises(ValueError, match="pad_token_id=None: with several rows, give an attention_mask"):
        model(tokens)
    model.config.pad_token_id = 0
    if last and side == "right":  # without a mask, padding on the left is seen
        torch.testing.assert_close(model(tokens).logits, expected)


def test_flex_attention_refuses_a_static_cache(tokens):
    model = make(attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' takes no static cache"):
        model(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ValueError, match="'flex_attention' takes no static cache"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")


def test_unit_norm_keeps_zeros_in_half_precision():
    model = make(qk_norm="l2", query_projection="identity", norm_position="post", residual_activation="relu").half()
    norm = model.model.layers[0].self_attn.q_norm
    assert torch.equal(
        norm(torch.zeros(1, 2, 4, 8, dtype=torch.float16)), torch.zeros(1, 2, 4, 8, dtype=torch.float16)
    )


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
}


class TestLayersOneByOne:
    """Layer-wise quantizers keep the arguments of the first layer, or some of them, and call every layer with them."""

    @staticmethod
    def replay(model, tokens, mask, kept):
        caught = []
        first = model.model.layers[0]
        hook = first.register_forward_pre_hook(lambda _, *arguments: caught.append(arguments), with_kwargs=True)
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        hook.remove()
        (states, *others), keywords = caught[0]
        for layer in model.model.layers:
            states = layer(
                states, *others, **{name: value for name, value in keywords.items() if kept is None or name in kept}
            )
            states = states[0] if isinstance(states, tuple) else states
        return model.lm_head(model.model.norm(states)), expected

    @pytest.mark.parametrize("kept", [None, ("attention_mask", "position_embeddings"), ("position_embeddings",)])
    @pytest.mark.parametrize("implementation", ["nlq", "eager"])
    @pytest.mark.parametrize("name", HYBRIDS)
    @torch.no_grad()
    def test_replayed_layers_equal_the_model(self, name, implementation, kept, make_model):
        tokens, mask = torch.randint(13, (2, 9)), None
        if kept is None or "attention_mask" in kept:
            mask = torch.ones_like(tokens)
            mask[1, :3] = 0
        model = make_model(implementation=implementation, **HYBRIDS[name])
        found, expected = self.replay(model, tokens, mask, kept)
        rows = slice(None) if mask is None else mask.bool()
        assert torch.equal(found[rows], expected[rows])


@pytest.mark.parametrize("name", PART_SWITCHES)
def test_forward_on_meta_reads_no_number(name):
    """No number is read, as in programs that estimate memory."""
    with torch.device("meta"):
        model = make(**PART_SWITCHES[name])
        tokens = torch.ones(2, 9, dtype=torch.long)
        assert model(tokens).logits.shape == (2, 9, 50)

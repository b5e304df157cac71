"""Transformers' own common tests of models, configurations and training, run on NLQ with its heads.

`transformers_suite` fetches them; without access to PyPI they are skipped. Transformers skips its slow ones unless the
environment says `RUN_SLOW=1`.
"""

import functools
import unittest
from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
import torch
from support import transformers_suite
from support.model_cases import PART_SWITCHES
from transformers.testing_utils import torch_device

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForConditionalGeneration,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    NLQSeq2SeqConfig,
    NLQSeq2SeqModel,
)


try:
    transformers_suite.fetch()
except transformers_suite.FetchError as error:
    pytest.skip(str(error), allow_module_level=True)

model_tests, configuration_tests, training_tests = transformers_suite.load(
    "test_modeling_common", "test_configuration_common", "test_training_mixin"
)

# Transformers' tests learn from these tables what a class is for. Only their own copy is extended, not the library's.
HEADS = {
    "MODEL_MAPPING_NAMES": NLQModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": NLQForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": NLQForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": NLQForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": NLQForQuestionAnswering,
}
PAIR_HEADS = {
    "MODEL_MAPPING_NAMES": NLQSeq2SeqModel,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": NLQForConditionalGeneration,
}
for config_class, heads in ((NLQConfig, HEADS), (NLQSeq2SeqConfig, PAIR_HEADS)):
    for table, head in heads.items():
        setattr(model_tests, table, {**getattr(model_tests, table), config_class.model_type: head.__name__})


def set_large_epsilon(config: NLQConfig) -> None:
    config.layer_norm_eps = 1.0


# So that rounding weighs less, Transformers' tests set the epsilon of the norms, under every name that some model has
# for it. One of them is close to NLQ's own: the saved configuration would be refused, as one with a misspelt field.
model_tests.set_config_for_less_flaky_test = set_large_epsilon

CONFIGURATIONS = {
    "linear-hybrid-rope": {
        "query_projection": "linear",
        "position_embedding": "rope",
        "num_key_value_heads": 2,
        # The number as JSON has it, which the tests of configurations compare with what was given
        "per_layer_config": {"0": {"attention_activation": "linear_attention", "linear_attention_decay": "fixed"}},
    },
    "parts": {**PART_SWITCHES["all_parts"], "position_embedding": "rope", "canon": "ABCD"},
    "upcycled-softmax-modern": {
        "query_projection": "upcycled",
        "position_embedding": "rope",
        "sliding_window": 4,
        "num_key_value_heads": 2,
        "qk_norm": "rms_all_heads",
        "norm_type": "rmsnorm",
        "norm_position": "output",
        "mlp_type": "gated",
        "query_key_value_bias": True,
        "per_layer_config": {"1": {"position_embedding": "none"}},
    },
}
PAIR = "encoder-decoder"
EVERY = (*CONFIGURATIONS, PAIR)
ROPE = tuple(CONFIGURATIONS)
RECURRENT = ("linear-hybrid-rope",)

# The tests that are not run: name (`*` stands for any characters), the configurations it is not run for, and why.
_SDPA = "It selects SDPA, which computes softmax only."
_WEIGHTS = "It asks for attention weights, which linear layers never form."
DESELECTED = (
    ("test_generation_tester_mixin_inheritance", EVERY, "The source distribution leaves out the tests of `generate`."),
    (
        "test_model_rope_scaling_from_config_*",
        (PAIR,),
        "This configuration has no rotary positions to scale, only the field.",
    ),
    (
        "test_model_rope_scaling_from_config_*_dynamic",
        ROPE,
        "NLQ refuses it: its angles would change what is already cached.",
    ),
    ("test_training_overfit", (PAIR,), "It expects the prompt in what `generate` returns."),
    ("test_can_set_attention_dynamically", RECURRENT, _SDPA),
    ("test_config", (PAIR,), "It compares each half with the dictionary that was given, which lacks the defaults."),
    (
        "test_sdpa_can_dispatch_non_composite_models",
        (*RECURRENT, "parts", PAIR),
        "It expects SDPA by default; parts have a bias, and each half chooses.",
    ),
    ("test_sdpa_can_dispatch_on_flash", RECURRENT, _SDPA),
    ("test_sdpa_can_compile_dynamic", RECURRENT, _SDPA),
    ("test_flash_attn_*", RECURRENT, "It selects flash attention, which computes softmax only."),
    ("test_attention_outputs", RECURRENT, _WEIGHTS),
    ("test_capture_outputs_decorator", RECURRENT, _WEIGHTS),
    ("test_retain_grad_hidden_states_attentions", RECURRENT, _WEIGHTS),
    # Those of differential attention are differences, returned beside the output
    ("test_retain_grad_hidden_states_attentions", ("parts",), "It looks for a gradient of the weights."),
    # Its other parts run with the other configurations
    ("test_model_outputs_equivalence", RECURRENT, _WEIGHTS),
    ("test_eager_matches_sdpa_inference_*", RECURRENT, "It sets a sliding window, which linear layers refuse."),
)

# Tests that run in `make test-all` only, and the configurations that this holds for: the others show the same faults.
SLOW = (
    ("test_*", tuple(name for name in CONFIGURATIONS if name != "upcycled-softmax-modern")),
    # `test_invariants.py` compares backends, with padding too
    ("test_eager_matches_sdpa_inference_*", EVERY),
    ("test_training_overfit", EVERY[1:]),
    ("test_bc_torch_dtype", EVERY),
    ("test_can_init_all_missing_weights", EVERY[1:]),
)


class ModelTester:
    batch_size = 3
    seq_length = 7
    is_training = True
    vocab_size = 99
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    pad_token_id = 0
    causal_lm_class = NLQForCausalLM

    def __init__(self, switches: dict):
        self.switches = switches

    def get_config(self) -> NLQConfig:
        return NLQConfig(max_position_embeddings=512, pad_token_id=0, **self.sizes, **self.switches)

    @property
    def sizes(self) -> dict[str, int]:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        return {name: getattr(self, name) for name in names}

    def prepare_config_and_inputs_for_common(self) -> tuple[NLQConfig, dict[str, torch.Tensor]]:
        # The first row has padding: it is the one that is also computed without the others.
        lengths = torch.tensor([[4], [1], [self.seq_length]])
        attention_mask = (torch.arange(self.seq_length) < lengths).long()
        input_ids = torch.randint(1, self.vocab_size, (self.batch_size, self.seq_length)) * attention_mask
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.get_config(), {name: tensor.to(torch_device) for name, tensor in inputs.items()}


# Transformers' tests look for such warnings, which our configuration of pytest ignores
@pytest.mark.filterwarnings("default::FutureWarning")
class TransformersSuite(model_tests.ModelTesterMixin, training_tests.TrainingTesterMixin):
    """All fetched tests for the configuration that a subclass names, less the deselected ones."""

    configuration: str
    all_model_classes = tuple(HEADS.values())
    # Otherwise skipped for want of a copyright line that says when the model was made.
    test_can_init_all_missing_weights_before_2023 = True
    _torch_compile_train_cls = NLQForCausalLM

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for pattern, configurations, reason in DESELECTED:
            if cls.configuration in configurations:
                for name in matching_tests(pattern):
                    setattr(cls, name, unittest.skip(reason)(getattr(cls, name)))

        for pattern, configurations in SLOW:
            if cls.configuration in configurations:
                for name in matching_tests(pattern):
                    setattr(cls, name, pytest.mark.slow(copy_of(getattr(cls, name))))

    def setUp(self):
        self.model_tester = ModelTester(CONFIGURATIONS[self.configuration])

    def test_config(self):
        sizes = {"hidden_size": 32, "num_attention_heads": 4}
        switches = CONFIGURATIONS[self.configuration]
        configuration_tests.ConfigTester(self, config_class=NLQConfig, **sizes, **switches).run_common_tests()


def copy_of(test: Callable) -> Callable:
    """The same test for one class: marks of the inherited function would hold for all classes."""

    @functools.wraps(test)
    def copied(self):
        test(self)

    return copied


def matching_tests(pattern: str) -> list[str]:
    """The names of the tests, without those of settings such as `test_all_params_have_gradient = True`."""
    names = [name for name in dir(TransformersSuite) if fnmatchcase(name, pattern)]
    return [name for name in names if callable(getattr(TransformersSuite, name))]


class PairTester(ModelTester):
    """An encoder and decoder; the first row of the source has padding."""

    is_encoder_decoder = True
    causal_lm_class = None

    def get_config(self) -> NLQSeq2SeqConfig:
        half = {**self.sizes, "max_position_embeddings": 512}
        return NLQSeq2SeqConfig(encoder=half, decoder={**half, **self.switches}, pad_token_id=0, bos_token_id=1)

    def prepare_config_and_inputs_for_common(self) -> tuple[NLQSeq2SeqConfig, dict[str, torch.Tensor]]:
        config, inputs = super().prepare_config_and_inputs_for_common()
        target = torch.randint(1, self.vocab_size, (self.batch_size, self.seq_length)).to(torch_device)
        return config, {**inputs, "decoder_input_ids": target, "decoder_attention_mask": torch.ones_like(target)}


class EncoderDecoderTest(TransformersSuite, unittest.TestCase):
    configuration = "encoder-decoder"
    all_model_classes = tuple(PAIR_HEADS.values())
    is_encoder_decoder = True
    _torch_compile_train_cls = NLQForConditionalGeneration

    def setUp(self):
        self.model_tester = PairTester({"cross_attention": {"query_projection": "nonlinear"}})


for name in CONFIGURATIONS:
    test_name = f"{name.title().replace('-', '')}Test"
    globals()[test_name] = type(test_name, (TransformersSuite, unittest.TestCase), {"configuration": name})


@pytest.mark.parametrize("pattern", [row[0] for row in (*DESELECTED, *SLOW)])
def test_deselected_test_exists(pattern):
    assert matching_tests(pattern), "Transformers has no such test any more: remove the row"


@pytest.mark.parametrize("name", transformers_suite.STUBS)
def test_stubbed_module_is_missing(name):
    path = transformers_suite.FOLDER.joinpath(*name.split(".")).with_suffix(".py")
    assert not path.exists(), "the source distribution carries this module now: use it instead of the stub"

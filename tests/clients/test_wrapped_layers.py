"""Programs that wrap a layer: activation steering (repeng), layer-wise quantizers (the catchers of GPTQ, SparseGPT,
Wanda).
"""

import sys
from functools import partial

import pytest
import torch
from accelerate.utils import send_to_device
from peft import C3AConfig, get_peft_model
from support.client_cases import IDS, SIZES, fit, logits, run_script
from torch.distributed.utils import _apply_to_tensors
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForConditionalGeneration, NLQSeq2SeqConfig


SWITCHES = {
    "softmax": {},
    "relu": {"attention_activation": "relu"},
    "forget_gate": {"forget_gate": "learned"},
    "linear": {"attention_activation": "linear_attention"},
    "values": {"value_residual": "learned"},
    "mlp_hooks": {"canon": "ABCD"},
    "windows": {"per_layer_config": {1: {"sliding_window": 4}}},
}


class Wrapper(torch.nn.Module):
    """Hides all attributes of a layer."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


class Catcher(Wrapper):
    """Takes the arguments of the first layer, and ends the call."""

    def forward(self, hidden_states, *args, **kwargs):
        self.inputs = hidden_states, args, kwargs
        raise InterruptedError


def make(name):
    torch.manual_seed(0)
    return NLQForCausalLM(NLQConfig(**SIZES, **SWITCHES[name])).eval()


@pytest.mark.parametrize("wrapped", [(1,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize("name", SWITCHES)
def test_wrapped_layers(name, wrapped):
    model = make(name)
    expected, tokens = logits(model), model.generate(IDS, max_new_tokens=5, do_sample=False)
    for index in wrapped:
        model.model.layers[index] = Wrapper(model.model.layers[index])
    assert torch.equal(logits(model), expected)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), tokens)
    model.gradient_checkpointing_enable()
    fit(model)


@pytest.mark.parametrize(
    "move",
    [tuple, partial(send_to_device, device="cpu"), partial(_apply_to_tensors, torch.clone)],
    ids=["as_given", "accelerate", "fsdp"],
)
@pytest.mark.parametrize("name", SWITCHES)
def test_layers_one_by_one_with_the_arguments_of_the_first(name, move):
    model, mask = make(name), torch.ones_like(IDS)
    mask[0, :3] = 0
    with torch.no_grad():
        expected, layers = model(IDS, mask, use_cache=False).logits, model.model.layers
        layers[0] = catcher = Catcher(layers[0])
        with pytest.raises(InterruptedError):
            model(IDS, mask, use_cache=False)
        layers[0] = catcher.block
        states, args, kwargs = catcher.inputs
        args, kwargs = move((args, kwargs))
        for layer in layers:
            output = layer(states, *args, **kwargs)
            if name == "values" and layer is layers[0]:
                with pytest.raises(ValueError, match="give each later layer these two"):
                    layers[1](output, *args, **kwargs)
                with pytest.raises(ValueError, match=r"first_values \(layer 1\): give what the first layer returns"):
                    layers[1](output[0], *args, **kwargs)
                args = output[1:]
            states = output[0] if isinstance(output, tuple) else output
        assert torch.equal(model.lm_head(model.model.norm(states))[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("program", ["torchao", "C3A"])
def test_programs_that_fail_without_tokens(program):
    """Cached generation of a pair under a quantizer of activations, and under an adapter by Fourier transforms."""
    torch.manual_seed(0)
    halves = {"encoder": {**SIZES, "is_causal": False}, "decoder": {**SIZES, "add_cross_attention": True}}
    model = NLQForConditionalGeneration(NLQSeq2SeqConfig(**halves, pad_token_id=0, decoder_start_token_id=1)).eval()
    if program == "torchao":
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    else:
        model = get_peft_model(
            model, C3AConfig(block_size=16, target_modules="all-linear", task_type="SEQ_2_SEQ_LM")
        ).eval()
    options = {"input_ids": IDS, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**options), model.generate(**options, use_cache=False))


def test_dill_and_datasets_with_remote_code(trained, tmp_path):
    """`datasets.map` hashes what a function refers to by dill, which looks for each class in the package of its
    module.
    """
    script = """
    import sys
    import dill, torch, transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    assert not hasattr(transformers, "NLQForCausalLM")  # by which MLflow would take the folder for Transformers' own
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
    assert not hasattr(transformers, "NLQForCausalLM")
    text = dill.dumps(model)
    assert type(dill.loads(text)) is type(model) and len(text) < 2 * model.num_parameters() * 4
    rows = Dataset.from_dict({"ids": [[1, 2, 3], [4, 5, 6]]})
    done = rows.map(lambda row: {"next": model(torch.tensor([row["ids"]])).logits[0, -1].argmax().item()})
    assert len(done["next"]) == 2
    import transformers.cli.serve
    assert transformers.NLQForCausalLM is AutoModelForCausalLM  # which `transformers serve` takes by this name
    """
    run_script(script, trained("sigmoid", "nonlinear"), package=False, timeout=120)
    assert sys.modules["modeling_nlq"].modeling_nlq is sys.modules["modeling_nlq.modeling_nlq"]

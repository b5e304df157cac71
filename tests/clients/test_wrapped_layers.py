"""Programs that wrap a layer, such as activation steering (repeng), or look at a model's class."""

import sys

import pytest
import torch
from support.client_cases import IDS, SIZES, fit, logits, run_script

from modeling_nlq import NLQConfig, NLQForCausalLM


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


def make(name):
    torch.manual_seed(0)
    return NLQForCausalLM(NLQConfig(**SIZES, **SWITCHES[name])).eval()


@pytest.mark.parametrize("wrapped", [(1,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize("name", SWITCHES)
def test_wrapped_layers_compute_the_same(name, wrapped):
    model = make(name)
    expected, tokens = logits(model), model.generate(IDS, max_new_tokens=5, do_sample=False)
    for index in wrapped:
        model.model.layers[index] = Wrapper(model.model.layers[index])
    assert torch.equal(logits(model), expected)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), tokens)
    model.gradient_checkpointing_enable()
    fit(model)


def test_dill_and_datasets_take_remote_code(trained, tmp_path):
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
    run_script(script, trained("sigmoid", "nonlinear"), package=False)
    assert sys.modules["modeling_nlq"].modeling_nlq is sys.modules["modeling_nlq.modeling_nlq"]

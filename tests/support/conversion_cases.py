"""Shared parts of the tests of conversion: random models, checkpoints, and comparisons of models."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from support import paper_reference
from support.model_cases import random_tokens
from transformers import GPT2Config, GPT2LMHeadModel

import modeling_nlq
from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES
from modeling_nlq.training.conversion.draft import Draft
from nlq import main


def from_nlq(model, family, allow_lossy=False):
    return Draft.of(model).from_nlq(family).check_exact(allow_lossy).build()


def upcycle(model, switches=None):
    return Draft.of(model).with_switches({"query_projection": "upcycled"} if switches is None else switches).model


def parametrize_cases(names, cases):
    """Over the values of a dictionary, its keys being the ids."""
    values = [pytest.param(*(case if "," in names else (case,)), id=name) for name, case in cases.items()]
    return pytest.mark.parametrize(names, values)


@torch.no_grad()
def output_of(model, input_ids, **inputs):
    """Returns the logits, or what a model with another head returns instead."""
    output = model(input_ids, **inputs)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits])
    return output.last_hidden_state if "last_hidden_state" in output else output.logits


def assert_same_function(actual, expected, tolerance=1e-5, length=None, **inputs):
    """Compares the outputs at all positions, without calling `eval()` first."""
    length = length or min(expected.config.max_position_embeddings, 24)
    input_ids = random_tokens(2, length, expected.config.vocab_size)
    theirs = output_of(expected, input_ids, **inputs)
    assert theirs.isfinite().all()
    assert theirs.std() > 0.05, "a function as flat as this would hide differences"
    torch.testing.assert_close(output_of(actual, input_ids, **inputs), theirs, rtol=tolerance, atol=tolerance)


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


class Frozen:
    """Checks at the end of a `with` block that a model, its configuration and its mode did not change."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.state = copy.deepcopy(self.model.state_dict())
        self.config, self.training = self.model.config.to_dict(), self.model.training

    def __exit__(self, *error):
        assert_same_state(self.model.state_dict(), self.state)
        assert self.model.config.to_dict() == self.config
        assert self.model.training == self.training


def randomize(model, seed=0):
    """Draws all weights at random, because initial ones hide what is multiplied by 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / min(parameter.shape) ** 0.5)
    return model


GPT2_SIZES = {
    "vocab_size": 29,
    "n_positions": 24,
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_gpt2(cls=GPT2LMHeadModel, dtype=torch.float32, seed=0, **options):
    return randomize(cls(GPT2Config(**{**GPT2_SIZES, **options})).to(dtype), seed).eval()


def layer_switches(config):
    return [{name: getattr(layer, name) for name in PER_LAYER_SWITCHES} for layer in config.per_layer_config]


def edit_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def run_nlq(*arguments):
    return main([str(argument) for argument in arguments])


def nlq_fails(capsys, *arguments):
    """Runs a command that fails, and returns its error: one line, the last of its output."""
    capsys.readouterr()
    try:
        status = run_nlq(*arguments)
    except SystemExit as error:  # of the parser
        status = error.code
    assert status not in (0, None)
    output = capsys.readouterr()
    assert "Traceback" not in output.err + output.out
    errors = [line for line in output.err.splitlines() if line.startswith("nlq") and "error: " in line]
    assert len(errors) == 1, output.err
    assert output.err.rstrip().endswith(errors[0])
    return errors[0]


def check_folder(folder, is_gpt2=False):
    """Checks that a folder has all files of a model and its card, and no temporary ones."""
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= names
    for name in names - {".nlq-manifest", ".lock"}:
        assert not name.startswith((".", "tmp")) and not name.endswith((".bin", ".pt", ".tmp"))
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n")
    assert str(folder.parent) not in card
    config = json.loads((folder / "config.json").read_text())
    if is_gpt2:
        assert config["model_type"] == "gpt2"
        assert "auto_map" not in config
        assert not [name for name in names if name.endswith((".py", "__pycache__"))]
        assert "custom_code" not in card
        return
    assert config["model_type"] == "nlq"
    package = Path(modeling_nlq.__file__).parent
    code = {name for name in names if name.endswith(".py")}
    assert {"configuration_nlq.py", "modeling_nlq.py"} <= code
    for name in code:
        assert (folder / name).read_bytes() == (package / name).read_bytes()


def snapshot(folder):
    """Returns every file and folder below with its content, except locks and manifests."""
    paths = (path for path in sorted(folder.rglob("*")) if path.name not in (".nlq-manifest", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


PAPER_SIZES = {"block_size": 11, "vocab_size": 17, "n_layer": 2, "num_heads": 3, "n_embd": 12, "mlp_hidden_size": 20}
PAPER = {
    **PAPER_SIZES,
    **paper_reference.TRAINING_ARGUMENTS,
    "tie_weights": True,
    "head_size": 64,
    "dropout": 0.15,
    "bias": False,
    "scale": 0.31,
    "query_mode": "original",
}
KINDS = {"original": "linear", "residual": "residual", "identity": "identity", "residual_gelu": "nonlinear"}


def make_checkpoint(prefix="", dtype=torch.float32, bottleneck_size=None, without=(), **model_args):
    arguments = {name: value for name, value in {**PAPER, **model_args}.items() if name not in without}
    return paper_reference.random_checkpoint(arguments, prefix, dtype, bottleneck_size=bottleneck_size)


def assert_same_as_paper(model, checkpoint, length=11):
    """Compares the outputs of a model in float32, and then in float64, with the paper's formulas in float64."""
    input_ids = random_tokens(2, length, paper_reference.complete(checkpoint["model_args"])["vocab_size"])
    expected = paper_reference.forward(checkpoint, input_ids)
    assert not model.training
    torch.testing.assert_close(output_of(model, input_ids).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output_of(model.double(), input_ids), expected, rtol=1e-9, atol=1e-9)


class Exploit:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)

"""Reads checkpoints of nanoGPT, and of the paper's fork of it (Karbevski 2026, arXiv 2603.13381)."""

import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_nlq import NLQConfig, NLQForCausalLM

from ..size import check_names, empty_model
from .draft import Draft, names_of, to_nlq_tensors
from .families import FAMILIES, Layout
from .streaming import Weights


# `query_mode` of the paper's code -> `query_projection`
_QUERY_MODES = {"original": "linear", "residual": "residual", "identity": "identity", "residual_gelu": "nonlinear"}
# Modules that GPT-2 does not have
_BOTTLENECK_NAMES = {
    "self_attn.q_bottleneck.input_norm": "attn.residual_rmsnorm_input",
    "self_attn.q_bottleneck.fc1": "attn.residual_in",
    "self_attn.q_bottleneck.fc2": "attn.residual_out",
    "self_attn.q_bottleneck.output_norm": "attn.residual_layernorm_output",
}
# Defaults of the paper's code for keys missing from `model_args`. Its scale is for heads of 64, whatever their size
_DEFAULTS = {
    "block_size": 1024,
    "vocab_size": 50304,
    "n_layer": 12,
    "num_heads": 12,
    "n_embd": 768,
    "tie_weights": True,
    "dropout": 0.0,
    "bias": False,
    "scale": math.sqrt(1 / 64),
    "query_mode": "original",
    "mlp_hidden_size": 4 * 768,
}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint; raises `UnpicklingError` if it is damaged or would run code, or `ValueError`."""
    # Mapped, because the file also holds the optimizer's state
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        raise ValueError(f"{path} does not hold 'model' and 'model_args'")
    return checkpoint


def from_paper(checkpoint: dict[str, Any]) -> NLQForCausalLM:
    """Makes the model of a checkpoint; raises `ValueError` for fields or weights that do not fit."""
    config = _to_config(checkpoint["model_args"])
    state = {name.removeprefix("_orig_mod."): value for name, value in checkpoint["model"].items()}
    # Attention without a kernel saves the causal mask
    state = {name: value for name, value in state.items() if not (name.endswith(".attn.bias") and value.ndim == 4)}
    ours = empty_model(config, model_class=NLQForCausalLM)
    theirs = empty_model(GPT2Config(n_layer=1), model_class=GPT2LMHeadModel)
    # The linear layers are not transposed, and the fused layer lacks queries without a matrix
    parts = 3 if config.query_projection in ("linear", "residual") else 2
    fused = Layout(lambda tensor, _: tensor.tensor_split(parts), write=None)
    names = {**FAMILIES["gpt2"].block_names, **_BOTTLENECK_NAMES}
    family = replace(FAMILIES["gpt2"], block_names=names, layouts={"c_attn": fused})
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    if config.tie_word_embeddings and {head, embedding} <= state.keys():
        is_equal = torch.equal(state.pop(head), state[embedding])
        if not is_equal:
            raise ValueError(f"tie_weights=True, but {head} differs from {embedding}")
    check_names(names_of(family, theirs, ours).keys(), state.keys())
    weights = Weights.of(state)
    return Draft(ours, replace(weights, tensors=to_nlq_tensors(family, theirs, ours, weights.tensors))).build()


def _to_config(arguments: dict[str, Any]) -> NLQConfig:
    values = {**_DEFAULTS, **arguments}
    if "n_head" in arguments:  # nanoGPT itself
        usual = {"bias": True, "scale": None, "mlp_hidden_size": 4 * values["n_embd"]}
        values = {**_DEFAULTS, **usual, "num_heads": arguments["n_head"], **arguments}
        if unknown := sorted(arguments.keys() - {"n_head", *_DEFAULTS}):
            raise ValueError(f"model_args: nanoGPT has no field {', '.join(unknown)}")
    if values["query_mode"] not in _QUERY_MODES:
        raise ValueError(f"model_args: query_mode={values['query_mode']!r} must be one of {', '.join(_QUERY_MODES)}")
    usual_scale = 1.0 / math.sqrt(values["n_embd"] // values["num_heads"])
    return NLQConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["n_embd"],
        num_hidden_layers=values["n_layer"],
        num_attention_heads=values["num_heads"],
        intermediate_size=values["mlp_hidden_size"],
        max_position_embeddings=values["block_size"],
        use_bias=values["bias"],
        query_projection=_QUERY_MODES[values["query_mode"]],
        attention_scaling=usual_scale if values["scale"] is None else values["scale"],
        tie_word_embeddings=values["tie_weights"],
        embedding_dropout=values["dropout"],
        residual_dropout=values["dropout"],
        attention_dropout=values["dropout"],
    )

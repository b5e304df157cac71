"""Checkpoints of the paper's own code (Karbevski 2026, arXiv 2603.13381), a fork of nanoGPT, and of nanoGPT itself.

A file holds `{"model": state_dict, "model_args": dict, ...}`; `torch.compile` may have given all names a prefix.
"""

import math
import pickle
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_nlq import NLQConfig, NLQForCausalLM

from ..parameters import check_shapes
from ..text import one_line
from .families import FAMILIES, Layout
from .renaming import Draft, from_nlq_origins, to_nlq_origins
from .streaming import Weights, empty_model


# `query_mode` there, `query_projection` here
_QUERY_MODES = {"original": "linear", "residual": "residual", "identity": "identity", "residual_gelu": "nonlinear"}
# The other modules have the names of GPT-2
_BOTTLENECK_NAMES = {
    "self_attn.q_bottleneck.input_norm": "attn.residual_rmsnorm_input",
    "self_attn.q_bottleneck.fc1": "attn.residual_in",
    "self_attn.q_bottleneck.fc2": "attn.residual_out",
    "self_attn.q_bottleneck.output_norm": "attn.residual_layernorm_output",
}
# Defaults of the paper's code for keys missing from `model_args`; the scale is that of a head of 64 for any head size
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
# Fields that its model does not read
_TRAINING_ONLY = {
    "accumulation_size",
    "batch_size",
    "beta1",
    "beta2",
    "decay_lr",
    "grad_clip",
    "head_size",
    "learning_rate",
    "lr_decay_iters",
    "max_iters",
    "min_lr",
    "save_checkpoint_steps",
    "warmup_iters",
    "weight_decay",
}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint without executing anything in it.

    Raises:
        ValueError: if the file is damaged, is no checkpoint, or would need to run code to be read.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            is_archive = zipfile.is_zipfile(file)
        # Mapped, so that the optimizer's state beside the weights takes no memory
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive or None)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"(?:GLOBAL|global) ([\w.]+\.[\w.]+)", str(error))
        needs = f"{wanted[1]}, which could run code" if wanted else "more than these, or is damaged"
        raise ValueError(
            f"{path}: only tensors and plain values are read from a checkpoint; this one asks for {needs}"
        ) from None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # what torch raises for a damaged file is of many types
        raise ValueError(f"{path} is no checkpoint that can be read: {one_line(error)}") from None
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        raise ValueError(
            f"{path} is no checkpoint of the paper's code or of nanoGPT: it does not hold 'model' and 'model_args'"
        )
    return checkpoint


def from_paper(checkpoint: dict[str, Any]) -> NLQForCausalLM:
    """Makes the model of a checkpoint.

    Args:
        checkpoint: it holds `"model"`, the weights by name, and `"model_args"`.

    Raises:
        ValueError: for a field or a mode that the paper's code does not have, and for weights that are missing, unknown, of
            another shape, or tied and yet different.
    """
    for part in ("model", "model_args"):
        if not isinstance(checkpoint.get(part), dict):
            raise ValueError(f"checkpoint: {part!r} must be there, and a mapping")
    arguments, state = checkpoint["model_args"], checkpoint["model"]
    config = _to_config(arguments)
    state = {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    # The causal mask, which attention without a kernel saves, is no parameter
    state = {name: value for name, value in state.items() if not (name.endswith(".attn.bias") and value.ndim == 4)}
    ours, theirs = empty_model(NLQForCausalLM, config), empty_model(GPT2LMHeadModel, GPT2Config(n_layer=1))
    names = {**FAMILIES["gpt2"].block_names, **_BOTTLENECK_NAMES}
    # The rows of its linear layers are those here; the fused one has no query where there is no matrix
    parts = 3 if config.query_projection in ("linear", "residual") else 2
    fused = Layout(lambda tensor, _: tensor.chunk(parts), lambda tensors, _: torch.cat(list(tensors)))
    family = replace(FAMILIES["gpt2"], block_names=names, layouts={"c_attn": fused})
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    if config.tie_word_embeddings and head in state:
        if not torch.equal(state[head], state.setdefault(embedding, state[head])):
            raise ValueError(f"tie_weights=True, and yet {head} differs from {embedding}")
        del state[head]
    needed, empty = from_nlq_origins(family, theirs, ours), ours.state_dict()
    shapes = {name: origin.make([empty[source] for source in origin.sources]).shape for name, origin in needed.items()}
    check_shapes(shapes, {name: value.shape for name, value in state.items()})
    return Draft(ours, Weights(state), to_nlq_origins(family, theirs, ours)).build()


def _to_config(arguments: dict[str, Any]) -> NLQConfig:
    is_nanogpt = "n_head" in arguments
    known = {"n_head", *_DEFAULTS} if is_nanogpt else {*_DEFAULTS, *_TRAINING_ONLY}
    if unknown := sorted(arguments.keys() - known):
        raise ValueError(f"model_args: {', '.join(map(str, unknown))}: the paper's code has no such field")
    values = {**_DEFAULTS, **arguments}
    if is_nanogpt:
        own = {"num_heads": arguments["n_head"], "scale": None, "mlp_hidden_size": 4 * values["n_embd"]}
        values = {**_DEFAULTS, "bias": True, **own, **arguments}
    for name in ("n_embd", "num_heads", "n_layer", "block_size", "vocab_size", "mlp_hidden_size"):
        if not isinstance(values[name], int) or values[name] < 1:
            raise ValueError(f"model_args: {name}={values[name]!r} must be a whole number of at least 1")
    if str(values["query_mode"]) not in _QUERY_MODES:
        raise ValueError(f"model_args: query_mode={values['query_mode']!r} must be one of {', '.join(_QUERY_MODES)}")
    if values["n_embd"] % values["num_heads"]:
        raise ValueError(f"model_args: n_embd={values['n_embd']} must be a multiple of num_heads={values['num_heads']}")
    scale = values["scale"]
    return NLQConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["n_embd"],
        num_hidden_layers=values["n_layer"],
        num_attention_heads=values["num_heads"],
        intermediate_size=values["mlp_hidden_size"],
        max_position_embeddings=values["block_size"],
        use_bias=values["bias"],
        query_projection=_QUERY_MODES[values["query_mode"]],
        attention_scaling=1.0 / math.sqrt(values["n_embd"] // values["num_heads"]) if scale is None else scale,
        embedding_dropout=values["dropout"],
        residual_dropout=values["dropout"],
        attention_dropout=values["dropout"],
        tie_word_embeddings=values["tie_weights"],
    )

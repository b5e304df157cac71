"""Checkpoints of the paper's own code (Karbevski 2026, arXiv 2603.13381), a fork of nanoGPT, and of nanoGPT itself.

A file holds `{"model": state_dict, "model_args": dict, ...}`; `torch.compile` may have given all names a prefix.
"""

import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from modeling_nlq import NLQConfig, NLQForCausalLM

from ..parameters import check_shapes
from ..text import one_line
from .families import FAMILIES
from .renaming import build


# `query_mode` there, `query_projection` here, and the parts that the rows of the fused `c_attn` are
_QUERY_MODES = {
    "original": ("linear", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "residual": ("residual", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "identity": ("identity", ("self_attn.k_proj", "self_attn.v_proj")),
    "residual_gelu": ("nonlinear", ("self_attn.k_proj", "self_attn.v_proj")),
}
_BOTTLENECK_NAMES = {
    "residual_rmsnorm_input": "input_norm",
    "residual_in": "fc1",
    "residual_out": "fc2",
    "residual_layernorm_output": "output_norm",
}
# The other modules have the names of GPT-2: name there -> name here
_BLOCK_NAMES = {theirs: ours for ours, theirs in FAMILIES["gpt2"].block_names.items()}
_BODY_NAMES = {theirs: ours for ours, theirs in FAMILIES["gpt2"].body_names.items()}
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
    shapes = _shapes(config)
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    if config.tie_word_embeddings and head in state:
        if not torch.equal(state[head], state.setdefault(embedding, state[head])):
            raise ValueError(f"tie_weights=True, and yet {head} differs from {embedding}")
        del state[head]
    if config.tie_word_embeddings:
        del shapes[head]
    check_shapes(shapes, {name: value.shape for name, value in state.items()})
    _, parts = _QUERY_MODES[arguments.get("query_mode", "original")]
    renamed = {}
    for name, value in state.items():
        new_names = _nlq_names(name, parts)
        renamed.update(zip(new_names, value.chunk(len(new_names))))
    return build(NLQForCausalLM, config, renamed)


def _shapes(config: NLQConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters in a checkpoint of this configuration, by name."""
    d, r, inner = config.hidden_size, config.hidden_size // 2, config.intermediate_size
    parts = len(next(parts for projection, parts in _QUERY_MODES.values() if projection == config.query_projection))
    block = {
        "ln_1": (d,),
        "attn.c_attn": (parts * d, d),
        "attn.c_proj": (d, d),
        "ln_2": (d,),
        "mlp.c_fc": (inner, d),
        "mlp.c_proj": (d, inner),
    }
    if config.query_projection == "nonlinear":
        bottleneck = ((d,), (r, d), (d, r), (d,))
        block.update({f"attn.{name}": shape for name, shape in zip(_BOTTLENECK_NAMES, bottleneck)})
    modules = {"wte": (config.vocab_size, d), "wpe": (config.max_position_embeddings, d), "ln_f": (d,)}
    for layer in range(config.num_hidden_layers):
        modules.update({f"h.{layer}.{name}": shape for name, shape in block.items()})
    shapes = {f"transformer.{name}.weight": shape for name, shape in modules.items()}
    if config.use_bias:
        unbiased = ("wte", "wpe", "residual_rmsnorm_input")
        shapes.update({f"transformer.{name}.bias": shape[:1] for name, shape in modules.items() if not name.endswith(unbiased)})
    return {**shapes, "lm_head.weight": (config.vocab_size, d)}


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
        query_projection=_QUERY_MODES[values["query_mode"]][0],
        attention_scaling=1.0 / math.sqrt(values["n_embd"] // values["num_heads"]) if scale is None else scale,
        embedding_dropout=values["dropout"],
        residual_dropout=values["dropout"],
        attention_dropout=values["dropout"],
        tie_word_embeddings=values["tie_weights"],
    )


def _nlq_names(name: str, parts: tuple[str, ...]) -> list[str]:
    """The new name of a parameter, or the names of the parts that its rows are."""
    if name == "lm_head.weight":
        return [name]
    name = name.removeprefix("transformer.")
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"h\.(\d+)\.(.+)", module)
    if not match:
        return [f"model.{_BODY_NAMES[module]}.{kind}"]
    layer, module = match.groups()
    if module.startswith("attn.residual_"):
        parts = (f"self_attn.q_bottleneck.{_BOTTLENECK_NAMES[module.removeprefix('attn.')]}",)
    elif module != "attn.c_attn":
        parts = (_BLOCK_NAMES[module],)
    return [f"model.layers.{layer}.{part}.{kind}" for part in parts]

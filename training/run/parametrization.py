"""CompleteP: a learning rate found with a small model suits wider and deeper ones (Dey et al. 2025, arXiv 2505.01618).

It extends the maximal update parametrization (Yang et al. 2022, arXiv 2203.03466) to depth. A model `m` times as wide
and `l` times as deep as its base model would multiply the output of each sub-layer by `1 / l`, and the logits by
`1 / m`. Adam's steps do not depend on the scale of a gradient, so these factors stand in initial values and learning
rates instead. Gradients of the ends of sub-layers are then `l` times as large, and that of the last norm `m` times.

| parameters | initial values | learning rate | Adam's epsilon |
|---|---|---|---|
| embeddings and their norm, LM head | 1 | 1 | 1 / m |
| matrices with `m` times the inputs | 1 / sqrt(m) | 1 / m | 1 / (m l) |
| the same at the end of a sub-layer | 1 / (l sqrt(m)) | 1 / (m l) | 1 / m |
| vectors of a layer; biases at the end of a sub-layer | 1; 1 / l | 1; 1 / l | 1 / (m l); 1 / m |
| norm before the LM head | 1 / m | 1 / m | 1 |

Each number is a factor of what a base model has. Weight decay is divided by the factor of the learning rate.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

from modeling_nlq import NLQConfig

from ..files import check_keys
from ..size import shapes_of


@dataclass(frozen=True)
class Factors:
    """Factors of a parameter's initial values, as the model draws them, and of Adam's settings for the base model."""

    initial: float
    learning_rate: float
    epsilon: float


# All other widths are in the same proportion to the hidden size, and heads are as wide
BASE_SIZES = ("hidden_size", "num_hidden_layers")
# Widths that grow with the hidden size. `head_dim` does not: a wider model has more heads
_WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "projection_bottleneck_size",
)


def check_completep(config: PreTrainedConfig, base_sizes: Mapping[str, int], arguments: TrainingArguments) -> None:
    """Raises `ValueError` unless a recipe can have `parametrization: completep`."""
    check_keys("base_sizes", base_sizes, BASE_SIZES)
    if "hidden_size" not in base_sizes:
        raise ValueError(f"base_sizes={dict(base_sizes)!r} must give the hidden_size of the base model")
    if not isinstance(config, NLQConfig):
        raise ValueError(
            f"parametrization='completep' needs an NLQ model, and this one is of type {config.model_type!r}"
        )
    doubled = shapes_of(_twice_as_wide(config))
    for name, shape in shapes_of(config).items():
        if len(shape) > 2 and doubled[name][1:] != shape[1:]:
            raise ValueError(
                f"{name}: parametrization='completep' cannot tell which of its {len(shape)} dimensions are inputs"
            )
    if config.changes_stream:
        raise ValueError(
            "parametrization='completep' needs blocks that add to the residual stream, and a part changes it"
        )
    if config.norm_position != "pre" or not config.norm_gain:  # the last norm scales the logits
        raise ValueError("parametrization='completep' needs norm_position='pre' and norm_gain=True")
    optimizer, schedule = arguments.optim.value, arguments.lr_scheduler_type.value
    if not optimizer.startswith("adamw"):
        raise ValueError(f"optim={optimizer!r}: parametrization='completep' needs an AdamW, such as 'adamw_torch'")
    if schedule in ("reduce_lr_on_plateau", "greedy"):  # whose lowest rate is not a share of each group's own
        raise ValueError(
            f"lr_scheduler_type={schedule!r} has one lowest rate for all, which parametrization='completep' cannot use"
        )


def completep_factors(model: PreTrainedModel, base_sizes: Mapping[str, int]) -> dict[str, Factors]:
    """Returns the factors of every parameter of a model, by name.

    An input of a matrix counts as wide if there are twice as many in a model of twice the width.
    """
    config = model.config
    width = config.hidden_size / base_sizes["hidden_size"]
    depth = config.num_hidden_layers / base_sizes.get("num_hidden_layers", config.num_hidden_layers)
    doubled = shapes_of(_twice_as_wide(config))
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings.add(model.get_output_embeddings().weight)
    if model.base_model.embed_norm is not None:
        embeddings.update(model.base_model.embed_norm.parameters())
    last = set(model.base_model.norm.parameters())
    ends = set()
    for module in model.modules():
        if getattr(module, "ends_sublayer", False):
            ends.update(module.parameters())
    found = {}
    for name, parameter in model.named_parameters():
        inputs = width if math.prod(doubled[name][1:]) > math.prod(parameter.shape[1:]) else 1.0
        if parameter in embeddings:
            found[name] = Factors(1.0, 1.0, 1 / width)
        elif parameter in last:
            found[name] = Factors(1 / width, 1 / width, 1.0)
        elif parameter in ends:  # initial values are divided by the root of the depth already
            found[name] = Factors(1 / math.sqrt(inputs * depth), 1 / (inputs * depth), 1 / width)
        else:
            found[name] = Factors(1 / math.sqrt(inputs), 1 / inputs, 1 / (width * depth))
    return found


def _twice_as_wide(config: NLQConfig) -> NLQConfig:
    values = config.to_dict()
    values["head_dim"] = config.head_dim
    for fields in (values, *(values.get("per_layer_config") or {}).values()):
        fields.update({name: 2 * fields[name] for name in _WIDTHS if fields.get(name) is not None})
    return type(config)(**values)


@torch.no_grad()
def scale_initial_values(model: PreTrainedModel, factors: Mapping[str, Factors]) -> None:
    for name, parameter in model.named_parameters():
        parameter.mul_(factors[name].initial)


def split_groups(optimizer: torch.optim.Optimizer, model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Splits the groups of a new Adam, so that each parameter has its own settings."""
    # Compiled and checkpointed modules have other names
    wrapper = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
    names = {parameter: wrapper.sub("", name) for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        members = defaultdict(list)
        for parameter in group["params"]:
            members[factors[names[parameter]]].append(parameter)
        # The first group has the learning rate that Trainer logs
        for own, parameters in sorted(members.items(), key=lambda item: -item[0].learning_rate):
            settings = {"lr": group["lr"] * own.learning_rate, "eps": group["eps"] * own.epsilon}
            settings["weight_decay"] = group["weight_decay"] / own.learning_rate
            groups.append({**group, **settings, "params": parameters})
    optimizer.param_groups[:] = groups

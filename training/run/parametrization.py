"""CompleteP: a learning rate found with a small model suits wider and deeper ones (Dey et al. 2025, arXiv 2505.01618).

It goes on from the maximal update parametrization (Yang et al. 2022, arXiv 2203.03466), which is about width alone. A model `m`
times as wide and `l` times as deep as its base model would multiply the output of each sub-layer by `1 / l`, and the logits by
`1 / m`. Adam's steps do not depend on the scale of a gradient. So a multiplier can as well stand in the initial values and the
learning rate of the parameters before it: the model stays as it is, and nothing about it is left to be published.

| parameters | initial values | learning rate | Adam's epsilon |
|---|---|---|---|
| embeddings, LM head | 1 | 1 | 1 / m |
| matrices with `m` times the inputs | 1 / sqrt(m) | 1 / m | 1 / (m l) |
| the same at the end of a sub-layer | 1 / (l sqrt(m)) | 1 / (m l) | 1 / m |
| vectors of a layer; biases at the end of a sub-layer | 1; 1 / l | 1; 1 / l | 1 / (m l); 1 / m |
| norm before the LM head | 1 / m | 1 / m | 1 |

Each number is a factor beside what a base model has. Weight decay is divided by the factor of the learning rate: what a step
takes away stays the same share.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_nlq import NLQConfig

from ..parameters import shapes_of


@dataclass(frozen=True)
class Factors:
    """What a parameter has in comparison with that of the base model.

    Attributes:
        initial: factor of its initial values, beside what the model class gives them.
        learning_rate, epsilon: factors of Adam's settings. Weight decay is divided by that of the learning rate.
    """

    initial: float
    learning_rate: float
    epsilon: float


def check_completep(config: PreTrainedConfig, base: PreTrainedConfig, optimizer: str) -> None:
    """Checks that a model can have `parametrization: completep`.

    Args:
        config: its configuration.
        base: that of its base model.
        optimizer: `optim` of `TrainingArguments`.

    Raises:
        ValueError: naming the field, its value, and what is allowed.
    """
    if not isinstance(config, NLQConfig):
        raise ValueError(f"parametrization='completep' needs an NLQ model, and this one is of type {config.model_type!r}")
    if config.norm_position != "pre" or not config.norm_gain:
        raise ValueError(
            f"norm_position={config.norm_position!r} and norm_gain={config.norm_gain} must be 'pre' and True with "
            "parametrization='completep', which scales the logits by the last norm"
        )
    if config.head_dim != base.head_dim:
        raise ValueError(
            f"base_switches give head_dim={base.head_dim}, and it must be the model's {config.head_dim}: with "
            "parametrization='completep' a wider model has more heads"
        )
    if not optimizer.startswith("adamw"):
        raise ValueError(f"optim={optimizer!r} must be an AdamW, such as 'adamw_torch', with parametrization='completep'")


def completep_factors(model: PreTrainedModel, base: PreTrainedConfig) -> dict[str, Factors]:
    """The factors of every parameter of a model, by name.

    Args:
        model: an NLQ language model.
        base: the configuration of its base model: the same switches, another width and depth.

    Raises:
        ValueError: if the base model lacks a parameter.
    """
    shapes = shapes_of(base)
    width = model.config.hidden_size / base.hidden_size
    depth = model.config.num_hidden_layers / base.num_hidden_layers
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings.add(model.get_output_embeddings().weight)
    last = set(model.base_model.norm.parameters())
    ends = {
        parameter for module in model.modules() if getattr(module, "ends_sublayer", False) for parameter in module.parameters()
    }
    found = {}
    for name, parameter in model.named_parameters():
        if parameter in embeddings:
            found[name] = Factors(1.0, 1.0, 1 / width)
        elif parameter in last:
            found[name] = Factors(1 / width, 1 / width, 1.0)
        else:
            before = shapes.get(re.sub(r"(?<=\.layers\.)\d+", lambda index: str(int(index[0]) % base.num_hidden_layers), name))
            if before is None:
                raise ValueError(f"base_switches make a model without the parameter {name}; it must have the same switches")
            inputs = math.prod(parameter.shape[1:]) / math.prod(before[1:])
            if parameter in ends:  # the model class divides their initial values by the square root of the depth already
                found[name] = Factors(1 / math.sqrt(inputs * depth), 1 / (inputs * depth), 1 / width)
            else:
                found[name] = Factors(1 / math.sqrt(inputs), 1 / inputs, 1 / (width * depth))
    return found


@torch.no_grad()
def scale_initial_values(model: PreTrainedModel, factors: Mapping[str, Factors]) -> None:
    """Multiplies the initial values of matrices and of the last norm by their factors."""
    for name, parameter in model.named_parameters():
        parameter.mul_(factors[name].initial)


def split_groups(optimizer: torch.optim.Optimizer, model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Splits the groups of an Adam that has not made a step yet, so that each parameter has its own settings."""
    # A compiled model has another name
    names = {parameter: name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        members = defaultdict(list)
        for parameter in group["params"]:
            members[factors[names[parameter]]].append(parameter)
        # The first group has the learning rate that Trainer logs
        for own, parameters in sorted(members.items(), key=lambda item: -item[0].learning_rate):
            groups.append(
                {
                    **group,
                    "params": parameters,
                    "lr": group["lr"] * own.learning_rate,
                    "eps": group["eps"] * own.epsilon,
                    "weight_decay": group["weight_decay"] / own.learning_rate,
                }
            )
    optimizer.param_groups[:] = groups

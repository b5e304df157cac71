"""Tensor and pipeline parallelism: what one process holds of a model that Transformers has split.

Under tensor parallelism, linear layers are split by the plan of the configuration, and each process computes some of the
heads. Tensors that stay whole are cut where the heads begin: the identity term and `f`, whose norms need whole rows, and
parameters with a part for each head. Their gradients are whole on every process.

Under pipeline parallelism, a process holds some of the layers. Transformers puts a `PipelineIdentityLayer` in the place of each
other layer.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer


if torch.distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def own_heads(states: torch.Tensor, mesh: "DeviceMesh | None", dim: int) -> torch.Tensor:
    """Returns the part of this process's heads.

    Args:
        states: a tensor that is equal on all processes, with the heads in order along `dim`.
        mesh: the processes that share the heads. `None` without tensor parallelism, which returns the tensor itself.
        dim: the dimension of the heads, or of the columns of all heads.
    """
    if mesh is None:
        return states
    return DTensor.from_local(states, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(dim)]).to_local()


def shared_by_heads(parameter: torch.Tensor, mesh: "DeviceMesh | None") -> torch.Tensor:
    """Returns a parameter that all heads use. Its gradient is the sum over the heads of all processes.

    Args:
        parameter: a tensor that is equal on all processes.
        mesh: as in `own_heads`.
    """
    if mesh is None:
        return parameter
    return DTensor.from_local(parameter, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_processes(states: torch.Tensor, mesh: "DeviceMesh") -> torch.Tensor:
    """Returns the sum of a tensor over all processes that share the heads. Each of them uses it for its own heads.

    Args:
        states: a part of the sum.
        mesh: the processes.
    """
    total = DTensor.from_local(states, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return shared_by_heads(total.to_local(), mesh)


def check_sizes(config: PreTrainedConfig, distributed_config: DistributedConfig, can_be_staged: bool) -> None:
    """Checks that a model can be split.

    Args:
        config: the configuration of the model.
        distributed_config: the sizes `tp_size` and `pp_size`.
        can_be_staged: whether the class of the model can be split into pipeline stages.

    Raises:
        ValueError: if not.
    """
    tp_size, pp_size = distributed_config.tp_size, distributed_config.pp_size
    if config.num_attention_heads % tp_size or config.num_key_value_heads % tp_size:
        raise ValueError(
            f"tp_size={tp_size} must divide num_attention_heads={config.num_attention_heads} and "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if tp_size > 1 and isinstance(distributed_config.tp_plan, dict):
        raise ValueError("tp_plan: NLQ models are split by their own plan only; leave it out, or set it to 'auto'")
    if tp_size > 1 and pp_size > 1:
        # Transformers 5.23 looks for the layers of the other stages when it splits those of this one
        raise ValueError(f"tp_size={tp_size} with pp_size={pp_size} is not supported by Transformers; set one of them to 1")
    if pp_size > config.num_hidden_layers:
        raise ValueError(f"pp_size={pp_size} must be at most num_hidden_layers={config.num_hidden_layers}")
    if pp_size > 1 and not can_be_staged:
        raise ValueError(f"pp_size={pp_size}: pipeline stages exist for NLQForCausalLM only; use tp_size for this class")


def own_layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the layers that this pipeline stage computes; all of them without stages."""
    return [layer for layer in layers if not isinstance(layer, PipelineIdentityLayer)]


def flat_keywords(forward: Callable) -> Callable:
    """Returns a `forward` that also takes its keyword arguments in one dictionary named `kwargs`.

    Transformers' pipeline passes those arguments of a call so that `forward` does not name. A model would not find them.
    """

    @functools.wraps(forward)
    def flat_forward(*args, kwargs: dict | None = None, **others):
        return forward(*args, **others, **(kwargs or {}))

    return flat_forward


def refuse_lost_outputs(forward: Callable) -> Callable:
    """Returns the `forward` of a pipeline, which returns logits and the cache only, with an error where more is asked for."""

    @functools.wraps(forward)
    def pipeline_forward(*args, **inputs):
        for name in ("labels", "output_attentions", "output_hidden_states"):
            value = inputs.get(name)
            if value is not None and value is not False:
                raise ValueError(f"{name}: a pipeline of Transformers returns logits and the cache only; load without pp_size")
        return forward(*args, **inputs)

    return pipeline_forward

"""The base class of the parts of an attention layer, and what a part may read and change.

Model, configuration, backends, cache, FLOPs and conversion learn everything about a part from its attributes and
methods.

Shapes: batch, heads (of queries), groups (of keys and values), query (tokens of this call), key (cached tokens and
the tokens of this call), head_dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache

from .masking_nlq import TokenContext


if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Under tensor parallelism, linear layers are split by the plan of the configuration, and each process computes some of
# the heads. Tensors that stay whole are cut where the heads begin: the identity term, `f`, because its norms need
# whole rows, and parameters with a part for each head. Their gradients are whole on every process. A module that cuts
# has an attribute `tp_mesh`: the processes that share the heads, or `None`.


def own_heads(states: torch.Tensor, mesh: "DeviceMesh | None", dim: int) -> torch.Tensor:
    """Returns the heads of this process, along `dim` of a tensor that is equal on all processes."""
    if mesh is None:
        return states
    replicated = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(dim)]).to_local()


def shared_by_heads(parameter: torch.Tensor, mesh: "DeviceMesh | None") -> torch.Tensor:
    """Returns a parameter that all heads use. Its gradient is the sum over the heads of all processes."""
    if mesh is None:
        return parameter
    return DTensor.from_local(parameter, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_processes(states: torch.Tensor, mesh: "DeviceMesh") -> torch.Tensor:
    """Returns the sum of a tensor over all processes that share the heads. Each of them uses it for its own heads."""
    total = DTensor.from_local(states, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return shared_by_heads(total.to_local(), mesh)


class ScoreBias(NamedTuple):
    """A bias of the scores that is a difference, `query_i - key_j`, which backends add without a matrix of it.

    Attributes:
        query: `(batch, heads, query)`; better in float64, because the difference of two large sums must be exact.
        key: `(batch, heads, key)`.
    """

    query: torch.Tensor
    key: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix `(batch, heads, query, key)`."""
        return (self.query[..., :, None] - self.key[..., None, :]).to(dtype)


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention layer, as its parts see it.

    Attributes:
        layer: the attention layer, an `NLQAttention`.
        hidden_states: `(batch, query, hidden)`, its input.
        token_context: positions, padding and visible-key counts, for parts with `needs_token_context`.
        first_values: `(batch, query, groups, head_dim)`, the values of the model's first layer, for parts with
            `needs_first_values`.
        cache: the cache of the call, or `None`.
        values: `(batch, groups, query, head_dim)`, the values of this call's tokens; set after `change_qkv`.
        source: `(batch, key, hidden)`, the tokens of an encoder that keys and values are projected from; empty if the
            cache has their keys and values already. `None` in self-attention.
        states: the `token_state` of all keys by the name of the part, `(batch, groups, key, state_size)`; set after
            the cache.
    """

    layer: nn.Module
    hidden_states: torch.Tensor
    token_context: TokenContext | None = None
    first_values: torch.Tensor | None = None
    cache: Cache | None = None
    source: torch.Tensor | None = None
    values: torch.Tensor | None = None
    states: dict[str, torch.Tensor] | None = None

    @property
    def tp_mesh(self) -> "DeviceMesh | None":
        """The processes that share the heads, or `None`."""
        return self.layer.tp_mesh

    def store_state(self, name: str, state: torch.Tensor) -> None:
        """Replaces a part's state of all keys, `(batch, groups, key, ...)`, in the cache."""
        self.states[name] = state
        layer = self.cache.layers[self.layer.layer_idx]
        states = [self.states[part.name] for part in self.layer.parts_with("token_state")]
        keys, columns = layer.keys[..., : self.layer.head_dim], to_columns(states, layer.keys.dtype)
        if layer.is_compileable:
            layer.keys[..., self.layer.head_dim :] = columns
        else:
            layer.keys = torch.cat([keys, columns], dim=-1)  # not in place: a gradient may need the old state

    def change_mlp(self, hook: str, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs one of the `MLP_HOOKS`, which change what the MLP computes."""
        return self.layer.change_mlp(hook, self, *states) if self.layer.parts_with(hook) else states


# Methods that give a module its initial values, of this package and of PyTorch
_RESETS = ("initialize", "reset_parameters", "_reset_parameters")


class _EqualDraws(TorchFunctionMode):
    """Inside, equal draws of random numbers give equal numbers, wherever they stand."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        torch.default_generator.manual_seed(0)
        return func(*args, **(kwargs or {}))


class AttentionPart(nn.Module):
    """One change of an attention layer, beside its projections, positions and activation.

    A subclass sets the attributes, makes its parameters in `__init__`, and overrides the hooks that it needs. The
    others cost nothing. The hooks run in this order: `change_input`, the projections, `change_qkv`, rotary positions,
    `token_state`, the cache, `score_bias`, `change_cached_qkv`, the scores, `change_scores`, the attention weights,
    `change_weights` (`change_returned_weights` if they are returned), `change_output`, the output projection; and in
    the MLP after the attention, `change_mlp_input` and `change_mlp_inner`. A layer holds all of its scores in memory
    for `change_scores`, and the weights of some queries at a time for `change_weights`. The layer calls the part for
    each hook, because offloading, ZeRO-3 and FSDP give a module its parameters when it is called. So a hook reads
    parameters of its own part only, and calls other modules.

    Attributes:
        name: the field of the configuration that turns it on, or for a user's part its name in `attention_parts`.
        formula: what it computes, in one line.
        source: where the formula comes from.
        needs_token_context: whether its hooks read `call.token_context`.
        needs_first_values: whether they read `call.first_values`. The first layer never has such a part.
        needs_exact_output: whether `change_output` must get outputs that are not rounded to half precision. Attention
            is then computed in float32, except by flash attention, which cannot.
        activations: the attention activations that it can have; all if empty.
        causal_only: whether it needs an order of the tokens, so that an encoder (`is_causal=False`) cannot have it.
        needs_own_value: whether it reads `call.values`, which cross-attention lacks.
        supports_crop: whether tokens can be taken back from a cache. If not, it raises `ValueError` where it notices.
        state_size: numbers that it keeps in the cache for each token and group of keys.
        start: how `nlq convert` adds it to a trained layer without changing the outputs: `"zero"` sets all its
            parameters to 0; any other text is the reason why it cannot. `start_without_effect` may do something else.
    """

    tp_mesh = None
    name: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_token_context: ClassVar[bool] = False
    needs_first_values: ClassVar[bool] = False
    activations: ClassVar[tuple[str, ...]] = ()
    causal_only: ClassVar[bool] = False
    needs_own_value: ClassVar[bool] = False
    supports_crop: ClassVar[bool] = True

    state_size = 0
    needs_exact_output = False
    start = "it has no start without effect"

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        """`config` is the `NLQConfig` of the layer, with the values of its own; `layer_idx` its number."""
        super().__init__()
        self.config, self.layer_idx = config, layer_idx

    @classmethod
    def has_hook(cls, hook: str) -> bool:
        """Tells whether the part overrides one of the `HOOKS`."""
        return getattr(cls, hook) is not getattr(AttentionPart, hook)

    @classmethod
    def of_own_tokens(cls) -> bool:
        """Tells whether it needs the order or the values of the query's own tokens, which cross-attention lacks."""
        return cls.causal_only or cls.needs_first_values or cls.needs_own_value

    def forward(self, hook: str, *inputs) -> Any:
        """Runs the hook of this name, or `measure`. A part cannot override it."""
        return getattr(self, hook)(*inputs)

    # Class methods for the configuration; `config` is the `NLQConfig` of one layer

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Raises `ValueError` for the configuration of a layer that the part cannot have."""

    @classmethod
    def query_heads(cls, config: PreTrainedConfig) -> int:
        """Returns how many heads of queries the layer computes."""
        return config.num_attention_heads

    @classmethod
    def product_cost(cls, config: PreTrainedConfig) -> float:
        """Returns the factor of the cost of the products with keys and values."""
        return 1.0

    @classmethod
    def calls_per_token(cls, config: PreTrainedConfig) -> dict[str, int]:
        """Returns how often each token passes through a linear layer of the attention, where it is not once."""
        return {}

    @classmethod
    def refuse_split(cls, config: PreTrainedConfig) -> str | None:
        """Returns the reason why tensor parallelism cannot give each process some of the heads, or `None`."""

    @classmethod
    def refuse_paged(cls, config: PreTrainedConfig) -> str | None:
        """Returns the reason why continuous batching, with its paged cache, cannot have the part, or `None`."""
        if cls.has_hook("token_state") or cls.has_hook("score_bias") or cls.conv_states(config):
            return "the paged cache has no place for what it keeps, and its keys belong to several texts"
        return "the paged cache has keys and values of other shapes" if cls.has_hook("change_cached_qkv") else None

    @classmethod
    def refuse_change(cls, before: PreTrainedConfig, after: PreTrainedConfig) -> str | None:
        """Returns the reason why a trained layer would compute something else in another configuration, or `None`."""

    @classmethod
    def conv_states(cls, config: PreTrainedConfig) -> int:
        """Returns of how many convolutions Transformers' cache layers keep the last tokens. A layer has one such part.

        `config.first_conv_state` is the number of its first state there.
        """
        return 0

    @classmethod
    def shard_dim(cls, parameter: str) -> str:
        """Returns what a parameter's rows are: heads of `"query"` or `"key_value"`, or the MLP's `"inner"` width."""
        return "query"

    @classmethod
    def split_layers(cls, config: PreTrainedConfig) -> dict[str, str]:
        """Returns the linear layers that tensor parallelism splits, by name in the attention layer, and how."""
        return {}

    @classmethod
    def layer_modules(cls, config: PreTrainedConfig) -> dict[str, nn.Module]:
        """Returns modules that the layer itself holds, under names that other programs know."""
        return {}

    def initialize(self) -> None:
        """Sets parameters and buffers to the values that `__init__` gives them.

        Parameters of modules inside the part that `__init__` leaves at PyTorch's defaults, as in a plain `nn.Linear`,
        keep the model's initialisation.
        """
        direct = {name for name, _ in self.named_parameters(recurse=False)}
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = {name for name, v in tensors.items() if v.is_meta or getattr(v, "_is_hf_initialized", False)}
        if inner := tensors.keys() - direct - loaded:
            inner -= self._default_parameters()
        if not direct | inner:
            return
        # Only its direct parameters take numbers from the model's random stream
        with torch.random.fork_rng(devices=[], enabled=not direct), torch.device("cpu"):
            if not direct:
                torch.default_generator.manual_seed(int(torch.randint(2**62, ())))
            fresh = type(self)(self.config, self.layer_idx)
        values = dict(fresh.named_parameters(remove_duplicate=False)) | dict(fresh.named_buffers())
        for name in direct | inner:
            init.copy_(tensors[name], values[name])

    @torch.no_grad()
    def _default_parameters(self) -> set[str]:
        """Returns the names of inner parameters that `__init__` leaves at defaults which the model replaces.

        Each module of a new part is reset while all random draws are equal. A parameter that `__init__` sets has
        another value afterwards, or had been written more often.
        """
        names = set()
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), _EqualDraws(), torch.device("cpu"):
            fresh = type(self)(self.config, self.layer_idx)
            initial = {
                name: (value.clone(), value._version) for name, value in fresh.named_parameters(remove_duplicate=False)
            }
            for path, module in list(fresh.named_modules())[1:]:
                is_ours = hasattr(module, "initialize")
                classes = [type(module)] if is_ours else type(module).__mro__
                bases = [base for base in classes if is_ours or base.__module__.startswith("torch.nn.")]
                resets = (getattr(base, name, None) for base in bases for name in _RESETS)
                parameters = {f"{path}.{name}": value for name, value in module.named_parameters(recurse=False)}
                if not parameters or (reset := next(filter(None, resets), None)) is None:
                    continue
                before = {name: value._version for name, value in parameters.items()}
                reset(module)
                after = {name: value._version for name, value in parameters.items()}
                unset = {name for name, value in parameters.items() if torch.equal(value, initial[name][0])}
                if not is_ours:
                    PreTrainedModel._init_weights(self, module)
                    unset = {name for name in unset if initial[name][1] == after[name] - before[name]}
                    # Else Transformers leaves it
                    unset = {name for name in unset if parameters[name]._version > after[name]}
                names |= unset
        return names

    def scale_keys(self, factor: float) -> None:
        """Keeps the part's output when a conversion multiplies the keys by `factor`, and the scores by its inverse."""

    def start_without_effect(self, layer: nn.Module) -> str | None:
        """Makes a trained layer compute what it computed without the part, or returns why it cannot."""
        if self.start != "zero":
            return self.start
        for parameter in self.parameters():
            parameter.zero_()
        return None

    def measure(self, call: AttentionCall) -> dict[str, torch.Tensor]:
        """Returns numbers of each head, `(heads,)` by name, that `nlq explore` shows of a batch of one text."""
        return {}

    # Default hooks. A layer calls only those that a part overrides

    def change_input(self, call: AttentionCall, hidden_states: torch.Tensor) -> torch.Tensor:
        """Changes the input of the layer, `(batch, query, hidden)`, which the other hooks then read."""

    def change_qkv(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Changes the new tokens' states `(batch, query, heads or groups, head_dim)`, before positions."""

    def token_state(self, call: AttentionCall) -> torch.Tensor:
        """Returns what the cache keeps of each new token, `(batch, groups, query, state_size)`, in float32 or more."""

    def change_cached_qkv(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Changes queries `(batch, heads, query, head_dim)`, and all keys and values, `(batch, groups, key, ...)`."""

    def score_bias(self, call: AttentionCall, state: torch.Tensor) -> ScoreBias:
        """Returns the bias, from the `token_state` of all keys, `(batch, groups, key, state_size)`."""

    def change_scores(self, call: AttentionCall, scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """Changes the scores `(batch, heads, query, key)`; `visible` broadcasts to them, or is `None`."""

    def change_weights(
        self, call: AttentionCall, weights: torch.Tensor, own_columns: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Changes the weights of some queries before they meet the values. A layer has one such part.

        Args:
            weights: `(batch, heads, query, key)`, of some of the call's queries. So only `call.layer` may be read.
            own_columns: `(batch, heads, query, ...)`, what `change_cached_qkv` put after the queries' columns.
        """

    def change_returned_weights(self, call: AttentionCall, weights: torch.Tensor) -> torch.Tensor:
        """Changes the weights `(batch, heads, query, key)` that `output_attentions=True` returns."""

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        """Changes the outputs of the heads, `(batch, query, heads, head_dim)`."""

    def change_mlp_input(self, call: AttentionCall, hidden_states: torch.Tensor) -> torch.Tensor:
        """Changes the input of the MLP, `(batch, query, hidden)`."""

    def change_mlp_inner(self, call: AttentionCall, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Changes what the MLP's activation gets, `(batch, query, intermediate)`: of a gated MLP, gate and factor."""


# Hooks of scores and weights, which linear attention does not have
WEIGHT_HOOKS = (
    "token_state",
    "score_bias",
    "change_cached_qkv",
    "change_scores",
    "change_weights",
    "change_returned_weights",
)
MLP_HOOKS = ("change_mlp_input", "change_mlp_inner")
HOOKS = ("change_input", "change_qkv", *WEIGHT_HOOKS, "change_output", *MLP_HOOKS)


def materialized_by(parts: Iterable[AttentionPart | type[AttentionPart]]) -> Literal["rows", "all"] | None:
    """Returns what a layer with these parts must hold: nothing, the weights of some queries, or all scores."""
    if any(part.has_hook("change_scores") for part in parts):
        return "all"
    return "rows" if any(part.has_hook("change_weights") for part in parts) else None


# What half precision keeps of a number. Float16 ends at 65504, so its first column counts in larger units
_UNITS = {torch.bfloat16: (1.0, 1.0, 1.0), torch.float16: (2.0**16, 1.0, 1.0)}


def to_columns(states: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Packs states `(batch, groups, query, size)` into columns that a cache of this type holds beside its keys.

    In half precision a number takes several columns, each with as much of the rest as its unit allows. The gradient
    passes through the last one, in units of 1, because in units of 2^16 it would overflow float16.
    """
    rest, columns = torch.cat(states, dim=-1), []
    for unit in _UNITS.get(dtype, (1.0,))[:-1]:
        columns.append((rest.detach() / unit).to(dtype))
        rest = rest - columns[-1].to(rest.dtype) * unit
    return torch.cat([*columns, rest.to(dtype)], dim=-1)


def from_columns(columns: torch.Tensor, parts: Sequence[AttentionPart]) -> dict[str, torch.Tensor]:
    """Unpacks what `to_columns` has packed, in at least float32, by the name of the part."""
    if (units := _UNITS.get(columns.dtype)) is not None:
        *others, last = columns.chunk(len(units), dim=-1)
        columns = sum(column.detach().float() * unit for unit, column in zip(units, others)) + last.float()
    return dict(zip((part.name for part in parts), columns.split([part.state_size for part in parts], dim=-1)))

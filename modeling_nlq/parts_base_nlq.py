"""The base class of the parts of an attention layer, and what a part may read and change.

Shapes: batch, heads (of queries), groups (of keys and values), query (tokens of this call), key (cached tokens and the
tokens of this call), head_dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache

from .cache_nlq import refuse_offloading
from .masking_nlq import TokenContext


if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# Under tensor parallelism the configuration's plan splits linear layers, and each process computes some heads. Whole
# tensors are cut where the heads begin: the identity term, `f`, because its norms need whole rows, and what belongs to
# each head. A module that cuts has an attribute `tp_mesh`: the processes that share the heads, or `None`.


def own_heads(states: Tensor, mesh, dim: int) -> Tensor:
    """Returns the heads of this process, along `dim` of a tensor that all processes have."""
    if mesh is None:
        return states
    replicated = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(dim)]).to_local()


def shared_by_heads(parameter: Tensor, mesh) -> Tensor:
    """Returns a parameter of all heads. Its gradient is the sum over the heads of all processes."""
    if mesh is None:
        return parameter
    return DTensor.from_local(parameter, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_processes(states: Tensor, mesh) -> Tensor:
    """Returns the sum of a tensor over the processes, which each uses for its heads."""
    total = DTensor.from_local(states, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return shared_by_heads(total.to_local(), mesh)


class ScoreBias(NamedTuple):
    """A bias of the scores, `query_i - key_j`, which backends add without a matrix of it.

    Better in float64, because the difference of two large sums must be exact.
    """

    query: Tensor  # (batch, heads, query)
    key: Tensor  # (batch, heads, key)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix `(batch, heads, query, key)`."""
        return (self.query[..., :, None] - self.key[..., None, :]).to(dtype)


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention layer, as its parts see it."""

    layer: nn.Module  # the attention layer, an `NLQAttention`
    hidden_states: Tensor  # (batch, query, hidden), its input
    token_context: TokenContext | None = None  # for parts with `needs_token_context`
    # (batch, query, groups, head_dim), the values of the first layer, for parts with `needs_first_values`
    first_values: Tensor | None = None
    cache: Cache | None = None
    # In cross-attention (batch, key, hidden), an encoder's tokens; empty if the cache has their keys and values
    source: Tensor | None = None
    values: Tensor | None = None  # (batch, groups, query, head_dim), of this call's tokens; after `change_qkv`
    # The `token_state` of all keys by the name of the part, (batch, groups, key, state_size); after the cache
    states: dict[str, Tensor] | None = None
    # In `change_residual`, what reads the residual stream: a sub-layer, or after the last block the final norm
    reader: Literal["attention", "cross_attention", "mlp", "final_norm"] | None = None

    @property
    def tp_mesh(self):
        return self.layer.tp_mesh

    def store_state(self, name: str, state: Tensor) -> None:
        refuse_offloading(self.cache, name)
        self.states[name] = state
        cache_layer, head_dim = self.cache.layers[self.layer.layer_idx], self.layer.head_dim
        states = [self.states[part.name] for part in self.layer.parts_with("token_state")]
        columns = to_columns(states, cache_layer.keys.dtype)
        if cache_layer.is_compileable:
            cache_layer.keys[..., head_dim:] = columns
        else:  # not in place, because a gradient may need the old state
            cache_layer.keys = torch.cat([cache_layer.keys[..., :head_dim], columns], dim=-1)

    def change_mlp(self, hook: str, *states: Tensor) -> tuple[Tensor, ...]:
        """Runs one of the `MLP_HOOKS`."""
        return self.layer.change_mlp(hook, self, *states) if self.layer.parts_with(hook) else states


# Methods that give a module its initial values
_RESETS = ("initialize", "reset_parameters", "_reset_parameters")


class _EqualDraws(TorchFunctionMode):
    """Inside, equal draws of random numbers give equal numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        torch.default_generator.manual_seed(0)
        return func(*args, **(kwargs or {}))


class AttentionPart(nn.Module):
    """One change of an attention layer, beside its projections, positions and activation.

    A subclass sets the attributes, makes its parameters in `__init__`, and overrides the hooks that it needs. They run
    in the order of `HOOKS`: rotary positions come after `change_qkv`, the cache after `token_state`, and the output
    projection after `change_output`.

    The layer calls the part for each hook, because offloading, ZeRO-3 and FSDP give a module its parameters when it is
    called. So a hook reads parameters of its part only, and calls other modules.
    """

    tp_mesh = None
    name: ClassVar[str] = ""  # the field of the configuration that turns it on, or its name in `attention_parts`
    field_type: ClassVar[Any] = bool  # of that field; without the part it is `False` or `None`
    formula: ClassVar[str] = ""
    source: ClassVar[str] = ""  # of the formula
    needs_token_context: ClassVar[bool] = False  # whether hooks read `call.token_context`
    needs_first_values: ClassVar[bool] = False  # or `call.first_values`; then the first layer does not have the part
    needs_own_value: ClassVar[bool] = False  # or `call.values`, which cross-attention lacks
    keeps_keys: ClassVar[bool] = False  # whether its `change_qkv` changes queries alone
    activations: ClassVar[tuple[str, ...]] = ()  # the attention activations that it can have; all if empty
    causal_only: ClassVar[bool] = False  # whether it needs an order of the tokens, which encoders lack
    # Whether the residual sum goes on from what `change_residual` returns, which otherwise its reader alone gets
    replaces_stream: ClassVar[bool] = False
    # Whether tokens can be taken back from a cache. If not, it raises `ValueError`
    supports_crop: ClassVar[bool] = True

    state_size = 0  # numbers that it keeps in the cache for each token and group of keys
    needs_exact_output = False  # whether `change_output` must get outputs in float32, but for flash attention
    # How `nlq convert` adds it without changing outputs: `"zero"` sets its parameters to 0, or why it cannot
    start = "it has no start without effect"

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx

    @classmethod
    def has_hook(cls, hook: str) -> bool:
        """Tells whether the part overrides one of the `HOOKS`."""
        return getattr(cls, hook) is not getattr(AttentionPart, hook)

    @classmethod
    def of_own_tokens(cls) -> bool:
        """Tells whether it needs what cross-attention lacks: an order, the tokens' own values, or the stream."""
        return cls.causal_only or cls.needs_first_values or cls.needs_own_value or cls.has_hook("change_residual")

    @classmethod
    def stream_readers(cls, config, layer_idx: int) -> list[str]:
        """Returns what reads the residual stream in a block, in order; the two of a parallel block read it once."""
        readers = ["attention"]
        if not config.parallel_residual:
            readers += ["cross_attention"] if config.cross_attention_config is not None else []
            readers += ["mlp"]
        return readers + (["final_norm"] if layer_idx == config.num_hidden_layers - 1 else [])

    def forward(self, hook: str, *inputs) -> Any:
        """Runs a hook, or `measure`. A part cannot override it."""
        return getattr(self, hook)(*inputs)

    # Class methods; `config` is the `NLQConfig` of one layer

    @classmethod
    def check(cls, config) -> None:
        """Raises `ValueError` for the configuration of a layer that the part cannot have."""

    @classmethod
    def query_heads(cls, config) -> int:
        """Returns how many heads of queries the layer computes."""
        return config.num_attention_heads

    @classmethod
    def product_cost(cls, config) -> float:
        """Returns the factor of the cost of products with keys and values."""
        return 1.0

    @classmethod
    def calls_per_token(cls, config, layer_idx: int, earlier: int) -> dict[str, float]:
        """Returns how often a token is multiplied by the matrices of a module of the layer, where it is not once.

        `earlier` is the number of outputs on the residual stream before the layer, the embeddings included.
        """
        return {}

    @classmethod
    def refuse_split(cls, config) -> str | None:
        """Returns why tensor parallelism cannot split the heads, or `None` if it can."""

    @classmethod
    def refuse_paged(cls, config) -> str | None:
        """Returns why continuous batching cannot have the part, or `None` if it can."""
        if cls.has_hook("token_state") or cls.has_hook("score_bias") or cls.conv_states(config):
            return "the paged cache has no place for what it keeps, and its keys belong to several texts"
        return "the paged cache has keys and values of other shapes" if cls.has_hook("change_cached_qkv") else None

    @classmethod
    def refuse_change(cls, before, after) -> str | None:
        """Returns why a trained layer would compute something else after a change, or `None`."""

    @classmethod
    def conv_states(cls, config) -> int:
        """Returns of how many convolutions the cache keeps tokens, from state `config.first_conv_state` on."""
        return 0

    @classmethod
    def shard_dim(cls, parameter: str) -> str:
        """Returns what a parameter's rows are: heads (`"query"`, `"key_value"`) or the MLP's `"inner"` width."""
        return "query"

    @classmethod
    def split_layers(cls, config) -> dict[str, str]:
        """Returns the linear layers that tensor parallelism splits, by name, and how."""
        return {}

    @classmethod
    def layer_modules(cls, config) -> dict[str, nn.Module]:
        """Returns modules that the layer itself holds, under these names."""
        return {}

    def initialize(self) -> None:
        """Sets what `__init__` has set, and leaves inner modules that are at PyTorch's defaults to the model."""
        direct = {name for name, _ in self.named_parameters(recurse=False)}
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = {name for name, v in tensors.items() if v.is_meta or getattr(v, "_is_hf_initialized", False)}
        if inner := tensors.keys() - direct - loaded:
            inner -= self._default_parameters()
        if not direct | inner:
            return
        # Only direct parameters draw from the model's random stream
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

        A parameter is at its default if a reset of its module, with equal random draws, gives the same numbers, and
        `__init__` wrote it no more often than the reset does.
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
        """Keeps the part's output when a conversion multiplies keys by `factor`, and scores by its inverse."""

    def start_without_effect(self, layer: nn.Module) -> str | None:
        """Makes a trained layer compute the same as without the part, or returns why it cannot."""
        if self.start != "zero":
            return self.start
        for parameter in self.parameters():
            parameter.zero_()
        return None

    def measure(self, call) -> dict[str, Tensor]:
        """Returns numbers of each head, `(heads,)` by name, of a batch of one text, for `nlq explore`."""
        return {}

    # The hooks; `call` is an `AttentionCall`

    def change_residual(self, call, states: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Changes what `call.reader` reads of the residual stream, `(batch, query, hidden)`.

        `earlier` are the embeddings and what each earlier sub-layer added to the stream, in the same shape. Of `call`
        it reads `layer` and `reader`.
        """

    def change_input(self, call, hidden_states: Tensor) -> Tensor:
        """Changes the input of the layer, `(batch, query, hidden)`, which the other hooks then read."""

    def change_qkv(self, call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Changes the new tokens' states `(batch, query, heads or groups, head_dim)`, before positions."""

    def token_state(self, call) -> Tensor:
        """Returns what the cache keeps of each new token, `(batch, groups, query, state_size)`, in float32 or more."""

    def change_cached_qkv(self, call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Changes queries `(batch, heads, query, head_dim)`, and all keys and values, `(batch, groups, key, ...)`."""

    def score_bias(self, call, state: Tensor) -> ScoreBias:
        """Returns the bias, from the `token_state` of all keys, `(batch, groups, key, state_size)`."""

    def change_scores(self, call, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Changes the scores `(batch, heads, query, key)`, which are all in memory; `visible` broadcasts to them."""

    def change_weights(self, call, weights: Tensor, own_columns: Tensor, key: Tensor) -> Tensor:
        """Changes the weights `(batch, heads, query, key)` of some queries; of `call` it reads `layer` alone.

        `own_columns` are what `change_cached_qkv` put after the queries' columns.
        """

    def change_returned_weights(self, call, weights: Tensor) -> Tensor:
        """Changes the weights `(batch, heads, query, key)` that `output_attentions=True` returns."""

    def change_output(self, call, heads: Tensor) -> Tensor:
        """Changes the outputs of the heads, `(batch, query, heads, head_dim)`."""

    def change_mlp_input(self, call, hidden_states: Tensor) -> Tensor:
        """Changes the input of the MLP, `(batch, query, hidden)`."""

    def change_mlp_inner(self, call, *states: Tensor) -> tuple[Tensor, ...]:
        """Changes what the MLP's activation gets, `(batch, query, intermediate)`; of a gated MLP, gate and factor."""


# Linear attention lacks these
WEIGHT_HOOKS = ("token_state", "score_bias", "change_cached_qkv")
WEIGHT_HOOKS += ("change_scores", "change_weights", "change_returned_weights")
MLP_HOOKS = ("change_mlp_input", "change_mlp_inner")
HOOKS = ("change_residual", "change_input", "change_qkv", *WEIGHT_HOOKS, "change_output", *MLP_HOOKS)


def materialized_by(parts: Iterable[AttentionPart | type[AttentionPart]]) -> Literal["rows", "all"] | None:
    """Returns what a layer with these parts must hold in memory."""
    if any(part.has_hook("change_scores") for part in parts):
        return "all"
    return "rows" if any(part.has_hook("change_weights") for part in parts) else None


# The units of columns. Float16 ends at 65504
_UNITS = {torch.bfloat16: (1.0, 1.0, 1.0), torch.float16: (2.0**16, 1.0, 1.0)}


def to_columns(states: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Packs states `(batch, groups, query, size)` into columns that a cache of this type holds beside its keys.

    In half precision a number takes several columns. The gradient passes through the last one, because in units of
    2^16 it would overflow float16.
    """
    rest, columns = torch.cat(states, dim=-1), []
    for unit in _UNITS.get(dtype, (1.0,))[:-1]:
        columns.append((rest.detach() / unit).to(dtype))
        rest = rest - columns[-1].to(rest.dtype) * unit
    return torch.cat([*columns, rest.to(dtype)], dim=-1)


def join_columns(columns: Tensor) -> Tensor:
    """Returns the states side by side, which `to_columns` has packed."""
    if (units := _UNITS.get(columns.dtype)) is not None:
        *others, last = columns.chunk(len(units), dim=-1)
        columns = sum(column.detach().float() * unit for unit, column in zip(units, others)) + last.float()
    return columns


def from_columns(columns: Tensor, parts: Sequence[AttentionPart]) -> dict[str, Tensor]:
    """Unpacks what `to_columns` has packed, by the name of the part."""
    columns = join_columns(columns)
    return dict(zip((part.name for part in parts), columns.split([part.state_size for part in parts], dim=-1)))

"""Makes the tables of `attention.py --device cuda`: causal attention, forward, and forward and backward, at constant tokens.

For each width of a head and each length, the candidates take turns with a large product of matrices, the roofline. The
candidates are softmax on SDPA's flash backend, the baseline of all ratios; softmax on its cuDNN backend; FlexAttention with
softmax and with the log form of every activation that is never negative; `nlq_triton` with every activation; and `eager` where
its n x n matrices fit. TFLOP/s count the products of the causal half only, as FlashAttention's papers do. Memory is the peak
of the caching allocator beyond the inputs.

Wrong results are not timed. `nlq_tiled` in float32 must agree with `eager` on a short text of odd length. At each length,
outputs and gradients of an activation are compared with those of `nlq_tiled` in float32, and those of softmax with SDPA in
float32. A candidate that is wrong or fails gets a dash and its reason instead of a figure. The others continue.
"""

import argparse
import contextlib
import functools
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measure import (
    MATMUL_SIZE,
    Clock,
    attempt,
    attention_layer,
    compiled_without_fallback,
    describe_gpu,
    make_matmul,
    quartiles,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, Needs
from modeling_nlq.flex_nlq import FlexMask
from modeling_nlq.masking_nlq import Visibility, make_visibility


Candidate = tuple[str, str]  # backend, activation

OURS = "nlq_triton"
PINNED = {"sdpa": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
BASELINE = ("sdpa", "softmax")
MATMUL = ("matmul", "")

# As in FlashAttention's papers (Dao 2023, arXiv 2307.08691, section 4.1): batches of 16k tokens, a hidden size of 2048
TOKENS, HIDDEN_SIZE = 16_384, 2_048
DEFAULTS = {
    "dtypes": ["bfloat16"],
    "lengths": [1024, 2048, 4096, 8192, 16_384],
    "batch": None,
    "heads": None,
    "head_dim": [64, 128],
}
COMPUTED = {"batch": f"{TOKENS} / length", "heads": f"{HIDDEN_SIZE} / head_dim"}  # the help text for defaults of None
# The cost of a direction in forward passes: backward has five products, forward has two
DIRECTIONS = {"forward": 1.0, "forward and backward": 3.5}

GATE_LENGTH = 600  # no multiple of any tile
# Errors are relative to the norm of a part of the text, because late positions average over many values and are small
PARTS = 8
# Needed even in float32: a score next to relu's kink may round to either side, and the gradient differs there
LEAST_TOLERANCE = 5e-3


class Case(NamedTuple):
    """One group of candidates that are timed together."""

    head_dim: int
    length: int
    direction: str


class Result(NamedTuple):
    """The seconds of each round, and the peak bytes of memory (`None` if the device does not count them)."""

    times: list[float]
    memory: int | None


class Failure(NamedTuple):
    """The reason why a candidate has no figure."""

    case: Case
    candidate: Candidate
    reason: str


class WrongResult(Exception):
    """An output or a gradient differs from the formula."""


@dataclass
class Tables:
    """All measurements in one dtype.

    Attributes:
        shapes: batch and heads of each head_dim and length.
        results: by case and candidate, the matrix product among them.
        failures: the candidates that are missing there.
        matmul_flops: operations of the matrix product.
    """

    shapes: dict[tuple[int, int], tuple[int, int]]
    results: dict[Case, dict[Candidate, Result]]
    failures: list[Failure]
    matmul_flops: int

    def flops(self, case: Case, candidate: Candidate) -> float:
        """Returns the operations of one call: `2 * 2 * length * length * head_dim / 2` a head forward, for a causal mask."""
        if candidate == MATMUL:
            return self.matmul_flops
        batch, heads = self.shapes[case.head_dim, case.length]
        return DIRECTIONS[case.direction] * 4 * batch * heads * case.length**2 * case.head_dim / 2

    def rate(self, case: Case, candidate: Candidate) -> float:
        """Returns TFLOP/s."""
        return self.flops(case, candidate) / statistics.median(self.results[case][candidate].times) / 1e12

    def speed(self, case: Case, candidate: Candidate, other: Candidate) -> list[float] | None:
        """Returns how many times as fast as another candidate it is: quartiles over the rounds, or `None` without figures."""
        results = self.results.get(case, {})
        if candidate not in results or other not in results:
            return None
        return quartiles(results[other].times, results[candidate].times)


class Problem:
    """Queries, keys and values, the gradient of the output, and the causal mask in each backend's form."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str, needs_block_mask: bool = False):
        """Makes random inputs `(batch, heads, length, head_dim)`, laid out in memory like the model's projections."""
        batch, heads, length, head_dim = shape
        *inputs, self.gradient = (torch.randn(batch, length, heads, head_dim, dtype=dtype, device=device) for _ in range(4))
        self.inputs = [tensor.transpose(1, 2).requires_grad_() for tensor in inputs]
        # The model too makes it once for all layers
        self.visibility = make_visibility(length, length, 0, torch.device(device))
        self.block_mask = _causal_block_mask(length, device) if needs_block_mask else None

    def forward(self, candidate: Candidate) -> torch.Tensor:
        """Returns the output `(batch, query, heads, head_dim)`."""
        return self._forward(candidate, self.inputs)

    def inference(self, candidate: Candidate) -> torch.Tensor:
        """Returns the same output without storing anything for backward."""
        with torch.no_grad():
            return self.forward(candidate)

    def training(self, candidate: Candidate) -> list[torch.Tensor]:
        """Returns the output, and the gradients of query, key and value."""
        output = self.forward(candidate)
        return [output, *torch.autograd.grad(output, self.inputs, self.gradient)]

    def expected(self, candidate: Candidate) -> list[torch.Tensor]:
        """Returns the result of `training` in float32."""
        inputs = [tensor.detach().float().requires_grad_() for tensor in self.inputs]
        output = self._forward(candidate, inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, self.gradient.float())]

    def _forward(self, candidate: Candidate, inputs: list[torch.Tensor]) -> torch.Tensor:
        backend, name = candidate
        row = ATTENTION_BACKENDS["sdpa" if backend in PINNED else backend]
        mask: Visibility | FlexMask | None = self.visibility if row.mask == "visibility" else None
        if backend == "flex_attention":
            mask = FlexMask(self.block_mask, self.visibility.visible_count)
        scaling = inputs[0].shape[-1] ** -0.5
        return row.function(attention_layer(name), *inputs, mask, scaling=scaling)[0]


def pinned(candidate: Candidate) -> contextlib.AbstractContextManager:
    """Makes SDPA use the candidate's own kernel. Enter it once for many calls, because entering takes time."""
    return sdpa_kernel(PINNED[candidate[0]]) if candidate[0] in PINNED else contextlib.nullcontext()


def _causal_block_mask(length: int, device: str) -> BlockMask:
    def is_visible(batch, head, query, key):
        return query >= key

    return create_block_mask(is_visible, None, None, length, length, device=device)


def error_of(actual: torch.Tensor, expected: torch.Tensor, axis: int) -> float:
    """Returns the norm of the difference over the norm of the expected values, in the worst of `PARTS` parts along an axis.

    A maximum over everything would miss errors at late positions, whose numbers are small.
    """
    difference = (actual.detach().float() - expected).square()
    errors = [
        (part.sum() / whole.sum()).sqrt()
        for part, whole in zip(difference.chunk(PARTS, dim=axis), expected.square().chunk(PARTS, dim=axis))
    ]
    return torch.stack(errors).max().item()  # NaN if one of them is


def check(problem: Problem, candidate: Candidate, expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Checks the results of a candidate.

    Raises:
        WrongResult: if an output or a gradient differs from the expected one by more than rounding.
    """
    tolerance = max(4 * torch.finfo(dtype).eps, LEAST_TOLERANCE)
    names = ("output", "output without gradients", "gradient of query", "gradient of key", "gradient of value")
    output, *gradients = problem.training(candidate)
    for name, actual, wanted in zip(
        names, (output, problem.inference(candidate), *gradients), (expected[0], *expected), strict=True
    ):
        error = error_of(actual, wanted, 1 if name.startswith("output") else 2)
        if not error < tolerance:
            raise WrongResult(f"{name} is off by {error:.2g}, where {tolerance:.2g} is allowed")


def label(candidate: Candidate) -> str:
    """Returns a candidate's name in the tables."""
    backend, name = candidate
    if candidate == MATMUL:
        return "matrix product"
    return f"{name}, " + {"sdpa": "SDPA flash", "sdpa_cudnn": "SDPA cuDNN", "flex_attention": "FlexAttention"}.get(
        backend, backend
    )


def format_rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def make_candidates(arguments: argparse.Namespace, ours: str) -> list[Candidate]:
    """Returns the selected pairs of backend and activation that can be computed, the baseline first."""
    candidates = [BASELINE, ("sdpa_cudnn", "softmax")]
    backends = [ours, *(name for name, wanted in (("flex_attention", arguments.flex), ("eager", arguments.eager)) if wanted)]
    for backend in backends:
        names = ["softmax", *arguments.activations] if backend == "flex_attention" else arguments.activations
        computes = ATTENTION_BACKENDS[backend].computes
        candidates += [(backend, name) for name in names if computes(Needs(get_attention_activation(name)))]
    return candidates


def gate(head_dim: int, dtype: torch.dtype, device: str, names: Iterable[str], ours: str) -> dict[Candidate, str]:
    """Compares with `eager` on a short text of odd length.

    Returns:
        The failures of NLQ's own candidates.

    Raises:
        SystemExit: if a reference is wrong.
    """
    shape, reasons = (2, 4, GATE_LENGTH, head_dim), {}
    exact, problem = Problem(shape, torch.float32, device), Problem(shape, dtype, device)
    try:
        for name in names:
            check(exact, ("nlq_tiled", name), exact.expected(("eager", name)), torch.float32)
        expected = problem.expected(("eager", "softmax"))
        with pinned(BASELINE):
            check(problem, BASELINE, expected, dtype)
    except WrongResult as error:
        raise SystemExit(f"correctness gate: nlq_tiled or SDPA: {error}; nothing is timed") from error
    for name in names:
        candidate = (ours, name)
        expected = problem.expected(("eager", name))
        if reason := attempt(label(candidate), lambda c=candidate, e=expected: check(problem, c, e, dtype)):
            reasons[candidate] = reason
    return reasons


def peak_memory(function: Callable[[], object], device: str) -> int | None:
    """Returns the peak bytes of a call beyond what was allocated before. A first call loads, compiles and tunes."""
    function()
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Measurement:
    """Checks the candidates of one length, then times them in both directions.

    Args:
        problem: the inputs.
        clock: measures the time.
        tables: collects figures and failures.
    """

    def __init__(self, problem: Problem, clock: Clock, tables: Tables):
        self.problem, self.clock, self.tables = problem, clock, tables
        self.dtype, self.device = problem.inputs[0].dtype, problem.inputs[0].device.type
        _, _, self.length, self.head_dim = problem.inputs[0].shape

    def check(self, candidates: list[Candidate]) -> list[Candidate]:
        """Returns the candidates whose results are right. `eager` is the formula itself, and may not fit into memory."""
        right = []
        for name in dict.fromkeys(name for _, name in candidates):
            expected = self.problem.expected(("sdpa" if name == "softmax" else "nlq_tiled", name))
            for candidate in [candidate for candidate in candidates if candidate[1] == name]:
                compare = functools.partial(check, self.problem, candidate, expected, self.dtype)
                if candidate[0] == "eager" or self._attempt(candidate, list(DIRECTIONS), compare):
                    right.append(candidate)
        return sorted(right, key=candidates.index)

    def time(self, direction: str, candidates: list[Candidate], matmul: Callable[[], object], rounds: int) -> None:
        """Times the candidates and the matrix product in turns."""
        call = self.problem.inference if direction == "forward" else self.problem.training
        functions = {MATMUL: matmul, **{candidate: functools.partial(call, candidate) for candidate in candidates}}
        memory, repeats, times = {}, {}, {candidate: [] for candidate in functions}

        def prepare(candidate: Candidate) -> None:
            memory[candidate] = peak_memory(functions[candidate], self.device)
            repeats[candidate] = self.clock.repeats(functions[candidate])

        def take_turn(candidate: Candidate) -> None:
            times[candidate].append(self.clock.turn(functions[candidate], repeats[candidate]))

        alive = list(functions)
        for step in (prepare, *[take_turn] * rounds):
            alive = [one for one in alive if self._attempt(one, [direction], functools.partial(step, one))]
        case = Case(self.head_dim, self.length, direction)
        self.tables.results[case] = {candidate: Result(times[candidate], memory[candidate]) for candidate in alive}

    def _attempt(self, candidate: Candidate, directions: list[str], function: Callable[[], object]) -> bool:
        with pinned(candidate):
            reason = attempt(f"{label(candidate)} (head dim {self.head_dim}, length {self.length})", function)
        if reason is None:
            return True
        if candidate in (BASELINE, MATMUL):
            raise SystemExit(f"{label(candidate)} failed, which all others are compared with: {reason}")
        cases = [Case(self.head_dim, self.length, direction) for direction in directions]
        self.tables.failures += [Failure(case, candidate, reason) for case in cases]
        if self.device == "cuda":
            torch.cuda.empty_cache()  # frees the memory of a candidate that did not fit
        return False


class Claim(NamedTuple):
    """A threshold for NLQ's backend: how many times as fast as another one it is at least, from a length on."""

    text: str
    direction: str
    activation: str | None  # None: every activation that is measured
    floor: float
    other: str  # a backend
    from_length: int = 4096


CLAIMS = (
    Claim("forward and backward beside SDPA's flash backend", "forward and backward", None, 1.0, "sdpa"),
    Claim("`sigmoid` forward beside SDPA's flash backend", "forward", "sigmoid", 1.17, "sdpa"),
    Claim("forward and backward beside SDPA's cuDNN backend", "forward and backward", None, 1.0, "sdpa_cudnn"),
    Claim("`sigmoid` forward beside SDPA's cuDNN backend", "forward", "sigmoid", 1.0, "sdpa_cudnn"),
    Claim("forward beside FlexAttention's log form", "forward", None, 1.3, "flex_attention"),
    Claim("forward and backward beside FlexAttention's log form", "forward and backward", None, 1.3, "flex_attention"),
)


class Verdict(NamedTuple):
    """The result of checking a claim.

    Attributes:
        claim: the claim.
        worst: the lowest median of its ratios, or `None` if there is none.
        where: the cell of the lowest median.
        count: number of the cells compared.
        missing: the cells that have no figure.
        word: "met", "met where measured", "not met" or "not measured".
    """

    claim: Claim
    worst: float | None
    where: str
    count: int
    missing: list[str]
    word: str


def judge(claim: Claim, tables: Tables, activations: list[str], ours: str) -> Verdict:
    """Compares a claim with the measurements. If a cell is missing, the claim is at most "met where measured"."""
    names = [name for name in activations if claim.activation in (None, name)]
    if claim.other == "flex_attention":
        computes = ATTENTION_BACKENDS[claim.other].computes
        names = [name for name in names if computes(Needs(get_attention_activation(name)))]
    ratios, missing = {}, []
    for head_dim, length in tables.shapes:
        case = Case(head_dim, length, claim.direction)
        if length < claim.from_length:
            continue
        for name in names:
            where = f"{name}, head dim {head_dim}, length {length}"
            other = (claim.other, "softmax" if claim.other in PINNED else name)
            if speed := tables.speed(case, (ours, name), other):
                ratios[where] = speed[1]
            else:
                missing.append(where)
    if not ratios:
        return Verdict(claim, None, "", 0, missing, "not measured")
    where = min(ratios, key=ratios.get)
    word = "met" if ratios[where] >= claim.floor and not missing else "not met"
    if ratios[where] >= claim.floor and missing:
        word = "met where measured"
    return Verdict(claim, ratios[where], where, len(ratios), missing, word)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def claims_table(tables: Tables, activations: list[str], ours: str) -> str:
    """Returns the table of claims."""
    rows = []
    for claim in CLAIMS:
        verdict = judge(claim, tables, activations, ours)
        worst = "-" if verdict.worst is None else f"{verdict.worst:.3f} ({verdict.where})"
        missing = f"; no figure for {'; '.join(verdict.missing)}" if verdict.missing else ""
        asked = f"{claim.text}, lengths from {claim.from_length}"
        rows.append([asked, f"{claim.floor:g} x", worst, str(verdict.count), f"**{verdict.word}**{missing}"])
    return markdown_table(["threshold", "at least", "worst median of the rounds", "of so many", "verdict"], rows)


def pivot(
    tables: Tables, head_dim: int, corner: str, candidates: list[Candidate], cell: Callable[[int, Candidate], str | None]
) -> str:
    """Returns a table of candidates by lengths. A cell that is `None` becomes a dash, and a row of dashes is left out."""
    lengths = [length for width, length in tables.shapes if width == head_dim]
    rows = []
    for candidate in candidates:
        cells = [cell(length, candidate) for length in lengths]
        if any(cells):
            rows.append([label(candidate), *(text or "-" for text in cells)])
    return markdown_table([corner, *map(str, lengths)], rows) if rows else ""


def render(tables: Tables, arguments: argparse.Namespace, dtype: str, device: str, command: str, ours: str) -> str:
    """Returns all tables of one dtype as Markdown."""
    candidates = [MATMUL, *make_candidates(arguments, ours)]
    text = (
        f"`{command}`: {device}.\n\nCausal attention in {dtype}, batch x length {_tokens(tables)}; medians of "
        f"{arguments.rounds} rounds in which the candidates take turns. TFLOP/s count `4 * batch * heads * length^2 * head_dim "
        "/ 2` operations forward and 2.5 times as many backward; in parentheses the share of the matrix product's rate in the "
        "same rounds, then the speed relative to softmax on SDPA's flash backend. The L2 cache is overwritten before each "
        "call. A dash: no figure, for the reason at the end.\n\n"
    )
    text += claims_table(tables, arguments.activations, ours)
    for head_dim in dict.fromkeys(width for width, _ in tables.shapes):
        heads = next(heads for (width, _), (_, heads) in tables.shapes.items() if width == head_dim)
        for direction in DIRECTIONS:

            def throughput(length: int, candidate: Candidate, head_dim=head_dim, direction=direction) -> str | None:
                case = Case(head_dim, length, direction)
                if candidate not in tables.results.get(case, {}):
                    return None
                rate = tables.rate(case, candidate)
                if candidate == MATMUL:
                    return format_rate(rate)
                share = rate / tables.rate(case, MATMUL)
                return f"{format_rate(rate)} ({share:.0%}) {tables.speed(case, candidate, BASELINE)[1]:.2f}"

            corner = f"{heads} heads of {head_dim}, {direction}, TFLOP/s"
            text += "\n" + pivot(tables, head_dim, corner, candidates, throughput)

        def beside_flex(length: int, candidate: Candidate, head_dim=head_dim) -> str | None:
            other = ("flex_attention", candidate[1])
            if candidate[0] != ours:
                return None
            speeds = [tables.speed(Case(head_dim, length, direction), candidate, other) for direction in DIRECTIONS]
            return " / ".join("-" if speed is None else f"{speed[1]:.2f}" for speed in speeds) if any(speeds) else None

        def memory(length: int, candidate: Candidate, head_dim=head_dim) -> str | None:
            case = Case(head_dim, length, "forward and backward")
            result = tables.results.get(case, {}).get(candidate)
            return None if candidate == MATMUL or result is None or result.memory is None else f"{result.memory / 2**20:,.0f}"

        corner = f"speed beside FlexAttention's log form, heads of {head_dim}, forward / forward and backward"
        text += "\n" + pivot(tables, head_dim, corner, candidates, beside_flex)
        corner = f"peak memory beyond the inputs, heads of {head_dim}, forward and backward, MiB"
        text += "\n" + pivot(tables, head_dim, corner, candidates, memory)
    if tables.failures:
        text += "\nNo figure:\n\n"
        places = {}
        for case, candidate, reason in tables.failures:
            places.setdefault((label(candidate), reason), []).append(case)
        for (name, reason), cases in places.items():
            where = "; ".join(f"{case.direction}, head dim {case.head_dim}, length {case.length}" for case in cases)
            text += f"* {name}: {reason} ({'everywhere' if len(cases) == len(tables.results) else where})\n"
    while "\n\n\n" in text:  # tables without rows leave empty lines
        text = text.replace("\n\n\n", "\n\n")
    return text


def _tokens(tables: Tables) -> str:
    counts = sorted({batch * length for (_, length), (batch, _) in tables.shapes.items()})
    return " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) + " tokens"


def print_case(tables: Tables, case: Case, candidates: list[Candidate]) -> None:
    """Prints one case in plain text as soon as it is measured."""
    batch, heads = tables.shapes[case.head_dim, case.length]
    product = tables.rate(case, MATMUL)
    print(
        f"\nhead_dim {case.head_dim}, length {case.length}, batch {batch}, {heads} heads, {case.direction}; "
        f"matrix product {format_rate(product)} TFLOP/s"
    )
    width = max(len(label(candidate)) for candidate in candidates)
    print(f"  {'':{width}}        ms  TFLOP/s  of product  x SDPA flash (quartiles)  x FlexAttention       MiB")
    for candidate in candidates:
        if candidate not in tables.results[case]:
            print(f"  {label(candidate):{width}}         -")
            continue
        result, rate = tables.results[case][candidate], tables.rate(case, candidate)
        low, middle, high = tables.speed(case, candidate, BASELINE)
        flex = tables.speed(case, candidate, ("flex_attention", candidate[1]))
        milliseconds = 1000 * statistics.median(result.times)
        print(
            f"  {label(candidate):{width}}  {milliseconds:8.3f}  {format_rate(rate):>7}  {rate / product:10.1%}  "
            f"{middle:8.2f} ({low:.2f} to {high:.2f})  {'-' if flex is None else f'{flex[1]:.2f}':>15}  "
            f"{'-' if result.memory is None else f'{result.memory / 2**20:.1f}':>8}"
        )
    for failure in tables.failures:
        if failure.case == case:
            print(f"  {label(failure.candidate)}: {failure.reason}")
    sys.stdout.flush()


def report(arguments: argparse.Namespace, ours: str = OURS, matmul_size: int = MATMUL_SIZE) -> int:
    """Measures, prints, and writes the Markdown file after every length, so that an interrupted run keeps its tables.

    Args:
        arguments: those of `attention.py`; a `batch` or `heads` of `None` is computed.
        ours: the backend that the claims are about. Tests without a GPU pass another one.
        matmul_size: size of the roofline's matrices.

    Returns:
        The exit status: 1 if one of NLQ's own candidates failed, or any result was wrong.
    """
    device = arguments.device
    description = describe_gpu() if device == "cuda" else device
    print(description)
    clock = Clock(device)
    candidates = make_candidates(arguments, ours)
    texts, is_bad = {}, False
    for dtype_name in arguments.dtypes:
        dtype = getattr(torch, dtype_name)
        matmul, matmul_flops = make_matmul(device, dtype, matmul_size)
        tables = Tables({}, {}, [], matmul_flops)
        print(f"\n{dtype_name}")
        for head_dim in arguments.head_dim:
            wrong = gate(head_dim, dtype, device, arguments.activations, ours)
            for length in arguments.lengths:
                batch = arguments.batch or max(TOKENS // length, 1)
                heads = arguments.heads or max(HIDDEN_SIZE // head_dim, 1)
                tables.shapes[head_dim, length] = (batch, heads)
                torch._dynamo.reset()  # drops what was compiled for another shape
                problem = Problem((batch, heads, length, head_dim), dtype, device, needs_block_mask=arguments.flex)
                cases = [Case(head_dim, length, direction) for direction in DIRECTIONS]
                tables.failures += [Failure(case, *pair) for pair in wrong.items() for case in cases]
                rest = [candidate for candidate in candidates if candidate not in wrong]
                with compiled_without_fallback():  # FlexAttention, for each activation and direction
                    measurement = Measurement(problem, clock, tables)
                    right = measurement.check(rest)
                    for direction in DIRECTIONS:
                        measurement.time(direction, right, matmul, arguments.rounds)
                for case in cases:
                    print_case(tables, case, candidates)
                texts[dtype_name] = render(tables, arguments, dtype_name, description, shlex.join(["python", *sys.argv]), ours)
                if arguments.markdown is not None:
                    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
                    arguments.markdown.write_text("\n".join(texts.values()), encoding="utf-8")
        print("\n" + claims_table(tables, arguments.activations, ours))
        for failure in tables.failures:
            is_ours, is_wrong = failure.candidate[0] == ours, failure.reason.startswith(WrongResult.__name__)
            is_bad = is_bad or is_ours or is_wrong
    if arguments.markdown is not None:
        print(f"wrote {arguments.markdown}")
    return int(is_bad)

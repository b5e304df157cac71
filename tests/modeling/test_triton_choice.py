"""Refusals of the kernels, their choice of tiles, and the automatic choice between them and `nlq_tiled`."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    SCALING,
    layer,
)
from support.elementwise_backends import CPU
from support.paths import REPOSITORY
from support.triton_cases import DEVICE, MARKS, check_float32, interpreter_only

from modeling_nlq import backends_nlq
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS, get_attention_activation
from modeling_nlq.backends_nlq import Needs, find_backend
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.attention import DTYPES, LAST_TILES, TILES, Tiles, refusal, triton_attention_forward
from modeling_nlq.kernels.triton.backward import key_value_gradient_kernel, query_gradient_kernel
from modeling_nlq.kernels.triton.forward import forward_kernel


triton = pytest.importorskip("triton")
pytestmark = MARKS


class TestRefusals:
    """Inputs that the kernels do not take raise an error that says why."""

    RELU = get_attention_activation("relu")

    @pytest.fixture(autouse=True)
    def large_gpu(self, monkeypatch):
        monkeypatch.setattr(triton_attention, "_capability", lambda index: (9, 0))

    @pytest.mark.parametrize("head_dim", [1, 40, 256])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("device", ["cuda", "cuda:3"])
    def test_takes(self, device, dtype, head_dim):
        assert refusal(self.RELU, torch.device(device), dtype, head_dim) is None

    def test_takes_under_the_interpreter(self, monkeypatch):
        monkeypatch.setattr(triton_attention, "IS_INTERPRETED", True)
        for dtype in (*DTYPES, torch.float64):
            assert refusal(self.RELU, CPU, dtype, 64) is None

    @pytest.mark.parametrize(
        "device, dtype, head_dim, activation, reason",
        [
            ("cpu", torch.float32, 64, "relu", "needs a CUDA device, not device='cpu'"),
            ("meta", torch.float32, 64, "relu", "needs a CUDA device, not device='meta'"),
            ("xpu:1", torch.float32, 64, "relu", "needs a CUDA device, not device='xpu:1'"),
            ("cuda", torch.float32, 64, "softmax", "needs a Triton body of attention_activation='softmax'"),
            ("cuda", torch.bfloat16, 257, "relu", "takes head_dim up to 256, not 257"),
            (
                "cuda",
                torch.float64,
                64,
                "relu",
                "takes torch.float16, torch.bfloat16, torch.float32, not torch.float64",
            ),
            ("cuda", torch.int64, 64, "relu", "takes torch.float16, torch.bfloat16, torch.float32, not torch.int64"),
        ],
        ids=["cpu", "meta", "xpu", "softmax", "head_dim", "float64", "int64"],
    )
    def test_reasons(self, monkeypatch, device, dtype, head_dim, activation, reason):
        monkeypatch.setattr(triton_attention, "IS_INTERPRETED", False)
        assert refusal(get_attention_activation(activation), torch.device(device), dtype, head_dim) == reason

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(triton_attention, "triton", None)
        assert refusal(self.RELU, torch.device("cuda"), torch.float32, 64) == "needs the package triton: pip install triton"

    def test_old_gpus(self, monkeypatch):
        monkeypatch.setattr(triton_attention, "_capability", {None: (8, 0), 1: (7, 5)}.get)
        assert refusal(self.RELU, torch.device("cuda"), torch.float16, 64) is None
        assert refusal(self.RELU, torch.device("cuda:1"), torch.float16, 64) == (
            "needs a GPU of compute capability 8.0 or more, not 7.5"
        )
        monkeypatch.setattr(torch.version, "hip", "6.0")
        assert refusal(self.RELU, torch.device("cuda:1"), torch.float16, 64) is None

    @pytest.mark.parametrize(
        "shape, dtype, reason",
        [
            ((1, 2, 3, 300), torch.float32, "takes head_dim up to 256, not 300"),
            ((1, 2, 3, 4), torch.int32, "takes torch.float16, torch.bfloat16, torch.float32, not torch.int32"),
        ],
        ids=["head_dim", "dtype"],
    )
    def test_message(self, shape, dtype, reason):
        states = [torch.ones(shape, dtype=dtype, device=DEVICE) for _ in range(3)]
        with pytest.raises(ValueError) as error:
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        assert str(error.value) == (f"attn_implementation='nlq_triton' (layer 0) {reason}; use one of nlq, nlq_tiled, eager")

    def test_message_on_another_device(self):
        states = [torch.empty(1, 2, 3, 4, device="meta") for _ in range(3)]
        with pytest.raises(ValueError, match=r"\(layer 0\) needs a CUDA device, not device='meta'; use one of nlq, nlq_tiled"):
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)

    @pytest.mark.parametrize(
        "shapes",
        [
            ((2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 4, 8)),
            ((2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 16)),
            ((2, 4, 3, 8), (2, 4, 3, 16), (2, 4, 3, 16)),
            ((2, 4, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)),
            ((2, 4, 3, 8), (2, 3, 3, 8), (2, 3, 3, 8)),
            ((2, 2, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
            ((2, 4, 3, 8), (2, 0, 3, 8), (2, 0, 3, 8)),
            ((4, 3, 8), (4, 3, 8), (4, 3, 8)),
            ((2, 4, 3, 8), (4, 3, 8), (4, 3, 8)),
            ((1, 2, 4, 3, 8), (1, 2, 4, 3, 8), (1, 2, 4, 3, 8)),
        ],
        ids=lambda shapes: " ".join(map(str, shapes)),
    )
    def test_shapes(self, shapes):
        states = [torch.randn(shape, device=DEVICE) for shape in shapes]
        with pytest.raises(ValueError) as error:
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        query, key, value = shapes
        assert str(error.value) == (
            f"nlq_triton: query={query}, key={key}, value={value} must be (batch, heads, query, head_dim) and twice "
            "(batch, key_value_heads, key, head_dim), with heads a multiple of key_value_heads"
        )

    def test_precisions(self):
        states = [torch.randn(1, 2, 3, 4, device=DEVICE, dtype=dtype) for dtype in DTYPES[::-1]]
        with pytest.raises(ValueError) as error:
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        assert str(error.value) == (
            "nlq_triton: the dtypes of query, key and value, torch.float32, torch.bfloat16, torch.float16, must be the same"
        )

    def test_devices(self):
        states = [torch.randn(1, 2, 3, 4, device=device) for device in (DEVICE, "meta", "meta")]
        with pytest.raises(
            ValueError, match=r"nlq_triton: the devices of query, key and value, .*, meta, meta, must be the same"
        ):
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)


class TestTiles:
    """The line of `TILES` that a device has room for."""

    @pytest.fixture
    def launches(self, monkeypatch):
        """The launches on a device that has room for tiles of 64 at most."""
        found = []

        def launch(problem, kernel, programs, options=None, **arguments):
            if kernel in TILES:
                found.append((kernel.__name__, programs, arguments["TILE"], arguments["STEP"], options))
                if arguments["TILE"] > 64:
                    raise triton.runtime.OutOfResources(300_000, 232_448, "shared memory")

        monkeypatch.setattr(triton_attention._KernelCall, "run", launch)
        monkeypatch.setattr(triton_attention, "_FITTING", {})
        return found

    @staticmethod
    def attend(dtype=torch.bfloat16, head_dim=64, length=300):
        states = [torch.zeros(1, 2, length, head_dim, dtype=dtype, device=DEVICE) for _ in range(3)]
        triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)

    def test_smaller_ones_where_memory_is_short(self, launches):
        self.attend()
        lines = [*TILES[forward_kernel][2].values(), LAST_TILES]
        expected = [("forward_kernel", 2 * math.ceil(300 / tiles.tile), tiles.tile, tiles.step) for tiles in lines]
        assert [launch[:4] for launch in launches] == expected
        options = launches[-1][4]
        assert options == {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
        del launches[:]
        self.attend()  # it remembers
        assert [launch[:4] for launch in launches] == expected[-1:]
        del launches[:]
        self.attend(head_dim=128)  # wider heads may do with fewer attempts
        assert [launch[:4] for launch in launches] == expected[1:]

    def test_none_fits(self, monkeypatch, launches):
        monkeypatch.setattr(triton_attention, "LAST_TILES", Tiles(128, 64, 8, 3))
        with pytest.raises(triton.runtime.OutOfResources, match="shared memory"):
            self.attend()
        assert len(launches) == len(TILES[forward_kernel][2]) + 1

    @pytest.mark.parametrize(
        "dtype, head_dim, size, width",
        [
            (torch.bfloat16, 16, 2, 64),
            (torch.bfloat16, 64, 2, 64),
            (torch.bfloat16, 65, 2, 128),
            (torch.bfloat16, 256, 2, 256),
            (torch.float16, 64, 4, 64),
            (torch.float16, 256, 4, 256),
            (torch.float32, 32, 4, 64),
            (torch.float32, 200, 4, 256),
        ],
    )
    def test_line_of_a_head(self, monkeypatch, launches, dtype, head_dim, size, width):
        lines = {size: {width: Tiles(size * width // 64, 1, 1, 1) for width in (64, 128, 256)} for size in (2, 4)}
        monkeypatch.setitem(TILES, forward_kernel, lines)
        self.attend(dtype, head_dim, length=9)
        assert [launch[2] for launch in launches] == [size * width // 64]

    @interpreter_only
    def test_results_after_a_failure(self, monkeypatch):
        """Results are right where the first line of tiles does not fit. Here the kernels run."""
        for kernel in TILES:
            monkeypatch.setitem(TILES, kernel, {4: {128: Tiles(128, 128, 8, 9), 256: Tiles(8, 8, 4, 1)}})
        run_kernel, failures = triton_attention._KernelCall.run, []

        def launch(problem, kernel, programs, options=None, **arguments):
            if options is not None and options["num_stages"] == 9:
                failures.append(kernel)
                raise triton.runtime.OutOfResources(300_000, 232_448, "shared memory")
            run_kernel(problem, kernel, programs, options, **arguments)

        monkeypatch.setattr(triton_attention._KernelCall, "run", launch)
        monkeypatch.setattr(triton_attention, "_FITTING", {})
        check_float32("softplus", "sum", LAYOUTS["grouped_queries"])
        assert failures == [forward_kernel, query_gradient_kernel, key_value_gradient_kernel]


class TestAutomaticChoice:
    """Until the kernels have passed their tests on a GPU, they run only when asked for by name."""

    @pytest.mark.parametrize("name", [*ATTENTION_ACTIVATIONS, *LIBRARY_ACTIVATIONS])
    def test_is_another_backend(self, name):
        assert find_backend("nlq", [0], Needs(get_attention_activation(name))) != "nlq_triton"

    @pytest.mark.parametrize(
        "implementation, function", [("nlq", "nlq_tiled"), ("nlq_triton", "nlq_triton"), ("eager", "eager")]
    )
    def test_model(self, monkeypatch, make_model, implementation, function):
        called = []
        without_cpp = [name for name in backends_nlq.PREFERENCE if name != "nlq_cpp"]  # which has this model with AVX-512 alone
        monkeypatch.setattr(backends_nlq, "PREFERENCE", without_cpp)
        for name in ("nlq_triton", "nlq_tiled", "eager"):
            row = backends_nlq.ATTENTION_BACKENDS[name]

            def counted(*inputs, name=name, row=row, **options):
                called.append(name)
                return row.function(*inputs, **options)

            monkeypatch.setitem(backends_nlq.ATTENTION_BACKENDS, name, dataclasses.replace(row, function=counted))
        model = make_model(implementation=implementation, attention_activation="relu").to(DEVICE)
        model(torch.randint(13, (1, 3), device=DEVICE))
        assert called == [function] * 2


@pytest.mark.slow
def test_without_triton():
    """The package and its other backends work, and an error says what the kernels need."""
    script = """
import sys
sys.modules["triton"] = None
import torch
from modeling_nlq import NLQConfig, NLQForCausalLM
sizes = dict(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
for name in ("nlq", "nlq_triton"):
    model = NLQForCausalLM(NLQConfig(**sizes, attention_activation="relu", attn_implementation=name))
    try:
        print(model(torch.tensor([[1, 2]])).logits.shape)
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "torch.Size([1, 2, 7])",
        "attn_implementation='nlq_triton' (layer 0) needs the package triton: pip install triton; use one of nlq, nlq_tiled, "
        "eager",
    ]


@pytest.mark.slow
def test_on_the_cpu_without_the_interpreter():
    script = """
import torch
from modeling_nlq import NLQConfig, NLQForCausalLM
sizes = dict(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = NLQForCausalLM(NLQConfig(**sizes, attention_activation="relu", attn_implementation="nlq_triton"))
try:
    model(torch.tensor([[1, 2]]))
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == (
        "attn_implementation='nlq_triton' (layer 0) needs a CUDA device, not device='cpu'; use one of nlq, nlq_tiled, eager"
    )

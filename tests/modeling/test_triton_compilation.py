"""The kernels compile for GPUs that need not be there."""

import json
import os
import subprocess
import sys

import pytest
from support.grids import parametrize_grid
from support.paths import TESTS
from support.triton_cases import MARKS, slow


pytestmark = MARKS
KERNELS = ("forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel", "split_kernel")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # of a block, on A100 and H100
LEAST_SHARED_MEMORY = 99 * 1024  # on the GPUs of these generations that have least


def compile_elsewhere(tmp_path, cases):
    """The results of `compiled` for each case, from a process without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(TESTS)
    command = [sys.executable, "-m", "support.triton_compilation", json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class TestCompilation:
    """The kernels compile for GPUs that need not be there, in the tiles they are shipped with, and fit into their memory."""

    @pytest.mark.slow
    def test_for_hopper(self, tmp_path):
        options = {"state": "bf16", "head_dim": 128, "capability": 90, "causal": True}
        cases = [{"kernel": name, **options} for name in KERNELS]
        for name, found in zip(KERNELS, compile_elsewhere(tmp_path, cases), strict=True):
            assert found["shared"] <= SHARED_MEMORY[90]
            assert (found["wgmma"] > 0) == (name != "split_kernel")  # whose tile is too small for that

    @pytest.mark.slow
    @pytest.mark.parametrize("state", ["bf16", "fp32"])
    def test_smallest_tiles(self, tmp_path, state):
        """Some line of `TILES` fits everywhere."""
        options = {"normalization": "none", "head_dim": 256, "capability": 80, "line": -1, "causal": True}
        cases = [{"kernel": name, "state": state, **options} for name in KERNELS]
        assert all(found["shared"] <= LEAST_SHARED_MEMORY for found in compile_elsewhere(tmp_path, cases))

    @slow
    @parametrize_grid(
        {"state": ("bf16", "fp16", "fp32"), "head_dim": (4, 64, 80, 256), "capability": tuple(SHARED_MEMORY)}, strength=1
    )
    def test_every_size(self, tmp_path, state, head_dim, capability):
        cases = [
            {"kernel": name, "state": state, "head_dim": head_dim, "capability": capability, "causal": True} for name in KERNELS
        ]
        for case, found in zip(cases, compile_elsewhere(tmp_path, cases), strict=True):
            if capability == 90:
                assert found["shared"] <= SHARED_MEMORY[90], case
                if state == "bf16" and case["kernel"] != "split_kernel":
                    assert found["wgmma"] > 0, case

    @slow
    @pytest.mark.parametrize(
        "capability, options",
        [
            (80, {"causal": True, "padded": True}),
            (90, {"causal": True, "packed": True}),
            (80, {"masked": True, "normalization": "none"}),
            (90, {"causal": True, "has_dropout": True, "normalization": "length"}),
            (90, {}),
            (80, {"causal": True, "one_head": True}),
        ],
        ids=lambda value: value if isinstance(value, int) else "-".join(value) or "full",
    )
    def test_every_mask(self, tmp_path, options, capability):
        cases = [{"kernel": name, "state": "bf16", "head_dim": 64, "capability": capability, **options} for name in KERNELS]
        for found in compile_elsewhere(tmp_path, cases):
            assert found["shared"] <= SHARED_MEMORY[capability]

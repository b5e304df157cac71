# `make demo` and `make test` need Python 3.11+ and make only; everything else goes into .venv.

PYTHON ?= python3
# A torch build other than the one your pip index serves: set this to an index address listed on pytorch.org.
TORCH_INDEX_URL ?=
PIP = .venv/bin/python -m pip --disable-pip-version-check
# One process per core. One thread in each: the tests' tensors are too small to share.
PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest -n logical --dist worksteal

.PHONY: demo test test-all test-oldest test-clients test-ray lint benchmark gpu gpu-test gpu-attention gpu-training gpu-comparison gpu-sanitizer gpu-tune clean

demo: .venv/installed
	.venv/bin/nlq compare demo

test: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PYTEST) -m "not slow and not gpu" --ignore tests/clients --ignore tests/cluster

# The slow tests too, which repeat the quick ones' kinds of cases in more combinations
test-all: .venv/installed-test
	$(PYTEST) -m "not gpu" --ignore tests/clients --ignore tests/cluster

# The quick tests with the oldest versions that pyproject.toml allows, in an environment of their own
test-oldest: .venv-oldest/installed
	$(subst .venv,.venv-oldest,$(PYTEST)) -m "not slow and not gpu" --ignore tests/clients --ignore tests/cluster

# Other people's programs, which have an environment of their own
test-clients: .venv-clients/installed
	$(subst .venv,.venv-clients,$(PYTEST)) -m "not slow" tests/clients

# Clusters of Ray on this machine: in a network of loopback alone where the system allows one, for Ray's nodes listen to the
# machine's own address
ALONE = unshare --net --map-root-user bash -c 'ip link set lo up && exec "$$@"' --

test-ray: .venv-ray/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(if $(shell $(ALONE) echo yes 2>/dev/null),$(ALONE)) \
		.venv-ray/bin/python -m pytest tests/cluster

lint: .venv/installed-test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

benchmark: .venv/installed-test
	.venv/bin/python benchmarks/training_step.py
	.venv/bin/python benchmarks/attention.py
	.venv/bin/python benchmarks/linear.py
	.venv/bin/python benchmarks/windows.py
	.venv/bin/python benchmarks/generation.py
	.venv/bin/python benchmarks/stability.py

# Everything that needs a GPU, on a machine that has one; `make -k gpu` goes on after a failure. What is printed is kept beside
# the tables in RESULTS.
RESULTS ?= results/gpu
KEEP = PYTHONUNBUFFERED=1 bash -o pipefail -c '"$$@" 2>&1 | tee "$$0"'

gpu: gpu-test gpu-sanitizer gpu-attention gpu-training gpu-comparison gpu-tune

gpu-test: .venv/installed-test
	mkdir -p $(RESULTS)
	HF_HUB_OFFLINE=1 $(KEEP) $(RESULTS)/tests.txt .venv/bin/python -m pytest -m gpu

# NVIDIA's tool, which has to see every allocation
gpu-sanitizer: .venv/installed-test
	mkdir -p $(RESULTS)
	PYTHONPATH=tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(KEEP) $(RESULTS)/sanitizer.txt \
		compute-sanitizer --error-exitcode 1 .venv/bin/python -m support.triton_sanitizer

gpu-attention: .venv/installed-test
	mkdir -p $(RESULTS)
	$(KEEP) $(RESULTS)/attention.txt .venv/bin/python benchmarks/attention.py --device cuda --markdown $(RESULTS)/attention.md

gpu-training: .venv/installed-test
	mkdir -p $(RESULTS)
	$(KEEP) $(RESULTS)/training_step.txt .venv/bin/python benchmarks/training_step.py --device cuda

gpu-comparison: .venv/installed-test
	mkdir -p $(RESULTS)
	$(KEEP) $(RESULTS)/comparison.txt .venv/bin/nlq compare gpu --output_dir $(RESULTS)/comparison

# Which tiles the kernels should have on this GPU
gpu-tune: .venv/installed-test
	mkdir -p $(RESULTS)
	$(KEEP) $(RESULTS)/tune.txt .venv/bin/python benchmarks/tune_triton.py

# torch first and by itself: another package's range must not pull in another build of it
.venv/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv,constraints.txt)
	$(PIP) install --quiet -c constraints.txt -e .
	touch $@

.venv/installed-test: .venv/installed
	$(PIP) install --quiet -c constraints.txt -e ".[test]"
	touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(call new_environment,.venv-oldest,constraints-oldest.txt)
	$(subst .venv,.venv-oldest,$(PIP)) install --quiet -c constraints-oldest.txt -e ".[test]"
	touch $@

.venv-ray/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-ray,constraints.txt)
	$(subst .venv,.venv-ray,$(PIP)) install --quiet -c constraints.txt -e ".[test,ray,test-ray]"
	touch $@

.venv-clients/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-clients,constraints.txt)
	$(subst .venv,.venv-clients,$(PIP)) install --quiet -c constraints.txt -e ".[test,clients]"
	touch $@

define new_environment
$(PYTHON) -m venv $(1)
$(subst .venv,$(1),$(PIP)) install --quiet -c $(2) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
endef

clean:
	rm -rf .venv .venv-oldest .venv-clients .venv-ray .cache build dist *.egg-info

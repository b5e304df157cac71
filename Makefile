# `make demo` and `make test` need Python 3.11+ and make only; everything else goes into .venv.

PYTHON ?= python3
# A torch build other than the one your pip index serves: set this to an index address listed on pytorch.org.
TORCH_INDEX_URL ?=
PIP = .venv/bin/python -m pip --disable-pip-version-check
# One thread: the tests' tensors are too small to share
PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest

.PHONY: demo test test-slow lint benchmark clean

demo: .venv/installed
	.venv/bin/nlq compare demo

test: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PYTEST) -m "not slow and not gpu"

# The whole suite, the slow tests included.
test-slow: .venv/installed-test
	$(PYTEST) -m "not gpu"

lint: .venv/installed-test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

benchmark: .venv/installed-test
	.venv/bin/python benchmarks/training_step.py
	.venv/bin/python benchmarks/attention.py
	.venv/bin/python benchmarks/linear.py
	.venv/bin/python benchmarks/stability.py

# torch first and by itself: another package's range must not pull in another build of it
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet -c constraints.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(PIP) install --quiet -c constraints.txt -e .
	touch $@

.venv/installed-test: .venv/installed
	$(PIP) install --quiet -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf .venv .cache build dist *.egg-info

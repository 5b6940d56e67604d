# Two commands do everything: `make demo` and `make test`. Both make .venv first.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-nightly test-gpu faults check launchers figures format clean

demo: $(READY)
	$(BIN)/paceline demo

# Markers say where a test runs: none: here; slow: in CI; nightly; serial: with nothing beside it.
ELSEWHERE := not gpu and not figure
QUICK := not slow and not nightly and $(ELSEWHERE)
CI := not nightly and $(ELSEWHERE)
NIGHTLY := nightly and $(ELSEWHERE)

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "$(QUICK) and not serial"
	$(BIN)/python -m pytest -m "$(QUICK) and serial"

test-all: $(READY)
	$(BIN)/python scripts/test_strictly -m "$(CI) and not serial"
	$(BIN)/python -m pytest -m "$(CI) and serial"

test-nightly: $(READY) launchers
	$(BIN)/python scripts/test_strictly -m "$(NIGHTLY) and not serial"
	$(BIN)/python -m pytest -m "$(NIGHTLY) and serial"

# On a machine with a GPU where nothing can be installed: any python3 that has torch, and what else
# is needed in a folder of PYTHONPATH. Side by side where pytest-xdist is among it.
PYTHON ?= python3
HERE = OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} PACELINE_REQUIRED=gpu
BESIDE = $$($(PYTHON) -c "import importlib.util as u; print('-n 4' if u.find_spec('xdist') else '')")

test-gpu:
	$(HERE) $(PYTHON) -m pytest tests/gpu -m "gpu and not serial and not nightly" $(BESIDE)
	$(HERE) $(PYTHON) -m pytest tests/gpu -m "gpu and serial and not nightly"

# Plants every fault of tests/faults.py and writes docs/faults.md.
faults: $(READY) launchers
	$(BIN)/python scripts/faults_page

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_budgets.py tests/unit/test_imports.py

# What the tests of launchers start for real, beside torchrun, which comes with torch.
launchers: $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation -c $(VENV)/constraints.txt deepspeed

# The figures in the issues, one script each, on a quiet machine. Installs the peers they race.
figures: launchers
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[peers]'
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ddp_parity.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/launch.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/check_bandwidth.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/strategy_memory.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/wrapper_cost.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checkpoint.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verdict_quality.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sweep_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/pipeline.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/text_data.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/long_runs.py tables
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/long_runs.py steps
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt lhotse
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/audio_prepare.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt scripts/make_venv
	scripts/make_venv $(VENV)
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# Two commands do everything: `make demo` and `make test`. Both make .venv first.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all alone check launchers figures format clean

demo: $(READY)
	$(BIN)/paceline demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not figure"

# Two tests at once, each of several processes, on as few as two cores: what fails there is run once
# more, alone, and shown both times. What fails alone fails.
test-all: $(READY)
	$(BIN)/python -m pytest -m "not figure" -n 2 --dist loadgroup || $(MAKE) --no-print-directory alone

alone: $(READY)
	@echo "ONCE MORE, ALONE: the tests that failed above"
	$(BIN)/python -m pytest -m "not figure" --last-failed --last-failed-no-failures none

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

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt scripts/make_venv
	scripts/make_venv $(VENV)
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

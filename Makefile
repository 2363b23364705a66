# `make demo` runs the main job, `make test` the checks and the tests, both from a clone. Everything is installed into
# .venv, from the pinned versions in requirements.lock; deploy/debian.sh sees first to what the machine has to have.
PYTHON ?= python3
BIN := .venv/bin
export DAGSTER_HOME ?= $(CURDIR)/.dagster_home
export DAGSTER_DISABLE_TELEMETRY ?= yes
MVN ?= mvn
MVN_GOAL := copy-dependencies
ONLY ?=
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 20
export PYTHON MVN
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt),) # trust what the machine trusts, as pip does
export UV_SYSTEM_CERTS ?= 1
endif

NEEDS := python java processes
test test-all: NEEDS += maven postgresql mariadb chromium
demo-kafka demo-cluster: NEEDS += maven postgresql
kafka bench docs: NEEDS += maven
postgres: NEEDS := python postgresql
test-fast check format lock: NEEDS := python

.PHONY: machine demo demo-streaming demo-backfill demo-handover demo-kafka demo-cluster demo-project kafka postgres test test-fast test-all faults check bench dev docs format lock clean

machine:
	@deploy/debian.sh $(NEEDS)

.venv/ready: requirements.lock pyproject.toml | machine
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing pinned dependencies into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

.venv/java: .venv/ready
	@$(BIN)/python -m dagster_unified.cli check-java
	@touch $@

.venv/spark/classes.jsa: .venv/java
	@echo "archiving Spark's classes, for the JVMs of tests"
	@$(BIN)/python -m tests.class_data

.venv/kafka/ready: tests/servers/kafka.xml | .venv/java
.venv/spark-kafka/ready: benchmarks/kafka.xml | .venv/java
.venv/registry/ready: tests/servers/registry.xml | .venv/java
.venv/registry/ready: MVN_GOAL := unpack-dependencies
.venv/kafka/ready .venv/spark-kafka/ready .venv/registry/ready:
	@echo "fetching the jars of $< into $(@D)"
	@rm -rf $(@D)
	@$(MVN) -q -B -Dstyle.color=never -f $< dependency:$(MVN_GOAL) -DoutputDirectory=$(CURDIR)/$(@D) -DmarkersDirectory=$(CURDIR)/$(@D)/fetched
	@touch $@

demo: .venv/java $(DAGSTER_HOME)/dagster.yaml ## run the flights pipeline in BATCH, through Dagster
	@$(BIN)/python -m jobs.data
	@$(BIN)/dagster-unified run jobs.flight_delays -D execution.runtime-mode=BATCH

demo-streaming: .venv/java $(DAGSTER_HOME)/dagster.yaml ## replay the year as a stream, kill it once, compare with BATCH
	@$(BIN)/python -m jobs.data
	@$(BIN)/python -m jobs.streaming_demo

demo-backfill: .venv/java $(DAGSTER_HOME)/dagster.yaml ## backfill the year by days, kill run workers, compare with one run
	@$(BIN)/python -m jobs.data
	@$(BIN)/dagster-unified run jobs.flight_delays -D execution.runtime-mode=BATCH --rows 0
	@$(BIN)/python -m jobs.backfill_demo

demo-handover: .venv/java $(DAGSTER_HOME)/dagster.yaml ## ten months in BATCH, the rest as a stream from their savepoint
	@$(BIN)/python -m jobs.data
	@$(BIN)/python -m jobs.handover_demo

demo-kafka: .venv/kafka/ready $(DAGSTER_HOME)/dagster.yaml ## from a topic to PostgreSQL and a topic: a stream, killed once, against BATCH
	@$(BIN)/python -m jobs.data
	@$(BIN)/python -m jobs.kafka_demo

demo-cluster: .venv/kafka/ready $(DAGSTER_HOME)/dagster.yaml ## all demonstrations on a cluster with a bucket, then through Connect; a worker is killed in each
	@$(BIN)/python -m jobs.data
	@$(BIN)/python -m jobs.cluster_demo

.venv/team/ready: jobs/team/requirements.txt .venv/ready
	@test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	@echo "installing dbt and the project of jobs/team into $(@D)"
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python -r $< --editable .
	@touch $@

demo-project: .venv/java .venv/team/ready ## a Dagster project with dbt and polars: a backfill, a stream that is killed once, a late order
	@env -u PYSPARK_PYTHON PATH="$(CURDIR)/.venv/team/bin:$$PATH" .venv/team/bin/python -m jobs.team_demo

kafka: .venv/kafka/ready ## run a Kafka broker until Ctrl-C, and say where it listens
	@$(BIN)/python -m tests.servers.kafka

test: machine check .venv/spark/classes.jsa .venv/kafka/ready .venv/registry/ready ## the checks and the whole test suite; long tests run a part that changes from day to day
	@$(PYTEST) $(PARALLEL)

test-fast: .venv/ready ## harness, graph, API and operators: no JVM
	@$(PYTEST) $(PARALLEL) -m "not spark" tests/api tests/graph tests/operators tests/records tests/testing tests/conformance tests/typing

test-all: .venv/spark/classes.jsa .venv/kafka/ready .venv/registry/ready ## the whole test suite, and the long tests in full: some hours
	@UNIFIED_TESTS=nightly $(PYTEST) $(PARALLEL)

faults: .venv/spark/classes.jsa ## kill a streaming job at twenty points
	@UNIFIED_TESTS=nightly $(PYTEST) tests/engine/test_streaming_faults.py

check: .venv/ready ## format, lint, types, architecture
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: .venv/java .venv/kafka/ready .venv/spark-kafka/ready ## measure; ONLY="batch stream" runs these families
	@$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

postgres: .venv/ready ## a PostgreSQL server until Ctrl-C; prints its URL
	@$(BIN)/python -m tests.servers.postgres

$(DAGSTER_HOME)/dagster.yaml: resources/dagster.yaml
	@mkdir -p $(DAGSTER_HOME) && cp $< $@

dev: .venv/java $(DAGSTER_HOME)/dagster.yaml ## the Dagster UI with the code location loaded
	@$(BIN)/python -m jobs.data
	@$(BIN)/dagster dev -w workspace.yaml -h 127.0.0.1

docs: .venv/spark/classes.jsa .venv/kafka/ready ## build the documentation into site/, and run its examples
	@$(BIN)/python -m tests.docs.support
	@$(BIN)/zensical build --strict --clean
	@$(PYTEST) tests/docs

format: .venv/ready
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: .venv/ready ## pin the newest versions that fit
	@$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --group dev --universal --python-version 3.11 --no-header --no-annotate -o requirements.lock

clean:
	@rm -rf .venv .dagster_unified .dagster_home site

"""Where settings come from, one test for each layer, from the command line to the runs that a daemon launches."""

import pytest
from dagster import DagsterInstance

from dagster_unified import settings
from dagster_unified.api import Pipeline
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import Layer
from dagster_unified.orchestration import BatchDeployment, ExecutionConfig, StreamingDeployment, unified_definitions
from dagster_unified.orchestration.deployments import configuration_of
from dagster_unified.orchestration.resources import batch_configuration
from tests.support import Sale

KEY = "pipeline.max-parallelism"
VARIABLE = "DAGSTER_UNIFIED_PIPELINE_MAX_PARALLELISM"


def shops():
    pipeline = Pipeline("shops")
    pipeline.from_collection([Sale("north", 1)]).key_by("shop").sum("amount").print()
    return pipeline


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file(folder):
    (folder / settings.FILE).write_text("[pipeline]\nmax-parallelism = 2\n")
    return folder / settings.FILE


@pytest.fixture
def variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")


def every_configuration(*launched, **options):
    """Of the command line, of a BATCH run and of a deployment."""
    definitions = [f"{key}={value}" for layer in launched for key, value in layer.values.items()]
    return [
        settings.configuration(definitions),
        BatchDeployment(shops(), options=options).configuration(*launched),
        configuration_of(StreamingDeployment(shops(), options=options), *launched),
    ]


def values(*launched, **options):
    return [found[KEY] for found in every_configuration(*launched, **options)]


def test_nothing_is_set_and_defaults_hold(folder):
    assert values() == [128, 128, 128]


def test_the_file_is_above_the_defaults(file):
    assert values() == [2, 2, 2]
    assert {found.origin(KEY) for found in every_configuration()} == {"file, dagster-unified.toml"}


def test_the_environment_is_above_the_file(file, variable):
    assert values() == [4, 4, 4]
    assert {found.origin(KEY) for found in every_configuration()} == {f"environment, {VARIABLE}"}


def test_a_deployments_options_are_above_the_environment(file, variable):
    assert configuration_of(StreamingDeployment(shops(), options={KEY: 8}))[KEY] == 8
    assert BatchDeployment(shops(), options={KEY: 8}).configuration()[KEY] == 8


def test_a_batch_deployment_takes_no_mode():
    with pytest.raises(ConfigurationError, match="shops: a BatchDeployment runs in BATCH; leave the option execution"):
        BatchDeployment(shops(), options={"execution.runtime-mode": "STREAMING"})


def test_what_is_set_at_launch_is_above_all(file, variable):
    assert values(Layer("launch", {KEY: 16}), **{KEY: 8}) == [16, 16, 16]
    deployment = BatchDeployment(shops(), options={KEY: 8})
    assert deployment.configuration(ExecutionConfig(**{KEY: 16}).launched())[KEY] == 16
    assert deployment.configuration(ExecutionConfig().launched())[KEY] == 8


def test_the_file_may_lie_elsewhere(file, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert values() == [128, 128, 128]
    monkeypatch.setenv(settings.FILE_VARIABLE, str(file))
    assert values() == [2, 2, 2]
    monkeypatch.setenv(settings.FILE_VARIABLE, "/nowhere/settings.toml")
    with pytest.raises(
        ConfigurationError,
        match=r"/nowhere/settings\.toml, which DAGSTER_UNIFIED_CONFIG_FILE names, cannot be read: No such file",
    ):
        values()


def test_a_variable_that_is_almost_an_options_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("DAGSTER_UNIFIED_EXECUTION_RUNTME_MODE", "BATCH")
    with pytest.raises(
        ConfigurationError,
        match=(
            r"RUNTME_MODE is like an option's, but no option has that name; did you mean"
            r" 'DAGSTER_UNIFIED_EXECUTION_RUNTIME_MODE'"
        ),
    ):
        settings.configuration()


def test_a_variable_whose_first_word_is_misspelled_is_an_error_and_another_programs_is_not(folder, monkeypatch):
    monkeypatch.setenv("DAGSTER_UNIFIED_OUTPUT", "/data")
    monkeypatch.setenv("DAGSTER_UNIFIED_DATA", "/data")
    settings.configuration()
    monkeypatch.setenv("DAGSTER_UNIFIED_PARALELISM_DEFAULT", "3")
    with pytest.raises(ConfigurationError, match="did you mean 'DAGSTER_UNIFIED_PARALLELISM_DEFAULT'"):
        settings.configuration()


def test_a_value_that_is_none_is_named_with_where_it_stands(folder, monkeypatch):
    monkeypatch.setenv("DAGSTER_UNIFIED_PARALLELISM_DEFAULT", "x")
    with pytest.raises(ConfigurationError, match=r"^environment, DAGSTER_UNIFIED_PARALLELISM_DEFAULT: parallelism.def"):
        settings.configuration()


def test_an_older_name_of_an_option_works_in_every_layer(folder, monkeypatch):
    (folder / settings.FILE).write_text('execution.shuffle-mode = "ALL_EDGES_BLOCKING"\n')
    assert batch_configuration()["execution.batch-shuffle-mode"] == "ALL_EDGES_BLOCKING"
    monkeypatch.setenv("DAGSTER_UNIFIED_EXECUTION_SHUFFLE_MODE", "ALL_EDGES_PIPELINED")
    assert batch_configuration()["execution.batch-shuffle-mode"] == "ALL_EXCHANGES_PIPELINED"
    assert (
        settings.configuration(["execution.shuffle-mode=POINTWISE_EDGES_PIPELINED"])["execution.batch-shuffle-mode"]
        == "POINTWISE_EXCHANGES_PIPELINED"
    )


def test_the_mode_in_the_file_is_for_the_command_line_and_leaves_the_jobs_in_dagster_as_they_are(folder):
    (folder / settings.FILE).write_text('execution.runtime-mode = "STREAMING"\n')
    assert settings.configuration()["execution.runtime-mode"] == "STREAMING"
    assert batch_configuration()["execution.runtime-mode"] == "AUTOMATIC"
    assert unified_definitions(shops()).resolve_job_def("shops_batch").name == "shops_batch"


def test_a_run_in_dagster_takes_what_the_file_says(folder, spark):
    """The stages that code locations show are those of the file, and the runs that they launch run them so."""
    (folder / settings.FILE).write_text(
        '[execution]\nshuffle-mode = "ALL_EXCHANGES_PIPELINED"\ncheckpointing.interval = "1 min"\n'
    )
    definitions = unified_definitions(shops())
    made = definitions.resolve_asset_graph().materializable_asset_keys
    assert [key.path[-1] for key in made if key.path[-1].endswith("_stage")] == ["collection_stage"]
    with DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_job_def("shops_batch").execute_in_process(instance=instance).success

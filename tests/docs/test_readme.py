"""The README's examples are run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAM, TEST, WINDOWS, COLUMNS, DEFINITIONS, MALFORMED, PARTITIONS, DEPLOYMENT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)


def test_the_pipeline_is_short_and_its_test_passes():
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= 20
    namespace = {"__name__": "shops"}
    sys.modules.setdefault("shops", type(sys)("shops"))
    exec(PROGRAM + TEST + WINDOWS + COLUMNS, namespace)


def test_the_definitions_have_an_asset_per_stage_and_load_without_a_jvm():
    namespace = {"__name__": "shops"}
    exec(PROGRAM + DEFINITIONS, namespace)
    job = namespace["defs"].resolve_job_def("shops_batch")
    assert len(job.asset_layer.executable_asset_keys) == 2


def test_the_partitioned_definitions_have_schedules_checks_and_a_janitor():
    namespace = {"__name__": "shops"}
    exec(PROGRAM + DEFINITIONS + PARTITIONS, namespace)
    defs = namespace["defs"]
    assert sorted(s.name for s in defs.schedules) == ["daily_janitor_schedule", "daily_schedule"]
    assert defs.resolve_job_def("daily_janitor")
    stages = [node for node in defs.resolve_asset_graph().asset_nodes if node.is_materializable]
    assert all(node.has_self_dependency and node.is_partitioned for node in stages)


def test_the_malformed_rows_of_a_source_are_an_asset():
    namespace = {"__name__": "shops"}
    exec(PROGRAM + DEFINITIONS + MALFORMED + "defs = unified_definitions(checked)", namespace)
    keys = {key.to_user_string() for key in namespace["defs"].resolve_asset_graph().get_all_asset_keys()}
    assert "checked/malformed/sales" in keys


def test_the_deployment_gives_a_job_and_a_sensor():
    namespace = {"__name__": "shops"}
    exec(PROGRAM + DEFINITIONS + DEPLOYMENT + "defs = unified_definitions(pipeline, deployment)", namespace)
    defs = namespace["defs"]
    assert [s.name for s in defs.sensors] == ["shops_heartbeat_sensor", "shops_streaming_sensor"]
    for verb in ("streaming", "control"):
        assert defs.resolve_job_def(f"shops_{verb}")


def test_the_command_prints_what_the_readme_says(tmp_path):
    (tmp_path / "shops.py").write_text(PROGRAM)
    done = subprocess.run([str(Path(sys.executable).with_name("dagster-unified")), "run", "shops.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("print> ")]
    assert sorted(printed) == sorted(OUTPUT.strip().splitlines())

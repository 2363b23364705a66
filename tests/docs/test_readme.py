"""The README's examples are run as they stand; `test_package.py` runs its pipeline from the command line."""

import re
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAM, TEST, DEFINITIONS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_pipeline_is_short_and_its_test_passes():
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= 20
    namespace = {"__name__": "shops"}
    sys.modules.setdefault("shops", type(sys)("shops"))
    exec(PROGRAM + TEST, namespace)


def test_the_definitions_have_an_asset_per_stage_and_load_without_a_jvm():
    namespace = {"__name__": "shops"}
    exec(PROGRAM + DEFINITIONS, namespace)
    job = namespace["defs"].resolve_job_def("shops_batch")
    stages = [key for key in job.asset_layer.executable_asset_keys if key.path[-1].endswith("_stage")]
    assert len(stages) == 2

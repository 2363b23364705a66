"""What is loaded when: told by `sys.modules` of a fresh process, and by import-linter (`make check`)."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dagster_unified

PIPELINE = """
from typing import NamedTuple
from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.api import functions as F

class Sale(NamedTuple):
    shop: str
    amount: int

pipeline = Pipeline("shops")
sales = pipeline.from_source(CsvSource("sales.csv", Sale, name="sales"))
totals = sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount))
totals.sink_to(DeltaSink("out", mode="upsert", key="shop"))
files = pipeline.from_source(CsvSource("in/*.csv", Sale, name="files"))
files.where(F.coalesce("amount", F.lit(0)) > 0).print()
"""
HEAVY = ("pyspark", "py4j", "dagster", "pandas", "matplotlib", "deltalake", "pendulum", "rich")


def loaded(folder, program, modules=HEAVY):
    """Which of some modules a program has loaded at its end."""
    (folder / "shops.py").write_text(PIPELINE)
    ending = f"import json, sys; print('\\n' + json.dumps([m for m in {modules!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{ending}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_explaining_a_pipeline_loads_neither_spark_nor_dagster(tmp_path):
    explained = """
from dagster_unified.cli import main
try:
    main(["explain", "shops.py"])
except SystemExit as ended:
    assert ended.code == 0
"""
    assert loaded(tmp_path, explained) == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["version"], ["rn"], ["run", "--help"], ["config", "show", "--help"]]
)
def test_the_command_line_itself_loads_nothing_that_only_some_commands_need(arguments, tmp_path):
    asked = f"""
from dagster_unified.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
"""
    ours = [f"dagster_unified.{package}" for package in ("api", "connectors", "engine", "orchestration")]
    assert loaded(tmp_path, asked, [*(set(HEAVY) - {"rich"}), "pyarrow", "numpy", "msgspec", *ours]) == []


def test_the_harness_loads_neither_spark_nor_dagster(tmp_path):
    run = """
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline
from dagster_unified.api import Pipeline
pipeline = Pipeline("words")
pipeline.from_collection([("a", 1), ("a", 2)], name="words").key_by(0).sum(1).print("out")
assert run_pipeline(pipeline, "BATCH").only() == [("a", 3)]
assert_same_in_both_modes(pipeline)
"""
    assert set(loaded(tmp_path, run)) <= {"pandas"}  # pyarrow looks for pandas itself


@pytest.mark.spark
def test_a_batch_run_loads_what_runs_streams_and_iterations_only_if_its_plan_has_them(tmp_path):
    run = """
from typing import NamedTuple
from dagster_unified.api import Pipeline

class Sale(NamedTuple):
    shop: str
    amount: int

pipeline = Pipeline("shops")
sales = pipeline.from_collection([Sale("north", 3), Sale("north", 4)], name="sales")
sales.filter(lambda sale: sale.amount > 0).key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount)).print()
pipeline.execute({"execution.runtime-mode": "BATCH"}, storage="storage", master="local[1]").result()
"""
    package = Path(dagster_unified.__file__).parent
    folders = [package / "engine" / name for name in ("streaming", "iterations")]
    files = [file.relative_to(package.parent).with_suffix("") for folder in folders for file in folder.rglob("*.py")]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files]
    assert len(modules) > 20
    assert loaded(tmp_path, run, modules) == []


def test_only_one_module_knows_what_dagster_does_not_publish():
    package = Path(dagster_unified.__file__).parent
    reaching = [f.name for f in package.rglob("*.py") if re.search(r"dagster\._", f.read_text())]
    assert reaching == ["_dagster_compat.py"]


def test_asking_a_level_for_its_state_loads_no_operators():
    """Spark does that at the start of a query, in a Python process for each level."""
    asked = """
import pickle, sys
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.streaming.processor import KeyGroupProcessor

class Client:
    pass

class Handle:
    _statefulProcessorApiClient = Client()
    def getMapState(self, name, key, value): print(name)

processor = pickle.loads(pickle.dumps(KeyGroupProcessor(Payload(b"", fresh=True))))
processor.init(Handle())
processor.close()
print([m for m in sys.modules if m.startswith(("pyarrow", "dagster_unified.operators"))])
"""
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines() == ["pages", "[]"]


def test_workers_that_write_and_read_savepoints_load_no_packages_for_paths(tmp_path):
    written = """
import sys
import pyarrow as pa
from dagster_unified.engine.state_tables import worker
from dagster_unified.state.tables import Split, data_file, read_split, write_file
from dagster_unified.state.manifest import OperatorState

table = pa.table({"k": [1]})
assert write_file(table.to_batches(), table.schema, sys.argv[1] + "/one.parquet") == 1
schema = '{"type": "struct", "fields": [{"name": "k", "type": "long", "nullable": true, "metadata": {}}]}'
state = OperatorState("u", "n", "", [], schema, 1, 1, [data_file(sys.argv[1], "one.parquet")])
(rows,) = read_split(sys.argv[1], state, Split("one.parquet", [0]))
assert rows.to_pylist() == [{"k": 1}]
print([m for m in ("upath", "fsspec", "s3fs", "pyspark", "dagster") if m in sys.modules])
"""
    command = [sys.executable, "-c", written, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_no_files_import_each_other_in_a_circle():
    """Also not under TYPE_CHECKING, or inside functions, where import-linter does not look."""
    imports = imports_of(Path(dagster_unified.__file__).parent)
    assert [sorted(circle) for circle in circles(imports)] == []


def imports_of(package):
    """The modules of a package, and which of them each imports."""
    paths = {".".join(p.relative_to(package.parent).with_suffix("").parts): p for p in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (submodules & modules.keys()) or {node.module}
        found[name] = imported & modules.keys() - {name}
    return found


def circles(imports):
    """The sets of modules each of which leads to all others of its set."""
    reach = {}
    for start in imports:
        seen, pending = set(), [start]
        while pending:
            for name in imports[pending.pop()] - seen:
                seen.add(name)
                pending.append(name)
        reach[start] = seen
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in reach if name in reach[name]}


def test_a_worker_of_a_stream_needs_no_package_for_paths(tmp_path):
    """It needs pyspark, pyarrow and msgspec: what else a driver has, an environment that is shipped may lack."""
    (tmp_path / "3").write_text("v1")
    program = f"""
import sys
sys.modules["upath"] = None
from dagster_unified.engine.streaming import processor, worker
from dagster_unified.engine.worker import this_epoch
assert this_epoch({str(tmp_path)!r}) == 3
"""
    subprocess.run([sys.executable, "-c", program], check=True)

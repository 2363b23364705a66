"""The command line.

`init` a project; write the `record` class for a file or a table; `run` and `explain` a pipeline; `list`
deployments with their state; `start`, `suspend`, `stop`, `resume` and `drain` one in STREAMING; take, list and go back
to its savepoints (`savepoint`, `savepoints`, `restore`); run new code beside it and put it in its place (`shadow`,
`swap`); look at the `state` in savepoints, and at `malformed` rows;
list the `connectors`; `stop-connect-server`, `config show`, `version`.

The only package that talks to a terminal. A user's mistake is one sentence and exit code 2; a run that failed is exit
code 1, one that was interrupted 130 (SIGINT) or 143 (SIGTERM).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from dagster_unified.cli import deployments, listing, pipelines, shadow, starting, state
from dagster_unified.cli.record.command import record
from dagster_unified.cli.terminal import complain
from dagster_unified.errors import UnifiedError

app = App(
    name="dagster-unified",
    help="Write a data pipeline once, run it in batch or streaming on Spark under Dagster.",
    version_flags=[],
    suppress_keyboard_interrupt=False,  # it would end the program without a word
)
config = App(name="config", help="Look at the settings.")
config.command(pipelines.show)
for command in (
    pipelines.init,
    record,
    pipelines.run,
    pipelines.explain,
    deployments.malformed,
    pipelines.connectors,
    starting.start,
    deployments.suspend,
    deployments.stop,
    deployments.resume,
    deployments.drain,
    deployments.savepoint,
    deployments.savepoints,
    deployments.restore,
    shadow.shadow,
    shadow.swap,
    deployments.stop_connect_server,
    state.state,
    config,
    pipelines.version,
):
    app.command(command)
app.command(listing.list_deployments, name="list")
app.command(pipelines.check_java_command, name="check-java", show=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point."""
    try:
        code = app(
            list(arguments) if arguments is not None else None,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (CycloptsError, UnifiedError) as error:
        complain(f"dagster-unified: {error}")
        code = 2
    except KeyboardInterrupt:
        complain("dagster-unified: interrupted before anything ran")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)

import pytest

from dagster_unified.cli import main, terminal


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs the command line in the test's folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        terminal.out.cache_clear()  # a console keeps the width that the terminal has when it is made
        terminal.err.cache_clear()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run

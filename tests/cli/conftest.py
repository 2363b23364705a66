import pytest

from dagster_unified.cli import main


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs the command line in the test's folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run

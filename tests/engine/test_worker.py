"""What a worker knows of the epoch that it works on."""

import pytest

from dagster_unified.engine.worker import committed_epoch, this_epoch


@pytest.mark.parametrize(
    ("logged", "epoch", "committed"), [([], -1, None), (["0"], 0, None), (["0", "9", ".10.crc", "10"], 10, 9)]
)
def test_where_spark_does_not_tell_the_epoch_it_is_the_last_of_the_querys_log(tmp_path, logged, epoch, committed):
    for name in logged:
        (tmp_path / name).touch()
    assert (this_epoch(str(tmp_path)), committed_epoch(str(tmp_path))) == (epoch, committed)

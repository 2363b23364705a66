"""Which files of a folder count, where each attempt of a task leaves its own."""

from dagster_unified.spark_internals.in_place import committed


def test_files_of_attempts_without_a_mark_do_not_count_and_of_two_with_one_those_of_the_first():
    found = {
        "0-7/part-00000.parquet": 10,
        "0-7/_committed": 0,
        "1-8/part-00001.parquet": 20,  # was given up
        "1-10/half=0/part-00001.parquet": 30,
        "1-10/half=1/part-00001.parquet": 40,
        "1-10/_committed": 0,
        "1-9/part-00001.parquet": 50,  # woke up late
        "1-9/_committed": 0,
        "11-12/_committed": 0,  # had no rows
        "part-00003.parquet": 60,
        "half=1/part-00004.parquet": 70,
        "_SUCCESS": 0,
    }
    assert committed(found) == {
        "0-7/part-00000.parquet": 10,
        "1-10/half=0/part-00001.parquet": 30,
        "1-10/half=1/part-00001.parquet": 40,
        "part-00003.parquet": 60,  # by another committer
        "half=1/part-00004.parquet": 70,
    }
    assert committed({}) == {}

"""The pictures of rows per partition and of keys per key group: which bars they have, and whence."""

import base64
from io import BytesIO

import pytest
from dagster import AssetKey, AssetMaterialization, DagsterInstance
from PIL import Image

from dagster_unified.orchestration.metadata import OPERATORS, SHOWN, around, keys_per_group, picture, rows_per_partition
from dagster_unified.orchestration.producers import latest_metadata

MINE, OTHERS = (0x4F, 0x43, 0xDD), (0xB8, 0xB5, 0xD6)
ASSET = AssetKey(["sales", "totals"])


def shown(instance, keys, made):
    """The picture after a run that has made so many rows of some partitions."""
    own = {key: {"dagster/row_count": rows} for key, rows in made.items()}
    return rows_per_partition(keys, {**latest_metadata(instance, ASSET, around(keys, made)), **own}, made)


def bars(drawn):
    """The bars from left to right: whose each is, and how high."""
    drawn = image(drawn, "rows per partition")
    found = []
    for x in range(drawn.width):
        column = [drawn.getpixel((x, y)) for y in range(drawn.height)]
        of = next((c for c in (MINE, OTHERS) if column.count(c) > 2), None)
        if of is not None and (not found or found[-1][0] != of or found[-1][2] < x - 1):
            found.append((of, column.count(of), x))
        elif of is not None:
            found[-1] = (of, max(found[-1][1], column.count(of)), x)
    return [(of == MINE, height) for of, height, _ in found]


def image(drawn, title):
    encoded = drawn.md_str.removeprefix(f"![{title}](data:image/png;base64,").removesuffix(")")
    return Image.open(BytesIO(base64.b64decode(encoded))).convert("RGB")


def charts(drawn):
    """The charts from top to bottom, each as the heights of its columns of pixels, from left to right."""
    drawn = image(drawn, "keys per key group")
    filled = [[drawn.getpixel((x, y)) == MINE for x in range(drawn.width)] for y in range(drawn.height)]
    found, last = [], -100
    for y, row in enumerate(filled):
        if any(row):
            if y - last > 10:  # more than the line of the mean hides
                found.append([0] * drawn.width)
            found[-1] = [height + here for height, here in zip(found[-1], row, strict=True)]
            last = y
    return found


@pytest.fixture
def instance():
    with DagsterInstance.ephemeral() as found:
        yield found


def test_each_partition_has_a_bar_and_the_runs_own_stand_out():
    drawn = bars(picture({"a": 100, "b": 50, "c": 200}, ["b"]))
    assert [mine for mine, _ in drawn] == [False, True, False]
    a, b, c = (height for _, height in drawn)
    assert abs(a - 2 * b) <= 2
    assert abs(c - 4 * b) <= 4


def test_other_partitions_are_as_they_were_materialized_last(instance):
    for partition, rows in (("1", 5), ("2", 1), ("2", 40), ("9", 7)):
        instance.report_runless_asset_event(
            AssetMaterialization(ASSET, partition=partition, metadata={"dagster/row_count": rows})
        )
    drawn = bars(shown(instance, ["1", "2", "3", "4", "9"], {"3": 20}))
    assert [mine for mine, _ in drawn] == [False, False, True, False]
    assert drawn[1][1] > drawn[2][1] > drawn[3][1] > drawn[0][1]


def test_of_many_partitions_the_last_before_the_runs_own_are_shown(instance):
    keys = [str(i) for i in range(3 * SHOWN)]
    for key in keys:
        instance.report_runless_asset_event(
            AssetMaterialization(ASSET, partition=key, metadata={"dagster/row_count": 10})
        )
    drawn = bars(shown(instance, keys, {keys[2 * SHOWN]: 10}))
    assert len(drawn) == SHOWN
    assert [mine for mine, _ in drawn] == [False] * (SHOWN - 1) + [True]


def heights(chart, groups):
    """How high the bar of each group is, in its middle; the first and the last bar fill their places."""
    left = next(x for x, height in enumerate(chart) if height)
    width = (len(chart) - next(x for x, height in enumerate(reversed(chart)) if height) - left) / groups
    return [chart[left + int((group + 0.5) * width)] for group in range(groups)]


def test_each_key_group_has_a_bar_as_high_as_it_has_keys():
    (chart,) = charts(keys_per_group({"totals": [30, 10, 0, 20]}))
    first, second, third, fourth = heights(chart, 4)
    assert third == 0
    assert abs(first - 3 * second) <= 4  # the line of the mean is above one bar, and in the others
    assert abs(fourth - 2 * second) <= 4


def test_the_most_uneven_operators_come_first_and_of_many_the_others_are_left_out():
    spread = {f"even {number}": [5, 5, 5] for number in range(OPERATORS)}
    found = charts(keys_per_group({"nothing": [0, 0], **spread, "odd $x": [6, 1, 2]}))
    assert len(found) == OPERATORS
    first, second, third = heights(found[0], 3)
    assert first > third > second
    assert len(set(heights(found[1], 3))) == 1

"""How many keys of a savepoint each key group has."""

from datetime import datetime, timezone

import pyarrow as pa
import pytest

from dagster_unified.operators.keys import key_hash
from dagster_unified.state import Savepoint
from dagster_unified.state import manifest as manifests
from dagster_unified.state.tables import keys_per_group

SHOPS = [f"shop {n}" for n in range(1000)]
DAYS = [datetime(2024, 1, 1 + n % 28, tzinfo=timezone.utc) for n in range(1000)]


def counted(tmp_path, table, key, **options):
    Savepoint.new("shops").with_state("totals", table, key=key).write(str(tmp_path / "savepoint"))
    folder, manifest = manifests.read(str(tmp_path / "savepoint"))
    return keys_per_group(folder, manifest.operator("totals"), 8, **options)


@pytest.mark.parametrize(("key", "keys"), [("shop", SHOPS), (("shop", "day"), list(zip(SHOPS, DAYS, strict=True)))])
def test_a_key_is_counted_in_the_group_that_holds_it(tmp_path, key, keys):
    expected = [sum(key_hash(one) % 8 == group for one in keys) for group in range(8)]
    assert counted(tmp_path, pa.table({"shop": SHOPS, "day": DAYS, "amount": range(1000)}), key) == expected


def test_of_many_keys_the_number_is_an_estimate(tmp_path):
    found = counted(tmp_path, pa.table({"shop": SHOPS, "amount": range(1000)}), "shop", sample=300)
    assert sum(found) == 1000
    assert all(one % 4 == 0 for one in found)


def test_keys_that_are_records_are_not_counted(tmp_path):
    nested = pa.table({"place": [{"shop": shop} for shop in SHOPS], "amount": range(1000)})
    assert counted(tmp_path, nested, "place") is None

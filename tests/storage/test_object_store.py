"""What the clients of a process are told of an object store, and what a store has to say of itself."""

import boto3
import pytest

from dagster_unified.errors import ConfigurationError
from dagster_unified.storage import object_store
from dagster_unified.storage.object_store import Store


def test_a_token_of_the_machine_does_not_go_with_another_key(monkeypatch):
    monkeypatch.setattr(object_store, "_in_use", [])
    for name in (*Store("http://store", key="a", secret="b").environment(), *object_store.TOKENS):
        monkeypatch.setenv(name, "of the machine")
    object_store.use(Store("http://store", key="a", secret="b"))
    found = boto3.session.Session().get_credentials()
    assert (found.access_key, found.secret_key, found.token) == ("a", "b", None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"key": "a"}, "the object store at Amazon has a key and no secret; give both, or neither"),
        ({"endpoint": "http://s", "secret": "b"}, "the object store at http://s has a secret and no key; give both"),
    ],
)
def test_a_key_has_a_secret(given, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        Store(**given)

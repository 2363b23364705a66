from tests.servers.mariadb import mariadb, mariadb_server  # noqa: F401

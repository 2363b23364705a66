"""Real servers for tests, each started by this process, on loopback only."""

"""A Dagster project as a team has it, with one pipeline of this library in its middle; `jobs/team_demo.py` runs it."""

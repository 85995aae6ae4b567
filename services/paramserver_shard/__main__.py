"""`python -m paramserver_shard`: one shard process."""

from paramserver_shard.main import app

app()

"""`python -m paramserver_shard` is `paramserver-shard`."""

from paramserver_shard.main import app

if __name__ == "__main__":
    app()

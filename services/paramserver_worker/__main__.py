"""`python -m paramserver_worker` is `paramserver-worker`."""

from paramserver_worker.main import app

if __name__ == "__main__":
    app()

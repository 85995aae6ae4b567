"""`python -m paramserver_scheduler` is `paramserver-scheduler`."""

from paramserver_scheduler.main import app

if __name__ == "__main__":
    app()

"""What holds for every test: generated examples have no time limit, and on CI they are the same in every run."""

import os

from hypothesis import settings

settings.register_profile("paramserver", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("paramserver")

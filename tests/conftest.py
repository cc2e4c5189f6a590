"""What every test shares: hypothesis draws the same examples on each run and does not time them."""

import os

from hypothesis import settings

settings.register_profile("default", derandomize=True, deadline=None, max_examples=50)
# As many fresh examples as patience allows: pytest --hypothesis-profile=long
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("default")


def _keep_to_one_core() -> None:
    """Give each process of pytest-xdist a core: runtimes that share cores mostly wait for each other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})


_keep_to_one_core()

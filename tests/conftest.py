"""What every test shares: hypothesis draws the same examples on each run and does not time them."""

from hypothesis import settings

settings.register_profile("default", derandomize=True, deadline=None, max_examples=50)
# As many fresh examples as patience allows: pytest --hypothesis-profile=long
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("default")

"""Whether tests run whole products of their cases, or as many that each value of a list meets each of another."""

import os

#: EVERY_PAIR=1 in the environment: whole products.
EVERY_PAIR = os.environ.get("EVERY_PAIR") == "1"

"""What each process that the tests start does first: see `conftest.py`."""

import sys
from typing import Any

# jsonschema asks for this package and can do without it. To import it takes two seconds, because
# it parses a large grammar, and whatever belongs to Jupyter, Sphinx or Ray imports jsonschema.
modules: dict[str, Any] = sys.modules
modules["rfc3987_syntax"] = None

"""The examples of the page on testing are run as they stand."""

import re
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


def test_the_examples_of_the_page_on_testing_hold():
    sys.modules.setdefault("testing_page", type(sys)("testing_page"))
    exec("".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), {"__name__": "testing_page"})

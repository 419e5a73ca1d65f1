"""JSON that a regular expression holds to its form: python -m examples.json_output"""

import json

from examples.command import main
from jaxserve import function, gen

USER = r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"age"\s*:\s*\d+\s*,\s*"city"\s*:\s*"[^"]*"\s*\}'
ITEMS = [{}]


@function
def json_output(s):
    """Makes up a user."""
    s += 'Make up a user as { "name": "...", "age": number, "city": "..." }\n'
    s += gen("json", max_tokens=100, regex=USER)


if __name__ == "__main__":
    main(json_output, ITEMS, lambda state: str(json.loads(state["json"])))

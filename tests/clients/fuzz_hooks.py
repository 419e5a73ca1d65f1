"""What schemathesis is told so that most cases get past the checks: see SCHEMATHESIS_HOOKS."""

import random

import schemathesis

NEEDED = {
    "prompt", "messages", "input", "tokens", "text", "input_ids", "query", "items",
    "label_token_ids", "input_file_id", "endpoint", "completion_window", "sampling_params",
}  # fmt: skip
"""Fields that a case keeps where it has them."""
AS_MADE = 0.2
"""Share of the cases that go out as schemathesis made them."""


@schemathesis.hook
def before_call(context, case, kwargs):
    """Few of a body's optional fields at once: most pairs of them can't be, or hide each other."""
    body, chance = case.body, random.Random(repr(case.body))
    if not isinstance(body, dict) or chance.random() < AS_MADE:
        return
    body = _thinned(body, chance)
    if isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] = _thinned(body["sampling_params"], chance)
    if case.path == "/generate":
        given = [name for name in ("text", "input_ids") if body.get(name)]
        for name in given[1:]:
            del body[name]
        body |= {} if given else {"text": "Once"}
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and (message.get("content") is None or len(message) > 2):
            message.clear()
            message |= {"role": chance.choice(["system", "user", "assistant"]), "content": "Hi"}
    case.body = body


def _thinned(body, chance):
    others = sorted(body.keys() - NEEDED)
    kept = chance.sample(others, min(len(others), chance.randrange(5)))
    return {name: value for name, value in body.items() if name in NEEDED or name in kept}

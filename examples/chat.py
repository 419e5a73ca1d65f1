"""A chat of three turns: python -m examples.chat"""

from examples.command import main
from jaxserve import assistant, function, gen, user

QUESTIONS = [
    "What is the capital of France?",
    "What should I see there in one day?",
    "And what should I eat there?",
]
ITEMS = [{"questions": QUESTIONS}]


@function
def chat(s, questions):
    """Asks one question after the other. A turn computes only what is new in it."""
    for question in questions:
        s += user(question)
        s += assistant(gen(max_tokens=60, temperature=0))


if __name__ == "__main__":
    main(chat, ITEMS)

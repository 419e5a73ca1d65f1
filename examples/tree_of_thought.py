"""Thoughts that branch, and a judge that keeps the best: python -m examples.tree_of_thought

After Tree of Thoughts, arXiv:2305.10601: a breadth-first search that keeps one thought a level.
"""

from examples.command import main
from jaxserve import assistant, function, gen, select, system, user

QUESTION = "A farmer has 17 sheep, buys 8 more and sells 5. How many sheep has he now?"
ITEMS = [{"question": QUESTION, "width": 4, "depth": 3}]
VERDICTS = ["sure", "likely", "impossible"]


def score(thought):
    """The share of its verdict that says yes."""
    scores = dict(zip(VERDICTS, thought.get_meta("verdict")["scores"], strict=True))
    return scores["sure"] - scores["impossible"]


@function
def tree_of_thought(s, question, width, depth):
    """Answers a question by `depth` steps, each the best of `width`."""
    s += system("You solve problems step by step, one short sentence at a time.")
    s += user(f"{question}\nWrite the first step.")
    for level in range(depth):
        with s.fork(width) as thoughts:
            for i, thought in enumerate(thoughts):
                thought += assistant(
                    gen("step", max_tokens=40, stop="\n", temperature=0.8, seed=width * level + i)
                )
                thought += user(
                    "Does this step lead to the answer? Say sure, likely or impossible."
                )
                thought += assistant(select("verdict", VERDICTS))
        best = max(thoughts, key=score)
        s += assistant(best["step"])
        s += user("Write the next step." if level < depth - 1 else "Now the answer, as a number.")
    s += assistant(gen("answer", dtype=int, temperature=0))


if __name__ == "__main__":
    main(tree_of_thought, ITEMS)

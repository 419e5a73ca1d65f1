"""Qwen3 may think first: it writes <think>, or its template does; without it there is none."""

from jaxserve.entry.parsers.reasoning.think_tags import BEGIN, ThinkTags


class Qwen3(ThinkTags):
    def __init__(self, prompt_end: str):
        """`prompt_end`: how the prompt ends, perhaps with thinking begun."""
        super().__init__(prompt_end.rstrip().endswith(BEGIN))

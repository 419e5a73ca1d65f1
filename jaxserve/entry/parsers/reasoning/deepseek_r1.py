"""DeepSeek-R1 always thinks first; its template writes <think>, or the model does."""

from jaxserve.entry.parsers.reasoning.think_tags import END, ThinkTags


class DeepSeekR1(ThinkTags):
    def __init__(self, prompt_end: str):
        """`prompt_end`: how the prompt ends; thinking that it has closed already is over."""
        super().__init__(not prompt_end.rstrip().endswith(END))

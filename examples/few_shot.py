"""Eight questions behind the same examples, side by side: python -m examples.few_shot"""

from examples.command import main
from jaxserve import function, gen

SHOTS = [
    ("France", "Paris", "Europe"),
    ("Japan", "Tokyo", "Asia"),
    ("Kenya", "Nairobi", "Africa"),
    ("Peru", "Lima", "South America"),
    ("Canada", "Ottawa", "North America"),
    ("Australia", "Canberra", "Oceania"),
]
COUNTRIES = ["Germany", "Egypt", "India", "Chile", "Mexico", "Italy", "China", "Spain"]
ITEMS = [{"countries": COUNTRIES}]


@function
def few_shot(s, countries):
    """Names the capital of each country. The examples are computed once for all of them."""
    s += "For each country its capital and the continent that it is on.\n\n"
    for country, capital, continent in SHOTS:
        s += f"Country: {country}\nCapital: {capital}\nContinent: {continent}\n\n"
    with s.fork(len(countries)) as forks:
        for fork, country in zip(forks, countries, strict=True):
            fork += f"Country: {country}\nCapital:"
            fork += gen("capital", max_tokens=8, stop="\n", temperature=0)
            fork += "\nContinent:" + gen("continent", max_tokens=8, stop="\n", temperature=0)
    return [
        f"{country}: {fork['capital'].strip()}, {fork['continent'].strip()}"
        for country, fork in zip(countries, forks, strict=True)
    ]


if __name__ == "__main__":
    main(few_shot, ITEMS, lambda state: "\n".join(state.returned))

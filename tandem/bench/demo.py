"""What `tandem demo` asks: tasks that people have, some that copy much of the prompt and some that do not."""

from __future__ import annotations

from tandem.bench.prompts import Item

__all__ = ["DEMO_PROMPTS"]

_CODE = """class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price, count=1):
        self.items.append((name, price, count))

    def total(self):
        result = 0
        for name, price, count in self.items:
            result += price * count
        return result
"""

_LETTER = """Dear Ms Alvarez,

the committee has met on Tuesday and has looked at your request to use the hall on Friday evenings. We are
glad to say that the hall is free from six to nine, that the rent is forty euros an evening, and that the key
is with the caretaker.

Kind regards,
Tom Berger"""

DEMO_PROMPTS = (
    Item(
        "rename",
        "edit",
        f"Rename the class Basket to Cart and the method add to put. Answer with the whole code.\n\n{_CODE}",
    ),
    Item(
        "letter",
        "rewrite",
        f"Copy this letter, but change Friday to Saturday and the signature to Ada Berger.\n\n{_LETTER}",
    ),
    Item("function", "code", "Write a Python function that returns the n-th Fibonacci number, with a short docstring."),
    Item(
        "table",
        "rewrite",
        "Turn this into a Markdown table with the columns city, country and river: Paris lies in France on"
        " the Seine, Vienna in Austria on the Danube, Cairo in Egypt on the Nile, London in England on the Thames.",
    ),
    Item("facts", "question", f"When is the hall free, what does it cost, and who has the key?\n\n{_LETTER}"),
    Item("tides", "question", "Why are there two high tides a day and not one? Explain it to a child."),
)

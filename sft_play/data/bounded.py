"""A jinja environment whose templates end: their steps are counted, and texts that explode are refused.

jinja2's sandbox bounds a single range and nothing else: two nested loops run for hours.
"""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox

STEPS = 10_000_000
"""Of one rendering: a round of a loop is one, a call many; templates of the field need some for each message."""
_CALL_STEPS = 25
CHARACTERS = 1 << 27
"""Of one rendering: several times what a row of any use holds."""
_COUNTED = "sft_play_counted"


class Unbounded(Exception):
    """A template that takes too many steps or writes too much."""


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """jinja2's immutable sandbox that also counts. `steps` has to be set to 0 before each rendering."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self.filters[_COUNTED] = _counted

    def take(self, steps: int) -> None:
        """Count steps.

        Raises:
            Unbounded: they are too many.
        """
        self.steps += steps
        if self.steps > STEPS:
            raise Unbounded(f"takes more than {STEPS:,} steps for one conversation")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes comes by here."""
        self.take(_CALL_STEPS)
        return super().call(*args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Products, of which those of a text and a number can be of any size."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and abs(left) > 1 and right * left.bit_length() > CHARACTERS:
            raise Unbounded("raises a number to a power that no memory holds")
        for text, times in ((left, right), (right, left)):
            repeated = isinstance(text, str | list | tuple) and isinstance(times, int)
            if operator == "*" and repeated and len(text) * times > CHARACTERS:
                raise Unbounded(f"repeats a text {times:,} times")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Put the count before every loop."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree


def check_length(text: str) -> None:
    """Refuse a text that no row of any use is as long as.

    Raises:
        Unbounded: naming its length.
    """
    if len(text) > CHARACTERS:
        raise Unbounded(f"writes {len(text):,} characters for one conversation")


@jinja2.pass_context  # type: ignore[untyped-decorator]
def _counted(context: jinja2.runtime.Context, values: Any) -> Any:
    """The values of a loop, after their number is counted; a generator's are counted as they come."""
    if not hasattr(values, "__len__"):
        return _counted_one_by_one(context.environment, values)
    context.environment.take(len(values))
    return values


def _counted_one_by_one(environment: Any, values: Any) -> Any:
    for value in values:
        environment.take(1)
        yield value

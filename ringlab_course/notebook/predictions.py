"""Ask the learner for a guess before a run, store it, and compare it with the measured result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ringlab.errors import CourseError
from ringlab.viz.frontend import import_widgets, in_notebook, is_live
from ringlab_course.notebook.progressfile import ProgressFile

SECTION = "predictions"
TOO_LATE = "closed: the measurement was seen before a prediction was made (reopen=True asks again)."
CLOSE = 1.1
"""A number within this factor of the measured one counts as right, unless the measured one is a count."""
COUNTABLE = 1000
"""A whole number below this limit is a count, which has to be guessed exactly."""
ROOM = "800px"
"""Height of a question without an answer, which keeps the text after the question off the screen.

That text gives the result away. Jupyter's sanitizer accepts `height` in px, but neither `min-height` nor vh.
"""


@dataclass(frozen=True)
class Question:
    """A prediction's question, which asks for one of `choices` or for a number in `unit`."""

    key: str
    text: str
    choices: tuple[str, ...] = ()
    unit: str = ""

    def parse(self, answer: Any) -> str | float:
        """Return the answer in the form that is stored.

        Raises: CourseError for an answer that is not one of the choices, or not a finite number.
        """
        if self.choices:
            if answer in self.choices:
                return str(answer)
            raise CourseError(f"one of {', '.join(map(repr, self.choices))}", repr(answer))
        try:
            value = float(answer)
        except (TypeError, ValueError):
            raise CourseError("a number", repr(answer)) from None
        if not math.isfinite(value):
            raise CourseError("a finite number", repr(answer))
        return value


_asked: dict[str, Question] = {}
_forms: dict[str, Any] = {}
"""The widget of each question that is shown with a widget."""


def predict(
    key: str,
    text: str,
    choices: Sequence[str] | None = None,
    *,
    unit: str = "",
    answer: Any = None,
    reopen: bool = False,
) -> None:
    """Ask for a guess and keep it: with buttons for `choices`, otherwise with a field for a number in `unit`.

    A guess can be given once, and only before `compare` has shown the result. `answer` gives the guess in
    code instead of by a click. `reopen` deletes the guess and the result.
    """
    question = Question(key, text, tuple(choices or ()), unit)
    _asked[key] = question
    if reopen:
        ProgressFile().forget(SECTION, key)
    if answer is not None:
        print(commit(question, answer))
    elif not is_live() and in_notebook():
        _show_static(question)
    elif _closed(key) or not is_live():
        print(static_form(question))
    else:
        _show_widget(question)


def commit(question: Question, answer: Any) -> str:
    """Keep `answer` unless the question is closed; return the text to show to the learner."""
    if closed := _closed(question.key):
        return closed
    guess = question.parse(answer)
    ProgressFile().update(SECTION, question.key, guess=guess)
    _close_room(question.key)
    return f"you predicted: {_shown(guess, question.unit)}. Now run on."


def static_form(question: Question) -> str:
    """Return the question as text, with the guess if there is one."""
    lines = [f"Predict: {question.text}"]
    lines += [f"  ( ) {choice}" for choice in question.choices]
    if not question.choices:
        lines.append(f"  ____ {question.unit}".rstrip())
    return "\n".join([*lines, closed] if (closed := _closed(question.key)) else lines)


def compare(key: str, measured: Any, *, unit: str = "") -> None:
    """Print the measured result next to the guess made in `predict(key, …)`, and close the question."""
    question = _asked.get(key)
    unit = unit or (question.unit if question else "")
    file = ProgressFile()
    guess = file.get(SECTION, key).get("guess")
    measured = float(measured) if isinstance(measured, Real) or hasattr(measured, "item") else str(measured)
    verdict = (
        "no prediction was made"
        if guess is None
        else f"you predicted {_shown(guess, unit)}: " + _judged(guess, measured)
    )
    print(f"measured: {_shown(measured, unit)} ({verdict})")
    file.update(SECTION, key, measured=measured, locked=True)
    _close_room(key)


def is_right(guess: Any, measured: Any) -> bool:
    """Return whether a guess is right: the same choice or count, or a number within 10 percent."""
    if isinstance(guess, str) or isinstance(measured, str):
        return guess == measured
    if float(measured).is_integer() and abs(measured) < COUNTABLE:
        return guess == measured
    return guess == measured or (guess * measured > 0 and max(guess / measured, measured / guess) <= CLOSE)


def _judged(guess: Any, measured: Any) -> str:
    if is_right(guess, measured):
        return "right"
    if isinstance(guess, str) or isinstance(measured, str):
        return "not so; what does that tell you?"
    if guess * measured <= 0:
        return f"off by {abs(measured - guess):.3g}"
    factor = max(guess / measured, measured / guess)
    return f"{'too low' if abs(guess) < abs(measured) else 'too high'} by a factor of {factor:.3g}"


def _closed(key: str) -> str:
    entry = ProgressFile().get(SECTION, key)
    if "guess" in entry:
        question = _asked.get(key)
        return f"you predicted: {_shown(entry['guess'], question.unit if question else '')}."
    return TOO_LATE if entry.get("locked") else ""


def _shown(value: Any, unit: str) -> str:
    """Return a value with its unit. Whole numbers keep all digits: 35,355 tokens instead of 3.536e+04."""
    if not isinstance(value, str):
        is_count = 1e4 <= abs(value) < 1e12 and float(value).is_integer()
        value = f"{value:,.0f}" if is_count else f"{value:.4g}"
    return f"{value} {unit}".strip()


def _show_static(question: Question) -> None:
    """Show the question as it appears in a notebook that nobody has run yet, with empty space below it."""
    from IPython.display import display

    text = static_form(question)
    page = (
        f'<div style="height: {ROOM}"><pre>{_escaped(text)}</pre>'
        "<p><em>Run this cell to answer. The lesson goes on below.</em></p></div>"
    )
    display({"text/plain": text, "text/html": page}, raw=True)


def _close_room(key: str) -> None:
    if form := _forms.pop(key, None):
        form.layout.min_height = None


def _show_widget(question: Question) -> None:
    ipywidgets = import_widgets()
    from IPython.display import display

    status = ipywidgets.HTML(description="", layout=ipywidgets.Layout(margin="4px 0"))
    status.value = "<i>Commit yourself before you run on. The lesson goes on below.</i>"
    heading = ipywidgets.HTML(f"<b>Predict:</b> {_escaped(question.text)}")
    controls = _buttons(question, status) if question.choices else _number_field(question, status)
    form = ipywidgets.VBox(
        [heading, ipywidgets.HBox(controls), status], layout=ipywidgets.Layout(min_height=ROOM)
    )
    _forms[question.key] = form
    display(form)


def _buttons(question: Question, status: Any) -> list[Any]:
    ipywidgets = import_widgets()

    wide = ipywidgets.Layout(width="auto")
    buttons = [ipywidgets.Button(description=choice, layout=wide) for choice in question.choices]

    def clicked(button: Any) -> None:
        status.value = _escaped(commit(question, button.description))
        button.button_style = "primary"
        # The clicked button stays enabled, because a disabled one would lose the focus that Shift+Enter
        # needs. Clicking it again changes nothing.
        for other in buttons:
            other.disabled = other is not button

    for button in buttons:
        button.on_click(clicked)
    return buttons


def _number_field(question: Question, status: Any) -> list[Any]:
    ipywidgets = import_widgets()

    # The number is sent when the field is left. Sent on every keystroke, "16" could be kept as "1", because
    # keystrokes queue behind a busy kernel while a click is sent at once.
    field = ipywidgets.Text(
        placeholder="a number", continuous_update=False, layout=ipywidgets.Layout(width="10em")
    )
    button = ipywidgets.Button(description="Commit", layout=ipywidgets.Layout(width="auto"))

    def clicked(_: Any) -> None:
        try:
            status.value = _escaped(commit(question, field.value.strip().replace(",", "")))
        except CourseError:
            status.value = "Please give a number, as in 3.5 or 2e6."
            return
        field.disabled = True  # the button stays enabled to keep the focus: see `_buttons`

    button.on_click(clicked)
    return [field, ipywidgets.Label(question.unit), button]


def _escaped(text: str) -> str:
    import html

    return html.escape(text)

"""The page that a student reads: what was missed, in words, before any number."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grader.grade import Result
from grader.report import as_sentence, score_of, sentence_of

PAGE = "feedback.html"


def write_feedback(result: Result, folder: Path) -> None:
    """Write feedback.html into `folder`: one file, no script, nothing loaded from elsewhere."""
    # Whatever a student wrote is text here: everything is escaped.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("feedback.html.j2").render(
        result=result,
        score_of=score_of,
        sentence_of=sentence_of,
        as_sentence=as_sentence,
        seed=_seed_of(result),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(page, encoding="utf-8")


def _seed_of(result: Result) -> int | None:
    """What --seed needs to repeat the inputs; None if no check was judged.

    Each check has the seed of the run plus its own position. One that needs a person has none.
    """
    judged = (
        check.seed - position
        for position, check in enumerate(result.checks)
        if not check.needs_human
    )
    return next(judged, None)

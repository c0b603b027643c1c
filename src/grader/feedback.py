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
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(page, encoding="utf-8")

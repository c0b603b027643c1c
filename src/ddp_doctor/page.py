"""The report as one self-contained page, light and dark. The only file that needs Jinja2."""

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, select_autoescape

if TYPE_CHECKING:
    from ddp_doctor.report import Report


def write_page(report: "Report", path: Path, book: str = "") -> Path:
    """Render `report.html.j2`. Raises OSError if the file cannot be written."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    step = report.equation.step
    weights = [] if step is None else [(entry, weight) for entry, weight in step.weights()][:64]
    largest = max((abs(weight) for _, weight in weights), default=1.0) or 1.0
    text = environment.get_template("report.html.j2").render(
        report=report,
        run=report.run,
        equation=report.equation,
        step=step,
        weights=weights,
        largest=max(largest, 1.0),
        findings=report.findings,
        book=book,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path

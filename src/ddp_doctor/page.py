"""The report as one self-contained page, light and dark. The only file that needs Jinja2."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape

from ddp_doctor.equation import Equation
from ddp_doctor.findings import Finding
from ddp_doctor.merged import Run


def write_page(
    run: Run, equation: Equation, findings: list[Finding], path: Path, book: str = ""
) -> None:
    """Render `report.html.j2`. Raises OSError if the file cannot be written."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    step = equation.step
    weights = [] if step is None else [(entry, weight) for entry, weight in step.weights()][:64]
    largest = max((abs(weight) for _, weight in weights), default=1.0) or 1.0
    text = environment.get_template("report.html.j2").render(
        run=run,
        equation=equation,
        step=step,
        weights=weights,
        largest=max(largest, 1.0),
        findings=findings,
        book=book,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

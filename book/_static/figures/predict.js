// The forms of exercises that ask for a prediction (labkit/book/predict.py writes them). A reader
// answers every row; then each answer gets a mark and the value that was printed, and the folded
// solution opens. Without this script the forms stay hidden.
(function () {
  "use strict";

  // "0.25", "1/4", "25%", "−3", "1,5". NaN: cannot be read.
  function read(text) {
    const percent = text.trim().endsWith("%") ? 100 : 1;
    const number = text.trim().replace(/%$/, "").replace("−", "-").replace(",", ".");
    const [over, under = "1", ...more] = number.split("/");
    if (more.length || !over.trim() || !under.trim()) return NaN;
    return Number(over) / Number(under) / percent;
  }

  // A number within 2 %, a cosine within 0.005. 1 is exact: a cosine of 0.998 is a wrong direction.
  function agrees(given, answer, cosine) {
    const right = Number(answer);
    if (Number.isNaN(right)) return given === answer;
    const found = read(given);
    if (cosine && (found === 1 || right === 1)) return found === right;
    return Math.abs(found - right) <= (cosine ? 0.005 : 0.02 * Math.abs(right)) + 1e-12;
  }

  function open(solution) {
    const folded = document.getElementById(solution);
    if (folded?.classList.contains("toggle-hidden")) folded.querySelector("button")?.click();
  }

  function check(form) {
    const fields = [...form.querySelectorAll("input, select")];
    const status = form.querySelector("[role=status]");
    const missing = fields.filter((field) => !field.value.trim());
    const unread = fields.find((field) => field.matches("input") && field.value.trim()
      && Number.isNaN(read(field.value)));
    if (unread) {
      status.textContent = `“${unread.value.trim()}” is no number. Write 0.25, 1/4, or 25%.`;
      unread.focus();
      return;
    }
    if (missing.length) {
      status.textContent =
        missing.length === 1 ? "One answer is missing." : `${missing.length} answers are missing.`;
      missing[0].focus();
      return;
    }
    let right = 0;
    for (const field of fields) {
      const { answer } = field.dataset;
      const as_predicted = field.matches("select")
        ? field.value === answer : agrees(field.value, answer, "cosine" in field.dataset);
      right += as_predicted;
      const verdict = field.nextElementSibling;
      verdict.className = `verdict ${as_predicted ? "right" : "wrong"}`;
      verdict.textContent = as_predicted ? "✓" : `✗ ${answer}`;
    }
    status.textContent = `${right} of ${fields.length} as predicted. The solution is open below.`;
    open(form.dataset.solution);
  }

  for (const form of document.querySelectorAll("form.predict")) {
    form.hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      check(form);
    });
  }
})();

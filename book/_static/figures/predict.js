// The forms of exercises that ask for a prediction (labkit/book/predict.py writes them). A reader
// answers every row; then each answer gets a mark and the value that was printed, and the folded
// solution opens. Without this script the forms stay hidden.
(function () {
  "use strict";

  // "0.25", "1/4", "−3", "1,5". NaN: cannot be read.
  function read(text) {
    const [over, under = "1", ...more] = text.replace("−", "-").replace(",", ".").split("/");
    return more.length || !over.trim() || !under.trim() ? NaN : Number(over) / Number(under);
  }

  // Five percent: a reader who writes 1.2 has predicted 1.17.
  function agrees(given, answer) {
    const right = Number(answer);
    if (Number.isNaN(right)) return given === answer;
    return Math.abs(read(given) - right) <= 0.05 * Math.abs(right);
  }

  function open(solution) {
    const folded = document.getElementById(solution);
    if (folded?.classList.contains("toggle-hidden")) folded.querySelector("button")?.click();
  }

  function check(form) {
    const fields = [...form.querySelectorAll("input, select")];
    const status = form.querySelector("[role=status]");
    const missing = fields.filter(
      (field) => !field.value || (field.matches("input") && Number.isNaN(read(field.value))));
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
        ? field.value === answer : agrees(field.value, answer);
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

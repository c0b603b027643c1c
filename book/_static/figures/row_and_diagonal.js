// One figure of the four samples stays in view, and shows the state of the section that is read.
//
// Every section has its state as a still picture, drawn when the book is built. This copies what
// differs from the still into the figure; style sheets move it there.
(function () {
  "use strict";

  const story = document.querySelector(".row-and-diagonal-story");
  const stage = story.querySelector(".stage");
  const sections = [...story.querySelectorAll(".states > section")];
  const drawing = stage.querySelector("svg");
  const status = stage.querySelector("[role=status]");
  const [back, next] = stage.querySelectorAll("button");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const parts = (svg) => [...svg.querySelectorAll("[data-part]")];
  let current = -1;

  function show(index) {
    if (index === current) return;
    current = index;
    const section = sections[index];
    const still = section.querySelector(".row-and-diagonal svg");
    const shown = new Map(parts(drawing).map((part) => [part.dataset.part, part]));
    for (const part of parts(still)) {
      const mine = shown.get(part.dataset.part);
      for (const name of ["class", "style"])
        if (part.hasAttribute(name)) mine.setAttribute(name, part.getAttribute(name));
      if (part.localName === "text") mine.textContent = part.textContent;
    }
    const heading = section.querySelector("h2").cloneNode(true);
    heading.querySelector(".headerlink")?.remove();
    status.textContent = `${index + 1} of ${sections.length}: ${heading.textContent}`;
    back.setAttribute("aria-disabled", String(index === 0));
    next.setAttribute("aria-disabled", String(index === sections.length - 1));
  }

  // The section in the upper part of what the figure leaves free.
  function read() {
    const beside = stage.offsetWidth < story.offsetWidth / 1.5;
    const from = beside ? 0 : stage.getBoundingClientRect().bottom;
    const line = from + 0.45 * (innerHeight - from);
    const begun = sections.filter((each) => each.getBoundingClientRect().top <= line);
    show(Math.max(0, begun.length - 1));
  }

  function go(step) {
    const index = Math.min(sections.length - 1, Math.max(0, current + step));
    show(index);
    history.replaceState(history.state, "", `#${sections[index].id}`);
    sections[index].scrollIntoView({ behavior: calm.matches ? "auto" : "smooth" });
  }

  back.addEventListener("click", () => go(-1));
  next.addEventListener("click", () => go(1));
  stage.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(step);
  });
  let waiting = false;
  const soon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      read();
    });
  };
  addEventListener("scroll", soon, { passive: true });
  addEventListener("resize", soon);
  const addressed = sections.findIndex((each) => `#${each.id}` === location.hash);
  if (addressed > 0) show(addressed);
  else read();
  stage.classList.add("moves");
})();

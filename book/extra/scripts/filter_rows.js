// A field that hides what lacks one of the words in it: the innermost sections of this page, or
// where it has none, the rows of its tables. `data-rows` names other elements. With `data-unequal`,
// the words of a row include "unequal" and the heads of those columns in which it is neither equal
// nor empty; the section `data-legend` always stays. Without JavaScript the page is a plain list. The words may also come in the address:
// ?words=hangs+epoch
const given = {
  rows: "",
  label: "What do you see?",
  placeholder: "hangs, clipping, learning rate …",
  unit: "symptoms",
  ...document.currentScript.dataset,
};

const wordsOf = (row) => {
  const words = [row.textContent];
  const table = row.closest("table");
  if (table && "unequal" in given) {
    [...row.cells].forEach((cell, i) => {
      if (i > 2 && !["equal", "–"].includes(cell.textContent.trim())) {
        words.push("unequal", table.rows[0].cells[i].textContent);
      }
    });
  }
  return words.join(" ").toLowerCase();
};

document.addEventListener("DOMContentLoaded", () => {
  const all = (selector) => [...document.querySelectorAll(`.bd-article ${selector}`)];
  const inner = all("section section section");
  const rows = all(given.rows || (inner.length ? "section section section" : "table tbody tr"));
  const texts = rows.map(wordsOf);

  const label = document.createElement("label");
  label.className = "filter-rows";
  label.append(`${given.label} `);
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = given.placeholder;
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  label.append(field);
  document.querySelector(".bd-article h1 ~ p").after(label, count);

  const apply = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
    });
    const shown = rows.filter((row) => !row.hidden);
    for (const section of all("section section:not(section section section)")) {
      const useful = section.id === given.legend || shown.some((row) => section.contains(row));
      section.hidden = words.length > 0 && !useful;
    }
    count.textContent = words.length ? `${shown.length} of ${rows.length} ${given.unit}` : "";
  };
  field.addEventListener("input", () => {
    apply();
    const address = new URL(location.href);
    if (field.value) address.searchParams.set("words", field.value);
    else address.searchParams.delete("words");
    history.replaceState(null, "", address);
  });
  field.value = new URLSearchParams(location.search).get("words") ?? "";
  apply();
});

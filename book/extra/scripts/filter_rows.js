// A field that hides the rows of this page's tables that lack one of the words in it. Without
// JavaScript the tables are a plain list. The words may also come in the address: ?words=hangs+epoch
document.addEventListener("DOMContentLoaded", () => {
  const rows = [...document.querySelectorAll(".bd-article table tbody tr")].map((row) => ({
    row,
    text: row.textContent.toLowerCase(),
  }));
  const sections = [...document.querySelectorAll(".bd-article section section")];

  const label = document.createElement("label");
  label.className = "filter-rows";
  label.append("What do you see? ");
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "hangs, clipping, learning rate …";
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  label.append(field);
  document.querySelector(".bd-article h1 ~ p").after(label, count);

  const apply = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { row, text } of rows) {
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const section of sections) {
      const table = section.querySelector("table");
      section.hidden = words.length > 0 && !table?.querySelector("tbody tr:not([hidden])");
    }
    const shown = rows.filter(({ row }) => !row.hidden).length;
    count.textContent = words.length ? `${shown} of ${rows.length} symptoms` : "";
  };
  field.addEventListener("input", apply);
  field.value = new URLSearchParams(location.search).get("words") ?? "";
  apply();
});

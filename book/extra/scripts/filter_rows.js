// A field that hides the symptoms of this page that lack one of the words in it: its innermost
// sections, or where it has none, the rows of its tables. Without JavaScript the page is a plain
// list. The words may also come in the address: ?words=hangs+epoch
document.addEventListener("DOMContentLoaded", () => {
  const all = (selector) => [...document.querySelectorAll(`.bd-article ${selector}`)];
  const inner = all("section section section");
  const symptoms = inner.length ? inner : all("table tbody tr");
  const texts = symptoms.map((symptom) => symptom.textContent.toLowerCase());

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
    symptoms.forEach((symptom, i) => {
      symptom.hidden = !words.every((word) => texts[i].includes(word));
    });
    const shown = symptoms.filter((symptom) => !symptom.hidden);
    for (const section of all("section section:not(section section section)")) {
      section.hidden = words.length > 0 && !shown.some((symptom) => section.contains(symptom));
    }
    count.textContent = words.length ? `${shown.length} of ${symptoms.length} symptoms` : "";
  };
  field.addEventListener("input", apply);
  field.value = new URLSearchParams(location.search).get("words") ?? "";
  apply();
});

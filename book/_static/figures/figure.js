// The frame of every figure to play with: controls, state, address, and helpers for drawing.
//
// A figure is one call of Figures.register (book/README.md describes it). The frame finds
// each <figure class="playable" data-figure="NAME"> of the page, replaces its still picture, and
// calls the figure's draw() after every change of the state. It loads nothing and works from
// file://.
(function () {
  "use strict";

  const definitions = new Map();
  const mounted = [];
  let counter = 0;

  const COLORS = [
    "ink", "muted", "line", "paper", "soft", "compute", "network", "right", "wrong", "accent",
    "on", "done", "rank0", "rank1", "rank2", "rank3", "rank4", "rank5", "rank6", "rank7",
  ];
  const color = Object.fromEntries(COLORS.map((name) => [name, `var(--figure-${name})`]));
  color.rank = (rank) => color[`rank${rank % 8}`];

  // ---- elements -------------------------------------------------------------------------------

  function fill(element, attributes, parent) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on") && typeof value === "function")
        element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined)
        element.setAttribute(name, value);
    }
    parent?.append(element);
    return element;
  }

  const html = (name, attributes, parent) =>
    fill(document.createElement(name), attributes, parent);
  const svg = (name, attributes, parent) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, parent);

  const number = (value, digits = 2) => {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "undefined" : "infinite";
    const rounded = value.toFixed(digits);
    return (Number(rounded) === 0 ? rounded.replace("-", "") : rounded).replace("-", "−");
  };

  // ---- the state in the address ---------------------------------------------------------------

  const copy = (value) => JSON.parse(JSON.stringify(value));
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

  function write(value) {
    if (typeof value === "boolean") return value ? "1" : "0";
    if (!Array.isArray(value)) return encodeURIComponent(String(value));
    const nested = value.some(Array.isArray);
    return value.map(write).join(nested ? ";" : ",");
  }

  // The type follows from the value that the figure starts with. Undefined: cannot be read.
  function read(text, like) {
    if (typeof like === "boolean") return { 1: true, 0: false, true: true, false: false }[text];
    if (typeof like === "number") {
      const value = text.trim() === "" ? NaN : Number(text);
      return Number.isFinite(value) ? value : undefined;
    }
    if (Array.isArray(like)) {
      const nested = like.some(Array.isArray);
      const first = nested ? (like.find(Array.isArray) ?? []) : (like[0] ?? 0);
      if (text === "") return nested ? [[]] : [];
      const parts = text.split(nested ? ";" : ",").map((part) => read(part, first));
      return parts.includes(undefined) ? undefined : parts;
    }
    return decodeURIComponent(text);
  }

  function readState(query, start) {
    const found = {};
    for (const pair of query.split("&")) {
      const at = pair.indexOf("=");
      const key = pair.slice(0, at);
      if (at < 0 || !Object.hasOwn(start, key)) continue;
      let value;
      try {
        value = read(pair.slice(at + 1), start[key]);
      } catch {
        continue; // a broken escape
      }
      if (value !== undefined) found[key] = value;
    }
    return found;
  }

  function fromAddress(name, alone) {
    const fragment = location.hash.slice(1);
    const at = fragment.indexOf(":");
    if (at >= 0) return fragment.slice(0, at) === name ? fragment.slice(at + 1) : null;
    return alone && fragment.includes("=") ? fragment : null;
  }

  const flat = (controls) =>
    controls.flatMap((each) => (each.kind === "more" ? flat(each.controls) : [each]));

  // ---- one figure on the page -----------------------------------------------------------------

  class Mounted {
    constructor(definition, figure) {
      this.definition = definition;
      this.figure = figure;
      this.id = `figure-${definition.name}-${(counter += 1)}`;
      this.start = this.clean({
        ...copy(definition.state),
        ...readState(figure.dataset.state ?? "", definition.state),
      });
      this.state = copy(this.start);
      this.signature = null;
      this.unfolded = new Set();
      this.build();
    }

    controlsOf(state) {
      const { controls } = this.definition;
      return typeof controls === "function" ? controls(state) : (controls ?? []);
    }

    // Keeps a state from an address within what the controls allow.
    clean(given) {
      const state = { ...given };
      for (const control of flat(this.controlsOf(state))) {
        if (!control.key) continue;
        const value = state[control.key];
        if (control.kind === "slider" && !control.values)
          state[control.key] = Math.min(control.max, Math.max(control.min, value));
        const allowed =
          control.values ?? (control.kind === "choice" && control.options.map(([each]) => each));
        const start = this.definition.state[control.key];
        if (allowed && !allowed.includes(value) && value !== start) state[control.key] = start;
      }
      return this.definition.clean ? this.definition.clean(state) : state;
    }

    build() {
      const { figure, definition, id } = this;
      const live = html("div", { class: "figure-live" });
      const heading = html("p", { class: "figure-title", id: `${id}-title` }, live);
      heading.textContent = definition.title;
      html("p", { class: "figure-try", text: figure.dataset.try ?? definition.tryThis }, live);
      this.controls = html(
        "div",
        { class: "figure-controls", role: "group", "aria-labelledby": `${id}-title` },
        live,
      );
      this.drawing = svg("svg", {
        class: "figure-drawing",
        role: definition.interactive ? "group" : "img",
        "aria-labelledby": `${id}-title`,
        "aria-describedby": `${id}-says`,
      });
      const box = html("div", { class: "figure-box" }, live);
      box.append(this.drawing);
      this.says = html("p", { class: "figure-says", id: `${id}-says`, "aria-live": "polite" }, live);
      this.after = html("div", { class: "figure-after" }, live);
      const bar = html("div", { class: "figure-bar" }, live);
      const button = (text, onclick) => html("button", { type: "button", text, onclick }, bar);
      button("Copy link", () => this.copy(this.address(), "Link"));
      button("Reset", () => this.change(copy(this.start)));
      this.note = html("span", { class: "figure-note", role: "status" }, bar);

      this.live = live;
      this.box = box;
      figure.insertBefore(live, figure.querySelector("figcaption"));
      figure.classList.add("is-live");
      this.width = this.measure();
      this.readAddress(false);
      this.show();
      figure.querySelector(".figure-still")?.remove();
      new ResizeObserver(() => {
        const width = this.measure();
        if (width !== this.width) {
          this.width = width;
          this.show();
        }
      }).observe(box);
    }

    measure() {
      return Math.round(Math.min(760, Math.max(320, this.box.clientWidth || 760)));
    }

    tools() {
      const { drawing, width } = this;
      const tools = {
        width,
        color,
        html,
        svg: (name, attributes, parent = drawing) => svg(name, attributes, parent),
        text: (x, y, text, attributes = {}, parent = drawing) =>
          svg("text", { x, y, fill: color.ink, "font-size": 14, ...attributes, text }, parent),
        // Text in lines of at most `wide` px, the first at y; returns the y below the last.
        paragraph: (x, y, text, wide, attributes = {}, parent = drawing) => {
          const size = attributes["font-size"] ?? 14;
          for (const line of broken(text, wide, size, attributes["font-weight"])) {
            tools.text(x, y, line, attributes, parent);
            y += Math.round(size * 1.4);
          }
          return y;
        },
        textWidth,
        height: (pixels) => drawing.setAttribute("viewBox", `0 0 ${width} ${Math.ceil(pixels)}`),
        number,
        // A folded part below the drawing, which stays open when the figure is drawn again.
        fold: (label, parent = this.after) => {
          const details = html("details", { class: "figure-more", open: this.unfolded.has(label) }, parent);
          html("summary", { text: label, "data-focus": label }, details);
          details.addEventListener("toggle", () => {
            this.unfolded[details.open ? "add" : "delete"](label);
          });
          return details;
        },
        draggable: (element, actions) => this.draggable(element, actions),
        page: (path) => (document.documentElement.dataset.content_root ?? "./") + path,
        calm: matchMedia("(prefers-reduced-motion: reduce)").matches,
        after: this.after,
        copy: (text, name) => this.copy(text, name),
        link: () => this.address(),
        figure: this.figure,
      };
      return tools;
    }

    // An element of the drawing that moves: move(x, y, state) for a pointer, in the drawing's
    // coordinates, and nudge(dx, dy, state) for an arrow key, with dx and dy of −1, 0, or 1.
    draggable(element, { move, nudge }) {
      const { drawing } = this;
      element.classList.add("figure-draggable");
      element.addEventListener("pointerdown", (down) => {
        down.preventDefault();
        element.focus();
        const follow = (event) => {
          const place = new DOMPoint(event.clientX, event.clientY);
          const { x, y } = place.matrixTransform(drawing.getScreenCTM().inverse());
          move(x, y, this.state);
        };
        const stop = () => {
          removeEventListener("pointermove", follow);
          removeEventListener("pointerup", stop);
          removeEventListener("pointercancel", stop);
        };
        addEventListener("pointermove", follow);
        addEventListener("pointerup", stop);
        addEventListener("pointercancel", stop);
      });
      const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      element.addEventListener("keydown", (event) => {
        if (!nudge || !arrows[event.key]) return;
        event.preventDefault();
        nudge(...arrows[event.key], this.state);
      });
    }

    change(part) {
      const next = this.clean({ ...this.state, ...part });
      if (same(next, this.state)) return;
      this.state = next;
      this.note.textContent = "";
      this.show();
      this.writeAddress();
    }

    show() {
      const change = (part) => this.change(part);
      const tools = this.tools();
      this.showControls(change, tools);
      keepingFocus(this.live, () => {
        this.drawing.replaceChildren();
        this.after.replaceChildren();
        tools.height(200);
        this.definition.draw(this.drawing, this.state, change, tools);
      });
      const says = this.definition.says(this.state);
      if (this.says.textContent !== says) this.says.textContent = says;
    }

    // The controls are made anew only if their list changes, so that a slider can be dragged.
    showControls(change, tools) {
      const list = this.controlsOf(this.state);
      const signature = JSON.stringify(list);
      if (signature !== this.signature) {
        this.signature = signature;
        const open = [...this.controls.querySelectorAll("details")].map((each) => each.open);
        keepingFocus(this.controls, () => {
          this.controls.replaceChildren();
          this.updates = list.map((each) => this.control(each, this.controls, change, tools));
        });
        this.controls.querySelectorAll("details").forEach((each, index) => {
          each.open = open[index] ?? false;
        });
      }
      for (const update of this.updates) update(this.state, list);
    }

    // Makes one control; returns the function that shows a state in it.
    control(control, parent, change, tools) {
      const make = KINDS[control.kind];
      if (!make) throw new Error(`${this.definition.name}: there is no control "${control.kind}"`);
      return make(this, control, parent, change, tools);
    }

    query() {
      return Object.keys(this.definition.state)
        .filter((key) => !same(this.state[key], this.start[key]))
        .map((key) => `${key}=${write(this.state[key])}`)
        .join("&");
    }

    address() {
      const query = this.query();
      const base = location.href.split("#")[0];
      return query ? `${base}#${this.definition.name}:${query}` : base;
    }

    writeAddress() {
      clearTimeout(this.writing); // browsers limit how often an address may change
      this.writing = setTimeout(() => history.replaceState(history.state, "", this.address()), 150);
    }

    readAddress(show = true) {
      const query = fromAddress(this.definition.name, document.querySelectorAll("figure.playable").length === 1);
      if (query === null) return;
      this.state = this.clean({ ...copy(this.start), ...readState(query, this.definition.state) });
      if (show) this.show();
      this.figure.scrollIntoView({ block: "start" });
    }

    async copy(text, name) {
      let copied = false;
      try {
        await navigator.clipboard.writeText(text);
        copied = true;
      } catch {
        const area = html("textarea", { class: "figure-hidden", "aria-label": name }, this.live);
        area.value = text;
        area.select();
        copied = document.execCommand("copy"); // for browsers that keep the clipboard from files
        area.remove();
      }
      this.note.textContent = copied ? `${name} copied.` : `Copy this: ${text}`;
    }
  }

  // What replaces the focused element takes the focus: the one with the same data-focus, or else
  // the one in its place.
  function keepingFocus(parent, work) {
    const kinds = "input, select, button, summary, textarea, a[href], [tabindex]";
    const focusable = () => [...parent.querySelectorAll(kinds)];
    const active = document.activeElement;
    const index = parent.contains(active) ? focusable().indexOf(active) : -1;
    const key = index >= 0 ? active.dataset.focus : undefined;
    work();
    if (index < 0 || active.isConnected) return;
    const now = focusable();
    const again = (key && now.find((each) => each.dataset.focus === key)) || now[index];
    again?.focus({ preventScroll: true });
  }

  // ---- kinds of controls ----------------------------------------------------------------------

  // The values of a slider: all of them, so that a logarithmic one has even notches, too.
  function notches({ min, max, step = 1, scale, values }) {
    if (values) return values;
    if (scale === "log") {
      const factor = step > 1 ? step : 2;
      const count = Math.round(Math.log(max / min) / Math.log(factor));
      const exact = Number.isInteger(factor) && Number.isInteger(min);
      return Array.from({ length: count + 1 }, (_, index) => {
        const value = min * factor ** index;
        return exact ? value : Number(value.toPrecision(3));
      });
    }
    const count = Math.round((max - min) / step);
    return Array.from({ length: count + 1 }, (_, index) =>
      Number((min + index * step).toPrecision(12)),
    );
  }

  const nearest = (values, value) =>
    values.reduce(
      (best, each, index) => (Math.abs(each - value) < Math.abs(values[best] - value) ? index : best),
      0,
    );

  const KINDS = {
    slider(mount, control, parent, change) {
      const id = `${mount.id}-${control.key}`;
      const values = notches(control);
      const box = html("div", { class: "figure-control figure-slider" }, parent);
      const label = html("label", { for: id, text: control.label }, box);
      const input = html("input", {
        type: "range", id, min: 0, max: values.length - 1, step: 1,
        "data-key": control.key, "data-focus": control.key,
        oninput: () => change({ [control.key]: values[Number(input.value)] }),
      }, box);
      const output = html("output", { for: id, "aria-live": "off" }, box); // the slider says it
      label.append(" ");
      return (state, list) => {
        const now = flat(list).find((each) => each.kind === "slider" && each.key === control.key);
        const format = now?.format ?? ((value) => String(value));
        const value = state[control.key];
        const text = format(value) + (control.unit ? ` ${control.unit}` : "");
        input.value = nearest(values, value);
        input.setAttribute("aria-valuetext", text);
        output.textContent = text;
      };
    },

    choice(mount, control, parent, change) {
      const set = control.options.length > (control.most ?? 4) ? asSelect : asRadios;
      return set(mount, control, parent, change);
    },

    switch(mount, control, parent, change) {
      const id = `${mount.id}-${control.key}`;
      const box = html("div", { class: "figure-control figure-switch" }, parent);
      const input = html("input", {
        type: "checkbox", role: "switch", id, "data-key": control.key, "data-focus": control.key,
        disabled: control.disabled,
        onchange: () => change({ [control.key]: input.checked }),
      }, box);
      html("label", { for: id, text: control.label }, box);
      return (state) => {
        input.checked = state[control.key];
      };
    },

    button(mount, control, parent) {
      const box = html("div", { class: "figure-control" }, parent);
      const button = html("button", {
        type: "button", text: control.label, "data-focus": control.label,
        "aria-disabled": control.disabled ? "true" : null,
      }, box);
      let press = control.press;
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-disabled") !== "true") mount.change(press(mount.state) ?? {});
      });
      return (state, list) => {
        const now = flat(list).find((each) => each.kind === "button" && each.label === control.label);
        press = now?.press ?? press;
      };
    },

    presets(mount, control, parent, change) {
      const box = html("div", {
        class: "figure-control figure-presets", role: "group", "aria-label": control.label,
      }, parent);
      html("span", { class: "figure-label", text: control.label, "aria-hidden": "true" }, box);
      const buttons = control.options.map(([name, preset]) =>
        html("button", {
          type: "button", text: name, "data-focus": name, onclick: () => change(copy(preset)),
        }, box),
      );
      return (state) =>
        control.options.forEach(([, preset], index) => {
          const pressed = Object.entries(preset).every(([key, value]) => same(state[key], value));
          buttons[index].setAttribute("aria-pressed", String(pressed));
        });
    },

    // Folds the controls that a first look does not need.
    more(mount, control, parent, change, tools) {
      const details = html("details", { class: "figure-more" }, parent);
      html("summary", { text: control.label, "data-focus": control.label }, details);
      const box = html("div", { class: "figure-controls" }, details);
      const updates = control.controls.map((each) => mount.control(each, box, change, tools));
      return (state, list) => updates.forEach((update) => update(state, list));
    },

    // make() may return a function that shows a state; without one it is called again.
    own(mount, control, parent, change, tools) {
      const box = html("div", { class: "figure-control figure-own" }, parent);
      let update = control.make(box, mount.state, change, tools);
      let shown = JSON.stringify(mount.state);
      return (state) => {
        if (typeof update === "function") return update(state);
        if (JSON.stringify(state) === shown) return undefined;
        shown = JSON.stringify(state);
        return keepingFocus(box, () => {
          box.replaceChildren();
          update = control.make(box, state, change, mount.tools());
        });
      };
    },
  };

  function asRadios(mount, control, parent, change) {
    const name = `figure-control figure-choice${control.question ? " is-question" : ""}`;
    const box = html("fieldset", { class: name }, parent);
    html("legend", { text: control.label }, box);
    const row = html("div", { class: "figure-options" }, box);
    const inputs = control.options.map(([value, name], index) => {
      const id = `${mount.id}-${control.key}-${index}`;
      const option = html("span", { class: "figure-option" }, row);
      const input = html("input", {
        type: "radio", id, name: `${mount.id}-${control.key}`, value,
        "data-key": control.key, "data-focus": `${control.key}=${value}`,
        onchange: () => change({ [control.key]: value }),
      }, option);
      html("label", { for: id, text: name }, option);
      return input;
    });
    return (state) =>
      control.options.forEach(([value], index) => {
        inputs[index].checked = state[control.key] === value;
      });
  }

  function asSelect(mount, control, parent, change) {
    const id = `${mount.id}-${control.key}`;
    const box = html("div", { class: "figure-control figure-select" }, parent);
    html("label", { for: id, text: control.label }, box);
    const select = html("select", {
      id, "data-key": control.key, "data-focus": control.key,
      onchange: () => change({ [control.key]: control.options[select.selectedIndex][0] }),
    }, box);
    for (const [value, name] of control.options) html("option", { value, text: name }, select);
    return (state) => {
      select.selectedIndex = control.options.findIndex(([value]) => value === state[control.key]);
    };
  }

  // ---- text -----------------------------------------------------------------------------------

  const pen = document.createElement("canvas").getContext("2d");

  function textWidth(text, size = 14, weight = 400) {
    pen.font = `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  }

  function broken(text, wide, size, weight) {
    const lines = [];
    for (const word of text.split(" ")) {
      const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
      if (lines.length && textWidth(longer, size, weight) <= wide) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines;
  }

  // ---- the page -------------------------------------------------------------------------------

  function mountAll() {
    for (const figure of document.querySelectorAll("figure.playable:not(.is-live)")) {
      const definition = definitions.get(figure.dataset.figure);
      if (!definition) continue;
      mounted.push(new Mounted(definition, figure));
    }
  }

  // A figure's drawing as a file of its own: colors and fonts that a page would have given it.
  function still(name) {
    const { drawing, says, definition } = mounted.find((each) => each.definition.name === name);
    const style = getComputedStyle(drawing);
    const [, , width, height] = drawing.getAttribute("viewBox").split(" ");
    const out = drawing.cloneNode(true);
    for (const attribute of [...out.attributes]) out.removeAttribute(attribute.name);
    const given = {
      xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`,
      "font-family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
    };
    for (const [key, value] of Object.entries(given)) out.setAttribute(key, value);
    const paper = svg("rect", { width, height, fill: color.paper });
    out.prepend(svg("title", { text: definition.title }), svg("desc", { text: says.textContent }), paper);
    return new XMLSerializer()
      .serializeToString(out)
      .replaceAll(/var\((--[\w-]+)\)/g, (_, property) => style.getPropertyValue(property).trim());
  }

  window.Figures = {
    register(definition) {
      definitions.set(definition.name, definition);
      if (document.readyState !== "loading") mountAll();
    },
    still,
    states: () => Object.fromEntries(mounted.map((each) => [each.definition.name, copy(each.state)])),
  };

  document.addEventListener("DOMContentLoaded", mountAll);
  window.addEventListener("hashchange", () => mounted.forEach((each) => each.readAddress()));
})();

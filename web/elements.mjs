// Builds elements from plain values. Text is always text, never markup.

const shown = (value) => (value ?? false) !== false;

/** Replace the children of an element. Strings become text; null and false are skipped. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(shown));
  return element;
}

/** An element with attributes and children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (shown(value)) element.setAttribute(name, value);
  }
  return fill(element, children);
}

/** Load the pack's style sheet, once per page. */
export function style() {
  const href = new URL("./anygpu.css", import.meta.url).href;
  if (!document.querySelector("link[data-anygpu]")) document.head.append(make("link", { rel: "stylesheet", href, "data-anygpu": "" }));
}

/** Bytes in GB or MB, as people read them. */
export function bytes(count) {
  if ((count ?? null) === null) return "unknown";
  const gib = count / 2 ** 30;
  const mib = count / 2 ** 20;
  return gib >= 0.1 ? `${gib.toFixed(1)} GB` : `${mib.toFixed(mib < 10 ? 1 : 0)} MB`;
}

/** Seconds as 0.4 s, 12 s or 3 min 5 s. */
export function seconds(count) {
  if (count < 10) return `${count.toFixed(1)} s`;
  if (count < 100) return `${count.toFixed(0)} s`;
  const whole = Math.round(count);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** A table with column headings; the first cell of each row is the row's heading. */
export function table(columns, rows) {
  const head = make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map(([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name), cells.map((cell) => make("td", {}, cell))));
  return rows.length > 0 && make("table", {}, make("thead", {}, head), make("tbody", {}, body));
}

export const reason = (text) => text && make("div", { class: "anygpu-why" }, text);

/** A list of names, each with its text and perhaps a reason. */
export const terms = (rows, attributes) =>
  make("dl", attributes, rows.map(([name, text, why]) => [make("dt", {}, name), make("dd", {}, text, reason(why))]));

export const button = (name, onclick, more) => make("button", { type: "button", class: "anygpu-button", onclick, ...more }, name);

/** A card of something that was saved, with the attributes of its picture. */
export const kept = (picture, title, text, ...more) =>
  make("article", { class: "anygpu-kept" }, picture && make("img", picture), make("div", {}, make("h3", {}, title), make("p", {}, text), more));

/** A button that acts, and a line under it that says what happened. */
export function acting(name, act) {
  const told = make("p", { role: "status", class: "anygpu-why" });
  const element = button(name, async () => {
    element.disabled = true;
    told.textContent = (await act().catch((error) => error.message)) ?? "";
    element.disabled = false;
  });
  return make("div", {}, element, told);
}

/** A button, named `name`, that copies a text and confirms it. */
export function copyButton(text, name = "Copy") {
  const element = button(name, async () => {
    try {
      await navigator.clipboard.writeText(text);
      element.textContent = "Copied";
    } catch {
      element.textContent = "Select the text and copy it";
    }
    setTimeout(() => (element.textContent = name), 2000);
  });
  return element;
}

// Whether the open graph is tidy, in either canvas: no two nodes overlap, each stands in its group, and nothing of a node
// is cut off, neither a button nor a line of its text.
import assert from "node:assert/strict";
import { settled } from "./comfy.mjs";

const shots = process.argv.find((word) => word.startsWith("--shots="))?.slice(8);

/** Runs in the page: the box of each node and group as the canvas shows it, and what of a node sticks out of its box. */
function boxesOf(nodes2) {
  const { app, LiteGraph } = window;
  const BELOW = /^(Error|Issues|Show advanced)$/; // hang below a node whose model is not here
  /** Texts of a node in Nodes 2.0 that it, or a part of it, cuts off below. What a user writes may scroll. */
  const cutTexts = (element) =>
    [...element.querySelectorAll("*")].filter((text) => {
      const written = [...text.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
      const { bottom, height } = text.getBoundingClientRect();
      if (text.matches("textarea") ? !text.readOnly : !written) return false;
      if (height < 4 || BELOW.test(text.textContent.trim())) return false; // for screen readers
      const clips = (part) => getComputedStyle(part).overflowY !== "visible";
      if (clips(text) && text.scrollHeight > text.clientHeight + 2) return true;
      for (let part = text.parentElement; element.contains(part); part = part.parentElement) {
        if (clips(part) && bottom > part.getBoundingClientRect().bottom + 2) return true;
      }
      return bottom > element.getBoundingClientRect().bottom + 2;
    }).map((text) => `the end of "${(text.value ?? text.textContent).trim().slice(0, 40)}"`);
  const { scale } = app.canvas.ds;
  const boxes = app.graph._nodes.map((node) => {
    const box = { name: `${node.title} (${node.id})`, x: node.pos[0], y: node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, width: node.size[0], height: node.size[1] + LiteGraph.NODE_TITLE_HEIGHT, cut: [] };
    const element = nodes2 && document.querySelector(`[data-node-id="${node.id}"]`);
    if (element) {
      const shown = element.getBoundingClientRect();
      Object.assign(box, { width: shown.width / scale, height: shown.height / scale });
      for (const inner of element.querySelectorAll("button, video, img")) {
        if (BELOW.test(inner.textContent.trim())) continue;
        const { bottom, right, height } = inner.getBoundingClientRect();
        if (height && (bottom > shown.bottom + 2 || right > shown.right + 2)) box.cut.push(inner.textContent || inner.tagName);
      }
      box.cut.push(...cutTexts(element));
    }
    if (!nodes2) {
      for (const widget of node.widgets ?? []) {
        if (!node.isWidgetVisible(widget) || widget.y === undefined) continue;
        if (widget.y + (widget.computedHeight ?? 20) > node.size[1] + 8) box.cut.push(widget.name);
      }
    }
    return box;
  });
  // Texts under nodes, which grow with them in Nodes 2.0: the classic canvas gives them 200 pixels, scrolls what is taller,
  // and hides what a node has no room for.
  const texts = nodes2 ? [] : [...document.querySelectorAll(".dom-widget .overflow-y-auto.text-xs, .dom-widget .anygpu-first p")];
  const cut = texts.filter((text) => {
    const room = text.closest(".dom-widget").getBoundingClientRect();
    return text.scrollHeight > text.clientHeight + 2 || text.getBoundingClientRect().bottom > room.bottom + 2;
  });
  const groups = app.graph._groups.map(({ title, pos, size }) => ({ name: `group ${title}`, x: pos[0], y: pos[1], width: size[0], height: size[1] }));
  return { boxes, groups, texts: texts.length, cut: cut.map((text) => text.textContent.slice(0, 60)) };
}

const apart = (one, two) => one.x + one.width <= two.x || two.x + two.width <= one.x || one.y + one.height <= two.y || two.y + two.height <= one.y;
const inside = (box, group) => box.x >= group.x && box.y >= group.y && box.x + box.width <= group.x + group.width && box.y + box.height <= group.y + group.height;

function overlaps({ boxes, groups, cut }) {
  const found = boxes.flatMap((box) => box.cut.map((what) => `${box.name} cuts off ${what}`));
  found.push(...cut.map((text) => `the end is cut off: ${text}...`));
  for (const list of [boxes, groups]) {
    list.forEach((one, index) => {
      for (const two of list.slice(index + 1)) if (!apart(one, two)) found.push(`${one.name} overlaps ${two.name}`);
    });
  }
  for (const group of groups) {
    for (const box of boxes) if (!apart(box, group) && !inside(box, group)) found.push(`${box.name} sticks out of ${group.name}`);
  }
  return found;
}

/** A screenshot of the page into the folder of `--shots=`, where one is named. */
export async function shoot(page, nodes2, name, when) {
  if (shots) await page.screenshot({ path: `${shots}/${name}${nodes2 ? "_2" : ""}_${when}.png` });
}

/** Fails on anything untidy; `when` is before or after a run, which leaves texts under the nodes. */
export async function isTidy(page, nodes2, name, when) {
  await settled(page); // a node grows once its content is there
  await shoot(page, nodes2, name, when);
  const seen = await page.evaluate(boxesOf, nodes2);
  assert.deepEqual(overlaps(seen), [], `${name} ${when} a run`);
  assert.ok(nodes2 || when === "before" || seen.texts > 0, `${name}: no text under any node`);
}

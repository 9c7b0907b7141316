// Every shipped workflow in both canvases: no two nodes overlap, each stands in its group, nothing of a node is cut off.
// Before a run for all of them; after a run, with its texts and previews, for those named in RUN, or on the command line.
import assert from "node:assert/strict";
import { loadWorkflow, openPage, showAll } from "./comfy.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { ended, names, queue, shrink, shrinkPainting, source } from "./running.mjs";

const RUN = ["ltx_image_to_video", "framepack_first_last_frame", "hunyuan_video_lora", "mochi_core_ksampler", "ltx_recover_latents", "paint_v2_0"];
const named = process.argv.slice(2).filter((word) => !word.startsWith("--"));
const shots = process.argv.find((word) => word.startsWith("--shots="))?.slice(8);

/** Runs in the page: the box of each node and group as the canvas shows it, and what of a node sticks out of its box. */
function boxesOf(nodes2) {
  const { app, LiteGraph } = window;
  const { scale } = app.canvas.ds;
  const boxes = app.graph._nodes.map((node) => {
    const box = { name: `${node.title} (${node.id})`, x: node.pos[0], y: node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, width: node.size[0], height: node.size[1] + LiteGraph.NODE_TITLE_HEIGHT, cut: [] };
    const element = nodes2 && document.querySelector(`[data-node-id="${node.id}"]`);
    if (element) {
      const shown = element.getBoundingClientRect();
      Object.assign(box, { width: shown.width / scale, height: shown.height / scale });
      for (const inner of element.querySelectorAll("button, video, img")) {
        if (inner.textContent.trim() === "Error") continue; // hangs below a node whose model is not here
        const { bottom, right, height } = inner.getBoundingClientRect();
        if (height && (bottom > shown.bottom + 2 || right > shown.right + 2)) box.cut.push(inner.textContent || inner.tagName);
      }
    }
    if (!nodes2) {
      for (const widget of node.widgets ?? []) {
        if (widget.hidden || widget.y === undefined) continue;
        if (widget.y + (widget.computedHeight ?? 20) > node.size[1] + 8) box.cut.push(widget.name);
      }
    }
    return box;
  });
  const groups = app.graph._groups.map(({ title, pos, size }) => ({ name: `group ${title}`, x: pos[0], y: pos[1], width: size[0], height: size[1] }));
  return { boxes, groups };
}

const apart = (one, two) => one.x + one.width <= two.x || two.x + two.width <= one.x || one.y + one.height <= two.y || two.y + two.height <= one.y;
const inside = (box, group) => box.x >= group.x && box.y >= group.y && box.x + box.width <= group.x + group.width && box.y + box.height <= group.y + group.height;

function overlaps({ boxes, groups }) {
  const found = boxes.flatMap(({ name, cut }) => cut.map((what) => `${name} cuts off ${what}`));
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

async function checked({ page }, nodes2, name, when) {
  await page.waitForTimeout(1200); // a node grows once its content is there
  if (shots) await page.screenshot({ path: `${shots}/${name}${nodes2 ? "_2" : ""}_${when}.png` });
  assert.deepEqual(overlaps(await page.evaluate(boxesOf, nodes2)), [], `${name} ${when} a run`);
}

async function opened(open, name) {
  await loadWorkflow(open.page, await source(name), name);
  await showAll(open.page);
}

async function ranOnce(open, nodes2, name) {
  const { page } = open;
  await opened(open, name);
  await page.evaluate(() => fetch("/free", { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) }));
  await (name.startsWith("paint_") ? shrinkPainting(page) : shrink(page, { seed: Date.now() % 1e6 }));
  await queue(page);
  const seen = await ended(page, 500000);
  assert.equal(seen.ending, "execution_success", `${name}: ${seen.message}`);
  await page.waitForTimeout(2000);
  await checked(open, nodes2, name, "after");
}

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  const open = await openPage({ nodes2 });
  const faults = [];
  const each = (title, act) => check(title, act).catch((error) => faults.push(error.message));
  try {
    for (const name of named.length ? named : await names()) {
      await each(`${name} opens tidily`, async () => {
        await opened(open, name);
        await checked(open, nodes2, name, "before");
      });
    }
    for (const name of named.length ? named : RUN) await each(`${name} stays tidy when it has run`, () => ranOnce(open, nodes2, name));
    assert.deepEqual(faults, []);
  } finally {
    await open.browser.close();
  }
}

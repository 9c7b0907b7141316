// The first sight of each template, as it opens, at the widths that people have, in both canvases: letters can be read,
// and the result is in view, clear of the minimap. With --shots=DIR it takes screenshots.
import assert from "node:assert/strict";
import { loadWorkflow, openPage } from "./comfy.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { names, source } from "./running.mjs";
import { shoot } from "./tidy.mjs";

const SCREENS = [[1366, 768], [1600, 900], [1920, 1080]];
const SOME = /^anygpu_(ltx_text_to_video|framepack_image_to_video|paint_v2_0)$/; // at the larger sizes
const LETTERS = 8; // pixels, of the 14 that both canvases write a node's title with
const named = process.argv.slice(2).filter((word) => !word.startsWith("--"));

/** Runs in the page: pixels of letters, and what of each result is out of view or below the minimap. */
function sightOf() {
  const { app, LiteGraph } = window;
  const { ds, canvas } = app.canvas;
  const whole = canvas.getBoundingClientRect();
  const rect = (name) => document.querySelector(name)?.getBoundingClientRect();
  const free = rect(".graph-canvas-panel") ?? whole;
  const above = rect(".actionbar-container").bottom; // what core says of missing files hangs below it until it is closed
  const map = rect(".minimap-main-container");
  const hidden = [];
  const results = ["Preview3D", "SaveGLB", "SaveVideo"].map((kind) => app.graph._nodes.filter(({ type }) => type === kind));
  for (const { title, boundingRect } of results.find((nodes) => nodes.length) ?? []) {
    const [left, top] = [0, 1].map((side) => (boundingRect[side] + ds.offset[side]) * ds.scale + [whole.left, whole.top][side]);
    const [right, bottom] = [left + boundingRect[2] * ds.scale, top + boundingRect[3] * ds.scale];
    const out = left < free.left - 1 || top < above - 1 || right > free.right + 1 || bottom > free.bottom + 1;
    const below = map && right > map.left && bottom > map.top && left < map.right && top < map.bottom;
    if (out || below) hidden.push(`${title} is ${out ? "out of view" : "below the minimap"}`);
  }
  return { letters: LiteGraph.NODE_TEXT_SIZE * ds.scale, hidden, map: Boolean(map) };
}

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  for (const [width, height] of SCREENS) {
    const { browser, page, errors } = await openPage({ width, height, nodes2, minimap: true });
    try {
      const shown = (await names()).filter((name) => (named.length ? named.includes(name) : width === SCREENS[0][0] || SOME.test(name)));
      await check(`${shown.length} templates open legible at ${width} pixels, their results in view`, async () => {
        const wrong = [];
        for (const name of shown) {
          await loadWorkflow(page, await source(name), name);
          await shoot(page, nodes2, name, width);
          const seen = await page.evaluate(sightOf);
          assert.ok(seen.map, "no minimap");
          if (seen.letters < LETTERS) wrong.push(`${name}: letters of ${seen.letters.toFixed(1)} pixels`);
          wrong.push(...seen.hidden.map((what) => `${name}: ${what}`));
        }
        assert.deepEqual(wrong, []);
      });
      assert.deepEqual(errors, [], "the page reported errors");
    } finally {
      await browser.close();
    }
  }
}
